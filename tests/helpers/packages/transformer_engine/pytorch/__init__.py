from . import ep as ep
from .module.base import destroy_ub as destroy_ub
from .module.base import initialize_ub as initialize_ub
