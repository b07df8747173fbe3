"""What integrations and other packages may build on, beyond the functions that programs call."""

from __future__ import annotations

from .groups.proxy import GroupState as GroupState
from .lifecycle.install import Installation as Installation
from .lifecycle.install import reload_world as reload_world

__all__ = ["GroupState", "Installation", "reload_world"]
