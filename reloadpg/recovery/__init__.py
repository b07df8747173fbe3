"""Continue after a fault: recreate all communicators, repeat the step, replace a dead process.

``recover`` recreates the communicators in the running processes, ``retrying`` also restores the
state of the step and repeats it, and ``rejoin`` lets a new process take the place of one that
died. See docs/recovery.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time, __getattr__ resolves the names
    from .recovering import recover as recover
    from .recovering import recovery_requested as recovery_requested
    from .rejoining import rejoin as rejoin
    from .steps import retrying as retrying

_HOME_OF = {
    "recover": "recovering",
    "recovery_requested": "recovering",
    "rejoin": "rejoining",
    "retrying": "steps",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("torch")  # before any module of ours: RELOADPG_AUTOINSTALL installs at its end
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
