"""Integrations with other libraries, one module each; a framework is imported on first use.

``slime`` (and miles), ``megatron``, ``ray``, ``torch_memory_saver``, ``colocated`` for a trainer
that shares its devices with a rollout engine, ``vllm`` and ``sglang`` for engines in other
processes, and hooks for trainers: ``transformers``, ``lightning``, ``trl``, ``deepspeed``,
``verl``, and ``optimizers`` for any other. Importing this package imports neither a framework nor
torch.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..errors import ReloadpgError

if TYPE_CHECKING:  # names for type checkers; at run time __getattr__ finds them
    from .colocation import ColocationError, colocated
    from .torch_memory_saver import MemorySaver, MemorySaverError

__all__ = ["ColocationError", "MemorySaver", "MemorySaverError", "colocated"]

_HOMES = {
    "ColocationError": "colocation",
    "MemorySaver": "torch_memory_saver",
    "MemorySaverError": "torch_memory_saver",
    "colocated": "colocation",
}
_MODULES = frozenset(module.name for module in iter_modules(__path__))


def framework(
    name: str, install: str, *modules: str, error: type[Exception] = ReloadpgError
) -> Any:
    """Import the first of these modules that is installed, or raise an error with the remedy."""
    for module in modules:
        try:
            return import_module(module)
        except ModuleNotFoundError as missing:
            cause = missing
    raise error(f"{name} is not installed; nothing was done. Run: pip install {install}") from cause


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
