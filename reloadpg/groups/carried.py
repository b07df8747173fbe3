"""The settings of a live group that its next generation gets, too."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ..c10d import backends, compiling
from .creation import Construction


class Carried:
    """What was set on a group after its creation. A replay of the creation does not set it.

    Attributes:
        desc: the group's description.
        symm_mem: torch's flag ``use_pg_for_symm_mem_rendezvous``; None if it was never read.
    """

    def __init__(self, construction: Construction) -> None:
        self.desc = construction.desc
        self.symm_mem: Any = None
        self._devices = construction.devices
        self._timeouts: Mapping[str, timedelta] = {}
        self._calls: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = ()

    # -- set by the program -----------------------------------------------------------------

    def set_desc(self, desc: str, live: Any) -> None:
        """Set the description, also of the live group; None if there is none. Local."""
        self.desc = desc
        if live is not None:
            backends.set_desc(live, desc)

    def set_symm_mem(self, value: Any, live: Any) -> None:
        """Set the flag, also of the live group; None if there is none. Local."""
        self.symm_mem = value
        if live is not None:
            live.use_pg_for_symm_mem_rendezvous = value

    def set_timeouts(self, timeouts: Mapping[str, timedelta], alive: Any) -> None:
        """Set timeouts by device type, also of the backends that are alive. Local."""
        if alive is not None:
            backends.set_timeouts(alive, timeouts)
        self._timeouts = {**self._timeouts, **timeouts}

    def add_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Repeat a call, which was made on the live group, on the next one. Local."""
        self._calls = (*self._calls, (name, args, kwargs))

    def forget_hook(self, removal: str, hook_id: int) -> None:
        """Do not register a hook on the next generation. Local, idempotent."""
        name = removal.removeprefix("un")
        self._calls = tuple(
            call
            for call in self._calls
            if call[0] != name or hook_id not in (*call[1][:1], call[2].get("hook_id"))
        )

    @property
    def has_hooks(self) -> bool:
        """Whether completion hooks were registered."""
        # The live group is not queried: torch writes a warning to stderr for a group without a
        # default backend, such as a mixed group.
        return any(name == backends.COMPLETION_HOOK for name, *_ in self._calls)

    # -- from one generation to the next ----------------------------------------------------

    def timeouts_of(self, live: Any) -> dict[str, timedelta]:
        """Return the timeouts by device type: of the live group, or of the next generation."""
        # Not every backend reports its timeout; a timeout that was set here is known.
        reported = {} if live is None else backends.get_timeouts(live, tuple(self._devices))
        return {**self._timeouts, **reported}

    def remember(self, live: Any) -> None:
        """Read what a live group can report, before it is released. Local."""
        self._timeouts = self.timeouts_of(live)
        # A Python backend has no C++ backend, and torch's getter then raises.
        with suppress(RuntimeError):
            self.symm_mem = getattr(live, "use_pg_for_symm_mem_rendezvous", self.symm_mem)

    def apply(self, live: Any) -> None:
        """Set all of it on a new generation, or on a suspended group. Local, idempotent."""
        backends.set_timeouts(live, self._timeouts)
        backends.set_desc(live, self.desc)
        if self.symm_mem:
            live.use_pg_for_symm_mem_rendezvous = self.symm_mem

    def repeat_calls(self, live: Any) -> None:
        """Repeat the calls on a new generation: a suspended group has them. Local."""
        for name, args, kwargs in self._calls:
            getattr(live, name)(*args, **kwargs)


compiling.skip_methods_in_compiled_code(Carried)
