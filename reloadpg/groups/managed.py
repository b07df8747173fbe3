"""``ManagedGroup``: what this library knows of a reloadable group, and does with it.

A :class:`~.proxy.ReloadableProcessGroup` is a ``ProcessGroup`` and nothing else. Its state, its
settings and the steps of an offload and a reload are here, behind its one private attribute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from ..c10d import backends, compiling, creation, tables
from .carried import Carried
from .creation import Construction
from .dispatch import Dispatch
from .loans import Loans
from .offloaded import GroupState, Offloaded, UnderWay
from .sets import TRAINER

if TYPE_CHECKING:
    from ..c10d.backends import CppBackend

T = TypeVar("T")


@dataclass
class History:
    """Record of a group's offloads and reloads.

    Attributes:
        names: names of the generations that have keys in the job's store.
        strategy: strategy of the last release; empty before the first one.
        held_bytes: bytes that its communicator held then, as the backend reported them, or None.
        suspended_bytes: the part of these bytes that a suspend releases.
        reason: the reason for that strategy, if there was one.
    """

    names: tuple[str, ...]
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

    def begin(self, name: str) -> None:
        """Record the name of a generation that is about to be created. Local."""
        self.names = (*self.names, name)

    def take_names(self) -> tuple[str, ...]:
        """Return the names of all generations so far, once: their keys are deleted. Local."""
        names, self.names = self.names, ()
        return names


class _OnFirstUse(Generic[T]):
    """An attribute of a group that is created when it is first read, from any thread.

    Every member has one record for each of its groups, and most need none of these attributes.
    """

    def __init__(self, create: Callable[[ManagedGroup], T]) -> None:
        self._create = create

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, group: ManagedGroup, _: type) -> T:
        found: T = group.__dict__.setdefault(self._name, self._create(group))
        return found


class ManagedGroup:
    """The record of one reloadable group. Local; the lifecycle makes its steps collective.

    The proxy refers to it, and not the other way round, so that the last reference to a proxy
    deletes both at once, and the communicator with them.

    Attributes:
        construction: the record of its creation.
        current: the live group that torch created, or the placeholder.
        set_name: the set that it belongs to.
        generation: the job's number of reloads, of any set, when its communicator was built; 0 if
            the original call has built it.
        under_way: the operation whose threads have exclusive use of the group; None if there is
            none.
        carried: the settings that each new generation gets.
        history: the record of its offloads and reloads.
        loans: what other code has taken out of it.
    """

    construction: Construction
    set_name = TRAINER
    generation = 0
    under_way: UnderWay | None = None
    _before_end: Callable[[], object] | None = None

    carried = _OnFirstUse(lambda group: Carried(group.construction))
    history = _OnFirstUse(lambda group: History((group.name,)))
    loans = _OnFirstUse(lambda group: Loans())

    def __init__(self, proxy: Dispatch, inner: ProcessGroup, construction: Construction) -> None:
        self._proxy = weakref.ref(proxy)
        self.current: Any = inner
        self.construction = construction

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
    def desc(self) -> str:
        return self.carried.desc

    @property
    def state(self) -> GroupState:
        """The state, as the threads find it that may use the group."""
        return self.current.state if isinstance(self.current, Offloaded) else GroupState.LIVE

    @property
    def live(self) -> Any:
        """The live group that torch created; None if there is none."""
        return None if isinstance(self.current, Offloaded) else self.current

    @property
    def is_live(self) -> bool:
        """Whether the group owns a communicator that can be used."""
        return not isinstance(self.current, Offloaded)

    @property
    def last_error(self) -> str:
        """Why it failed; empty if it did not."""
        return self.current.reason if isinstance(self.current, Offloaded) else ""

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
        """The backends that stay alive while the group is offloaded; None if there are none."""
        return self.current.kept if isinstance(self.current, Offloaded) else None

    def release_kept(self) -> None:
        """Drop the backends that stay alive while the group is offloaded."""
        self._put(Offloaded(self, self.state, reason=self.last_error))

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
            self.carried.remember(inner)
        self._put(Offloaded(self, state, self._kept_group(inner), reason=reason))
        self.loans.end()
        tables.drop_generation(self.proxy)
        return inner

    def attach(self, inner: ProcessGroup, generation: int) -> None:
        """Make a rebuilt group the live one, with the settings of its predecessor."""
        proxy = self.proxy
        # All settings come before `_put`. Another thread may use the group from then on, and a call
        # that raises here leaves the placeholder in place.
        if self.kept is not None:
            backends.add_backends(inner, self._kept_backends(self.kept))
        tables.take_generation(inner, proxy)
        if self.construction.is_world:
            creation.complete_ranks(inner, tuple(self.construction.devices))
        if inner.bound_device_id != proxy.bound_device_id:
            inner.bound_device_id = proxy.bound_device_id
        self.carried.repeat_calls(inner)
        self.carried.apply(inner)
        self._put(inner)
        self.generation = generation

    def suspend(self) -> Any:
        """Replace the live group by a placeholder that keeps it; the caller suspends it."""
        inner = self.current
        self.carried.remember(inner)
        kept = self._kept_group(inner)
        self._put(Offloaded(self, GroupState.SUSPENDED, kept, suspended=inner))
        return inner

    def resume(self) -> None:
        """Make the suspended group the live one again, with what was set since."""
        inner = self.communicator
        self.carried.apply(inner)
        self._put(inner)

    def fail(self, reason: str) -> None:
        """Mark an offloaded group as failed, with the reason."""
        self._put(Offloaded(self, GroupState.FAILED, self.current.kept, reason=reason))

    def fall_back(self, generation: int) -> None:
        """Set the generation after an operation that failed, as all members do. Local."""
        self.generation = generation

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
        self.loans.end()
        if placeholder is not None and placeholder.suspended is not None:
            placeholder.suspended.abort()  # a shutdown would need the peers
        elif inner is not None:
            backends.await_monitors(inner)  # else its destructor may wait for a thread of torch
            how(inner)

    def disown(self) -> Any:
        """In a forked child: refuse the parent's communicator, and return all that refers to it."""
        parents = self.current, getattr(self._proxy(), "_inner", None)
        self.loans.clear()
        self.under_way = None
        reason = "This process was forked, and the communicator is its parent's."
        remedy = "Use it in the parent, or start the child with the 'spawn' method."
        self._put(Offloaded(self, GroupState.FAILED, reason=reason, remedy=remedy))
        return parents

    # -- its timeouts -----------------------------------------------------------------------

    def current_timeouts(self) -> dict[str, timedelta]:
        """Return the timeouts by device type: of the live group, or of the next generation."""
        return self.carried.timeouts_of(self.live)

    def set_timeout(self, timeout: timedelta, *, kept: bool = True) -> None:
        """Set the timeout of the backends, now or from the next generation on.

        Args:
            timeout: the new timeout.
            kept: whether backends that stay alive in an offload get it, too.
        """
        devices = self.construction.devices if kept else self.construction.selected
        alive = self.current if self.is_live else self.kept
        self.carried.set_timeouts(dict.fromkeys(devices, timeout), alive)

    # -- steps of the above -----------------------------------------------------------------

    def _put(self, current: Any) -> None:
        """Dispatch to this live group or placeholder from now on."""
        self.current = target = current
        if self.under_way is not None and self.state is not GroupState.DESTROYED:
            # A failure of another rank may still release the group, so only the operation's threads
            # use it. The backends that stay alive in an offload serve all threads.
            kept = self._kept_group(current) if self.is_live else self.kept
            target = Offloaded(self, GroupState.RESERVED, kept, under_way=self.under_way)
        proxy = self._proxy()
        if proxy is not None:  # the program may have deleted it during the operation
            proxy._inner = target

    def _kept_group(self, inner: Any) -> ProcessGroup | None:
        if not self.construction.is_mixed:
            return None
        construction, store = self.construction, tables.store_of(self.proxy)
        kept = self._kept_backends(inner)
        return backends.group_of_backends(construction.rank, construction.size, store, kept)

    def _kept_backends(self, group: ProcessGroup) -> Mapping[str, tuple[str, CppBackend]]:
        live = backends.live_backends(group, self.construction.kept)
        return {device: (self.construction.devices[device], b) for device, b in live.items()}


compiling.skip_methods_in_compiled_code(_OnFirstUse, ManagedGroup)
