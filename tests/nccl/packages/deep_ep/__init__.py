"""A stand-in for DeepEP: what it keeps of a group, without kernels."""

from .buffers import ElasticBuffer as ElasticBuffer
from .buffers import alive as alive
