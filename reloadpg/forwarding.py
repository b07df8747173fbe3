"""A process group class that forwards all that the installed torch's ``ProcessGroup`` has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch.distributed import ProcessGroup

from . import surface

__all__ = ["Forwarding"]


def _forwarding_collective(name: str) -> Callable[..., Any]:
    # Compiled per name instead of closed over it: 0.13 us a call instead of 0.18, which is 2% of
    # the shortest collective (benchmarks/dispatch.py).
    source = f"""
def {name}(self, *args, **kwargs):
    work = self._inner.{name}(*args, **kwargs) if kwargs else self._inner.{name}(*args)
    return COMPLETED_WORK if work is None else work
"""
    scope = {"__name__": __name__, "COMPLETED_WORK": surface.COMPLETED_WORK}
    exec(compile(source, f"<forwarding {name}>", "exec"), scope)
    return cast("Callable[..., Any]", scope[name])


def _forwarding_control(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


def _forwarding_property(name: str) -> property:
    def get(self: Any) -> Any:
        return getattr(self._inner, name) if self.is_live else False

    return property(get)


def _members() -> dict[str, Any]:
    """Class attributes that forward all that the installed ``ProcessGroup`` has."""
    members: dict[str, Any] = {}
    for name in surface.names() - surface.QUERIES - surface.LOCALS - surface.CARRIED:
        forwarding = (
            _forwarding_collective if name in surface.COLLECTIVES else _forwarding_control
        )  # an unclassified name needs a communicator until somebody says otherwise
        members[name] = forwarding(name)
    for name in surface.names() & surface.QUERIES:
        if name.startswith("supports_"):
            members[name] = _forwarding_property(name)
    for name in surface.names() & surface.CARRIED:
        members[name] = _carried(name)
    return members


def _carried(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._inner, name)(*args, **kwargs)
        self._settings.calls.append((name, args, kwargs))
        return result

    forward.__name__ = name
    return forward


class Forwarding(ProcessGroup):
    """A ``ProcessGroup`` whose every method finds the live group in ``self._inner``."""


for _name, _member in _members().items():
    setattr(Forwarding, _name, _member)
