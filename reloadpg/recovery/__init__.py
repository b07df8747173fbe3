"""Continue after a fault: recreate all communicators behind the same objects.

``recover`` recreates the communicators in the running processes, and ``recovery_requested`` says
whether to call it. See docs/recovery.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time, __getattr__ resolves the names
    from .recovering import recover as recover
    from .recovering import recovery_requested as recovery_requested

__all__ = ["recover", "recovery_requested"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("torch")  # before any module of ours: RELOADPG_AUTOINSTALL installs at its end
    return getattr(import_module(f"{__name__}.recovering"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
