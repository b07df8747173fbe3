"""What stands in a group where its communicator was: it refuses, and says what to call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from . import surface
from .errors import GroupDestroyedError, GroupOffloadedError
from .state import NEXT_CALL, GroupState

if TYPE_CHECKING:
    from .group import ReloadableProcessGroup

__all__ = ["Vacant"]


class Vacant:
    """Stands where the live group was: whatever needs a communicator raises, with the reason.

    For a mixed group it holds the part that stays alive (``rest``) and passes on to it what is
    asked for the devices that it serves. A suspended group is kept beside (``parked``).
    """

    def __init__(
        self,
        owner: ReloadableProcessGroup,
        rest: ProcessGroup | None,
        reason: str = "",
        parked: ProcessGroup | None = None,
    ) -> None:
        self._owner = weakref.ref(owner)
        self.rest = rest
        self.reason = reason
        self.parked = parked

    def refusal(self, operation: str) -> GroupOffloadedError | GroupDestroyedError:
        """The error for an operation that needs a communicator."""
        owner = self._owner()
        state = GroupState.DESTROYED if owner is None else owner.state
        lacks = "its communicator is suspended" if self.parked else "owns no communicator"
        text = f"{operation} on {owner!r}: the group is {state} and {lacks}."
        if self.reason:
            text += f" {self.reason}"
        text = f"{text} {NEXT_CALL[state]}"
        if owner is None or state is GroupState.DESTROYED:
            return GroupDestroyedError(text)
        return GroupOffloadedError(text, group=owner.group_name, operation=operation)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Vacant, *args: Any, **kwargs: Any) -> Any:
        if self.rest is None:
            raise self.refusal(name)
        try:
            return getattr(self.rest, name)(*args, **kwargs)
        except RuntimeError as error:
            if "No backend type associated with device" in str(error) or "backend" in name:
                raise self.refusal(name) from error
            raise

    refuse.__name__ = name
    return refuse


for _name in surface.names() - surface.QUERIES - surface.LOCALS:
    setattr(Vacant, _name, _refusing(_name))
