"""``ManagedGroup``: what this library knows of a reloadable group, and does with it.

A :class:`~.proxy.ReloadableProcessGroup` is a ``ProcessGroup`` and nothing else. Its state, its
settings and the steps of an offload and a reload are here, behind its one private attribute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.distributed import ProcessGroup

from ..c10d import backends, compiling, creation, tables
from ..reports import Borrowed
from .creation import Construction
from .dispatch import Dispatch
from .offloaded import GroupState, Offloaded, UnderWay
from .sets import TRAINER

if TYPE_CHECKING:
    from ..c10d.backends import CppBackend


@dataclass
class Loan:
    """What one line of a program has taken of a group, of the newest generation: see `.borrowed`.

    Attributes:
        known: the thing, and the module that took it.
        things: the objects, while they are referenced; None if that cannot be known.
    """

    known: Borrowed
    things: WeakSet[Any] | None

    def end(self) -> None:
        """The generation has ended. Local, idempotent."""
        self.known = replace(self.known, ended=True)


@dataclass
class History:
    """Record of a group's offloads and reloads.

    Attributes:
        strategy: strategy of the last release; empty before the first one.
        held_bytes: bytes that its communicator held then, as the backend reported them, or None.
        suspended_bytes: the part of these bytes that a suspend releases.
        reason: the reason for that strategy, if there was one.
    """

    strategy: str = ""
    held_bytes: int | None = None
    suspended_bytes: int = 0
    reason: str = ""

    def record(self, strategy: str, stats: Mapping[str, int] | None, reason: str = "") -> None:
        """Record a release, and what the communicator reports that it holds. Local."""
        self.strategy, self.reason = strategy, reason
        self.held_bytes = None if stats is None else stats.get("total", 0)
        self.suspended_bytes = stats.get("suspend", 0) if stats else 0

    def rebuild(self) -> None:
        """Record that the group was rebuilt, however it was released. Local."""
        self.strategy = "recreate"


class ManagedGroup:
    """The record of one reloadable group. Local; the lifecycle makes its steps collective.

    The proxy refers to it, and not the other way round, so that the last reference to a proxy
    deletes both at once, and the communicator with them.

    Attributes:
        construction: the record of its creation.
        current: the live group that torch created, or the placeholder.
        target: what the proxy dispatches to: ``current``, or a placeholder while an operation has
            exclusive use of the group.
        backend_name: what the proxy's ``name()`` returns.
        desc: the group's description.
        names_in_store: names of the generations that have keys in the job's store.
        set_name: the set that it belongs to.
        generation: the job's number of reloads, of any set, when its communicator was built; 0 if
            the original call has built it.
        under_way: the operation whose threads have exclusive use of the group; None if there is
            none.
        loans: what its callers have taken, by kind, file and line.
        records: whether what its callers take out of it is recorded.
        calls: methods that were called on the live group, to repeat on the next one.
    """

    # Every member creates one instance for each of its groups. To keep that cheap, the initial
    # values of mutable attributes are in the class.
    set_name = TRAINER
    generation = 0
    under_way: UnderWay | None = None
    _before_end: Callable[[], object] | None = None
    records = True
    _history: History | None = None

    # Changes made to the live group after its creation, which are carried over to the next one.
    calls: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = ()
    symm_mem: Any = None
    _timeouts: Mapping[str, timedelta] = MappingProxyType({})

    def __init__(self, proxy: Dispatch, inner: ProcessGroup, construction: Construction) -> None:
        self._proxy = weakref.ref(proxy)
        self.current: Any = inner
        self.target: Any = inner
        self.construction = construction
        self.desc = construction.desc
        self.backend_name = inner.name()
        self.names_in_store = [construction.name]
        self.loans: dict[tuple[str, str, int], Loan] = {}

    @property
    def proxy(self) -> Dispatch:
        """The reloadable group itself. Raises ReferenceError if it was deleted."""
        proxy = self._proxy()
        if proxy is None:
            raise ReferenceError(f"{self!r} was deleted")
        return proxy

    @property
    def name(self) -> str:
        return self.construction.name

    @property
    def state(self) -> GroupState:
        """The state, as the threads find it that may use the group."""
        return self.current.state if isinstance(self.current, Offloaded) else GroupState.LIVE

    @property
    def is_live(self) -> bool:
        """Whether the group owns a communicator that can be used."""
        return not isinstance(self.current, Offloaded)

    @property
    def last_error(self) -> str:
        """Why it failed; empty if it did not."""
        return self.current.reason if isinstance(self.current, Offloaded) else ""

    @property
    def history(self) -> History:
        """Release history, created on first use."""
        history = self._history
        if history is None:  # two threads may be here at once
            history = self.__dict__.setdefault("_history", History())
        return history

    @property
    def has_hooks(self) -> bool:
        """Whether completion hooks were registered."""
        # The live group is not queried: torch writes a warning to stderr for a group without a
        # default backend, such as a mixed group.
        return any(name == backends.COMPLETION_HOOK for name, *_ in self.calls)

    def __repr__(self) -> str:
        ranks = self.construction.ranks
        shown = str(list(ranks)) if len(ranks) <= 8 else f"{len(ranks)} ranks"
        if self.desc not in ("", "undefined"):  # torch's default description
            shown = f"({self.desc}) {shown}"
        return (
            f"<ReloadableProcessGroup {self.name!r} {shown} "
            f"{self.construction.backend} {self.state.shown} generation {self.generation}>"
        )

    # -- its communicator -------------------------------------------------------------------

    @property
    def communicator(self) -> Any:
        """The live or the suspended group that torch created; None if there is neither."""
        return self.current.suspended if isinstance(self.current, Offloaded) else self.current

    @property
    def kept(self) -> ProcessGroup | None:
        """The backends that stay alive while the group is offloaded, if any."""
        kept: ProcessGroup | None = self.target.kept
        return kept

    def release_kept(self) -> None:
        """Drop the backends that stay alive while the group is offloaded."""
        self.target.kept = None

    def memory_stats(self) -> dict[str, int] | None:
        """Return the bytes that the communicator reports, by NCCL's names; None if unknown.

        At any time. Empty without a communicator, and for one that was never used.
        """
        inner = self.communicator
        if inner is None:
            return {}
        totals: dict[str, int] = {}
        live = backends.live_backends(inner, self.construction.selected)
        for backend in {id(backend): backend for backend in live.values()}.values():
            stats = backends.memory_stats(backend)
            if stats is None:
                return None
            for name, value in stats.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    @property
    def backend(self) -> Any:
        """The backend object of the live group that an offload releases."""
        return backends.backend_for(self.current, torch.device(self.construction.selected[0]))

    # -- its generations --------------------------------------------------------------------

    def reserve(self, under_way: UnderWay | None) -> None:
        """Restrict the group to an operation's threads; None lifts this. Idempotent."""
        self.under_way = under_way
        self._put(self.current)

    def detach(self, state: GroupState = GroupState.OFFLOADED, reason: str = "") -> Any:
        """Detach the live or suspended group and record its settings.

        Returns:
            The group that torch created; the caller destroys it.
        """
        inner = self.communicator
        # A suspended group was remembered when it was suspended, and its backends lack a timeout
        # that was set since.
        if self.is_live:
            self._remember(inner)
        self._put(Offloaded(self, state, self._kept_group(inner), reason=reason))
        self._end_loans()
        tables.drop_generation(self.proxy)
        return inner

    def attach(self, inner: ProcessGroup, generation: int) -> None:
        """Make a rebuilt group the live one, with the settings of its predecessor."""
        proxy = self.proxy
        # All settings come before `_make_live`. Another thread may use the group from then on, and
        # a call that raises here leaves the placeholder in place.
        if isinstance(self.current, Offloaded) and self.current.kept is not None:
            backends.add_backends(inner, self._kept_backends(self.current.kept))
        tables.take_generation(inner, proxy)
        backends.set_timeouts(inner, self._timeouts)
        if self.construction.is_world:
            creation.complete_ranks(inner, tuple(self.construction.devices))
        if inner.bound_device_id != proxy.bound_device_id:
            inner.bound_device_id = proxy.bound_device_id
        for name, args, kwargs in self.calls:
            getattr(inner, name)(*args, **kwargs)
        self._make_live(inner)
        self.generation = generation

    def suspend(self) -> Any:
        """Replace the live group by a placeholder that keeps it; the caller suspends it."""
        inner = self.current
        self._remember(inner)
        kept = self._kept_group(inner)
        self._put(Offloaded(self, GroupState.SUSPENDED, kept, suspended=inner))
        return inner

    def resume(self) -> None:
        """Make the suspended group the live one again, with the timeouts set since."""
        inner = self.current.suspended
        backends.set_timeouts(inner, self._timeouts)
        self._make_live(inner)

    def fail(self, reason: str) -> None:
        """Mark an offloaded group as failed, with the reason."""
        self._put(Offloaded(self, GroupState.FAILED, self.current.kept, reason=reason))

    def fall_back(self, generation: int) -> None:
        """Set the generation after an operation that failed, as all members do. Local."""
        self.generation = generation

    def forget_hook(self, removal: str, hook_id: int) -> None:
        """Do not register a hook on the next generation. Local, idempotent."""
        name = removal.removeprefix("un")
        self.calls = tuple(
            call
            for call in self.calls
            if call[0] != name or hook_id not in (*call[1][:1], call[2].get("hook_id"))
        )

    def clear_failure(self) -> None:
        """Mark a failed group as offloaded, after a completed offload. Idempotent."""
        if self.state is GroupState.FAILED:
            self._put(Offloaded(self, GroupState.OFFLOADED, self.current.kept))

    def call_before_end(self, function: Callable[[], object]) -> None:
        """Call this function before the group is destroyed for good. Local."""
        self._before_end = function

    def join(self, set_name: str) -> None:
        """Make the group one of a set. Local."""
        self.set_name = set_name

    def destroy(self, how: Callable[[Any], object]) -> None:
        """End the group for good. Waits for a running operation; idempotent.

        Args:
            how: destroys the group that torch created.
        """
        if self.under_way is not None:
            self.under_way.wait()
        if self._before_end is not None:
            self._before_end()
        placeholder = self.current if isinstance(self.current, Offloaded) else None
        inner = self.current if placeholder is None else placeholder.kept
        self._put(Offloaded(self, GroupState.DESTROYED))
        self._end_loans()
        if placeholder is not None and placeholder.suspended is not None:
            placeholder.suspended.abort()  # a shutdown would need the peers
        elif inner is not None:
            backends.await_monitors(inner)  # else its destructor may wait for a thread of torch
            how(inner)

    def disown(self) -> Any:
        """In a forked child: refuse the parent's communicator, and return all that refers to it."""
        parents = self.current, self.target
        self.loans = {}
        self.under_way = None
        reason = "This process was forked, and the communicator is its parent's."
        remedy = "Use it in the parent, or start the child with the 'spawn' method."
        self._put(Offloaded(self, GroupState.FAILED, reason=reason, remedy=remedy))
        return parents

    # -- its timeouts -----------------------------------------------------------------------

    def current_timeouts(self) -> dict[str, timedelta]:
        """Return the timeouts by device type: of the live group, or of the next generation."""
        if self.is_live:
            # Not every backend reports its timeout; a timeout that was set here is known.
            reported = backends.get_timeouts(self.current, tuple(self.construction.devices))
            return {**self._timeouts, **reported}
        return dict(self._timeouts)

    def set_timeout(self, timeout: timedelta, *, kept: bool = True) -> None:
        """Set the timeout of the backends, now or from the next generation on.

        Args:
            timeout: the new timeout.
            kept: whether backends that stay alive in an offload get it, too.
        """
        devices = self.construction.devices if kept else self.construction.selected
        timeouts = dict.fromkeys(devices, timeout)
        live = self.current if self.is_live else self.current.kept
        if live is not None:
            backends.set_timeouts(live, timeouts)
        self._timeouts = {**self._timeouts, **timeouts}

    # -- steps of the above -----------------------------------------------------------------

    def _end_loans(self) -> None:
        for loan in list(self.loans.values()):
            loan.end()

    def _put(self, current: Any) -> None:
        """Dispatch to this live group or placeholder from now on."""
        self.current = target = current
        if self.under_way is not None and self.state is not GroupState.DESTROYED:
            # A failure of another rank may still release the group, so only the operation's threads
            # use it. The backends that stay alive in an offload serve all threads.
            is_placeholder = isinstance(current, Offloaded)
            kept = current.kept if is_placeholder else self._kept_group(current)
            target = Offloaded(
                self, GroupState.RESERVED, kept, under_way=self.under_way, current=current
            )
        self.target = target
        proxy = self._proxy()
        if proxy is not None:  # the program may have deleted it during the operation
            proxy._inner = target

    def _make_live(self, inner: Any) -> None:
        backends.set_desc(inner, self.desc)
        if self.symm_mem:
            inner.use_pg_for_symm_mem_rendezvous = self.symm_mem
        self._put(inner)

    def _remember(self, inner: Any) -> None:
        self._timeouts = self.current_timeouts()
        # A Python backend has no C++ backend, and torch's getter then raises.
        with suppress(RuntimeError):
            self.symm_mem = getattr(inner, "use_pg_for_symm_mem_rendezvous", self.symm_mem)

    def _kept_group(self, inner: Any) -> ProcessGroup | None:
        if not self.construction.is_mixed:
            return None
        construction, store = self.construction, tables.store_of(self.proxy)
        kept = self._kept_backends(inner)
        return backends.group_of_backends(construction.rank, construction.size, store, kept)

    def _kept_backends(self, group: ProcessGroup) -> Mapping[str, tuple[str, CppBackend]]:
        live = backends.live_backends(group, self.construction.kept)
        return {device: (self.construction.devices[device], b) for device, b in live.items()}


compiling.skip_in_compiled_code(
    function
    for member in vars(ManagedGroup).values()
    for function in (member, getattr(member, "fget", None))
    if hasattr(function, "__code__")
)
