"""The last module that multiprocessing's fork server imports."""

from . import _preload

_preload.finish()
