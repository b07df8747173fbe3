"""``ReloadableProcessGroup``: a process group whose communicator can be released and rebuilt.

Do not assume:

* that a backend object (``group._get_backend(device)``) outlives an offload. It belongs to one
  generation, and raises afterwards (:mod:`.borrowed`); get it again after a reload.
* that the proxy's C++ object has a backend. C++ code that requests one finds none; torch itself
  calls methods that find the live group.
* that another group replaces it while it is offloaded. Every operation that needs a communicator
  raises :class:`~reloadpg.errors.GroupOffloadedError`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import ProcessGroup

from .. import c10d
from ..errors import GroupPickleError
from .borrowed import OURS, THROUGH, Loans, lent_by, take
from .creation import Construction
from .dispatch import Dispatch
from .offloaded import GroupState as GroupState
from .offloaded import Offloaded, UnderWay
from .sets import TRAINER

if TYPE_CHECKING:
    from ..c10d import CppBackend


@dataclass
class History:
    """Record of a group's offloads and reloads.

    Attributes:
        strategy: strategy of the last release; empty before the first one.
        held_bytes: bytes that its communicator held then, as the backend reported them, or None.
        suspended_bytes: the part of these bytes that a suspend releases.
        shortfall: why it is recreated from now on: a suspend gave back too little.
    """

    strategy: str = ""
    held_bytes: int | None = None
    suspended_bytes: int = 0
    shortfall: str = ""
    cycles: int = 0
    offload_ms: float | None = None
    reload_ms: float | None = None


_LIVE = GroupState.LIVE  # faster than looking up the member each time
_BOUND_DEVICE: property = ProcessGroup.__dict__["bound_device_id"]


class ReloadableProcessGroup(Dispatch):
    """A process group that keeps its identity while its communicator is released and rebuilt.

    Instances are created by the patched ``torch.distributed`` functions. Identity, hash,
    ``group_name``, rank and size never change. Copying returns the same object. A pickle holds the
    group's name, which the receiving process resolves.

    Attributes:
        construction: the record of its creation.
        set_name: the set that it belongs to.
        generation: number of reloads of its set when its communicator was built; 0 before the
            first reload.
        state: :class:`GroupState`.
        last_error: why it failed; empty if it did not.
        history: record of its offloads and reloads.
        under_way: the operation whose threads have exclusive use of the group; None if there is
            none.
        replayed: whether a replay has created its communicator, which never splits another one.
        names_in_store: names of the generations that have keys in the job's store.
        before_end: called before the group is destroyed for good.
        lends: whether its callers get objects that end with its generation, and are recorded.
        known_loans: what they hold; None if nothing was taken.
    """

    # Every member creates one instance for each of its groups. To keep that cheap, the initial
    # values of mutable attributes are in the class.
    set_name = TRAINER
    generation = 0
    replayed = False
    state = _LIVE
    last_error = ""
    under_way: UnderWay | None = None
    before_end: Callable[[], object] | None = None
    lends = True
    known_loans: Loans | None = None
    _released: weakref.ref[Any] | None = None
    _history: History | None = None

    # Changes made to the live group after its creation, which are carried over to the next one.
    _timeouts: Mapping[str, timedelta] = MappingProxyType({})
    _symm_mem: Any = None

    def __init__(self, inner: ProcessGroup, construction: Construction) -> None:
        rank, self._size = construction.rank, len(construction.members)
        # The (store, rank, size) form, the only one in torch's stubs, fails for subclasses.
        ProcessGroup.__init__(self, rank, self._size)  # type: ignore[call-arg, arg-type]
        self._current: Any = inner
        self._inner = inner
        self.construction = construction
        self._desc = construction.desc
        self.names_in_store = [construction.name]
        self._backend_name = inner.name()
        device = inner.bound_device_id
        if device is not None:
            # The C++ getter is not virtual, so the proxy's C++ object must hold the device.
            _BOUND_DEVICE.__set__(self, device)
        c10d.take_place(inner, self)

    @property
    def history(self) -> History:
        found = self._history
        if found is None:  # two threads may be here at once
            found = self.__dict__.setdefault("_history", History())
        return found

    @property
    def loans(self) -> Loans:
        found = self.known_loans
        if found is None:
            found = self.__dict__.setdefault("known_loans", Loans())
        return found

    @property
    def is_live(self) -> bool:
        """Whether the group owns a communicator that can be used."""
        return self.state is _LIVE

    # -- identity: available in every state -------------------------------------------------

    def rank(self) -> int:
        return self.construction.rank

    def size(self) -> int:
        return self._size

    # C++ looks up these names in the class whenever it needs rank and size. A failed lookup costs
    # 0.6 us each time (get_world_size took 3.5 times as long); a C function is found at once.
    getRank = ProcessGroup.__dict__["rank"]  # noqa: N815
    getSize = ProcessGroup.__dict__["size"]  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802 - looked up by C++
        return self.construction.name

    def getGroupDesc(self) -> str:  # noqa: N802 - looked up by C++
        return self._desc

    group_name = property(getGroupName)  # type: ignore[assignment]
    group_desc = property(getGroupDesc)

    def getBackendName(self) -> str:  # noqa: N802 - looked up by C++
        # Not the live backend's name: given "gloo", DDP's logger requests a gloo backend from the
        # C++ object, which has none, and fails.
        return "reloadable"

    def name(self) -> str:
        return self._backend_name

    _get_backend_name = name

    @property
    def _device_types(self) -> list[Any]:
        # Torch's creating functions read WORLD's backends; a replay needs none.
        if c10d.is_creating():
            return []
        if self.is_live:
            return c10d.device_types(self._current)
        return [torch.device(device) for device in self.construction.devices]

    def _bind_device(self, device: Any) -> None:
        _BOUND_DEVICE.__set__(self, device)
        if self.is_live:
            self._current.bound_device_id = device

    # Every barrier reads it, so it is torch's getter, without a call into Python.
    bound_device_id = property(_BOUND_DEVICE.fget, _bind_device)

    @property
    def use_pg_for_symm_mem_rendezvous(self) -> Any:
        if self.is_live:
            return self._current.use_pg_for_symm_mem_rendezvous
        return self._symm_mem

    @use_pg_for_symm_mem_rendezvous.setter
    def use_pg_for_symm_mem_rendezvous(self, value: Any) -> None:
        self._symm_mem = value
        if self.is_live:
            self._current.use_pg_for_symm_mem_rendezvous = value

    def get_group_store(self) -> Any:
        return c10d.store_of(self)

    def _set_group_name(self, name: str) -> None:
        if name != self.construction.name:
            raise ValueError(
                f"the name of {self!r} is fixed for the life of the job (meshes and compiled code "
                "find the group by it); create a new group for another name"
            )

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        if self.is_live:
            c10d.set_desc(self._current, desc)

    @property
    def has_hooks(self) -> bool:
        """Whether completion hooks were registered."""
        # The live group is not queried: torch writes a warning to stderr for a group without a
        # default backend, such as a mixed group.
        return any(name == c10d.COMPLETION_HOOK for name, *_ in self._calls)

    def _has_hooks(self) -> bool:
        return self.has_hooks

    def _wait_for_pending_works(self) -> None:
        if self.is_live:
            c10d.await_hooks(self._current)

    def __copy__(self) -> ReloadableProcessGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ReloadableProcessGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return find_group, (self.construction.name, self.construction.ranks)

    def __repr__(self) -> str:
        ranks = self.construction.ranks
        shown = str(list(ranks)) if len(ranks) <= 8 else f"{len(ranks)} ranks"
        desc = self.group_desc
        if desc not in ("", "undefined"):  # torch's default description
            shown = f"({desc}) {shown}"
        return (
            f"<ReloadableProcessGroup {self.construction.name!r} {shown} "
            f"{self.construction.backend} {self.state} generation {self.generation}>"
        )

    # -- end of life: the user destroys the group -------------------------------------------

    def shutdown(self) -> None:
        """Destroy the communicator permanently; called by ``destroy_process_group``. Idempotent.

        Waits for a running operation that was started with ``wait=False``.
        """
        if self.has_hooks:
            self._wait_for_pending_works()
        self._destroy(lambda inner: inner.shutdown())

    def abort(self) -> None:
        """Abort the communicator permanently; called by ``_abort_process_group``. Idempotent.

        Waits like :meth:`shutdown`.
        """
        self._destroy(lambda inner: inner.abort())

    def _destroy(self, how: Callable[[Any], None]) -> None:
        if self.under_way is not None:
            self.under_way.wait()
        if self.before_end is not None:
            self.before_end()
        placeholder = self._current if isinstance(self._current, Offloaded) else None
        inner = self._current if placeholder is None else placeholder.kept
        self.state = GroupState.DESTROYED
        self._put(Offloaded(self, None))
        self._end_loans()
        if placeholder is not None and placeholder.suspended is not None:
            placeholder.suspended.abort()  # a shutdown would need the peers
        elif inner is not None:
            how(inner)

    # -- generations: called by the lifecycle -------------------------------------------------

    @property
    def communicator(self) -> Any:
        """The live or the suspended group that torch created; None if there is neither."""
        return self._current.suspended if isinstance(self._current, Offloaded) else self._current

    @property
    def last_inner(self) -> Any:
        """The group that torch created for the previous generation, if it is still referenced."""
        return None if self._released is None else self._released()

    def reserve(self, under_way: UnderWay | None) -> None:
        """Restrict the group to an operation's threads; None lifts this. Local, idempotent."""
        self.under_way = under_way
        self._put(self._current)

    def detach(self, state: GroupState = GroupState.OFFLOADED, reason: str = "") -> Any:
        """Detach the live or suspended group and record its settings.

        Returns:
            The group that torch created; the caller destroys it.
        """
        inner = self.communicator
        if self.is_live:
            self._remember(inner)
        self.state = state
        self._put(Offloaded(self, self._kept_group(inner), reason))
        self.last_error = reason
        self._end_loans()
        self._released = weakref.ref(inner)
        c10d.drop_generation(self)
        return inner

    def attach(self, inner: ProcessGroup, generation: int) -> None:
        """Make a rebuilt group the live one, with the settings of its predecessor."""
        if isinstance(self._current, Offloaded) and self._current.kept is not None:
            c10d.add_backends(inner, self._kept_backends(self._current.kept))
        c10d.take_generation(inner, self)
        c10d.set_timeouts(inner, self._timeouts)
        if self.construction.is_world:
            c10d.complete_ranks(inner, tuple(self.construction.devices))
        if inner.bound_device_id != self.bound_device_id:
            inner.bound_device_id = self.bound_device_id
        for name, args, kwargs in self._calls:
            getattr(inner, name)(*args, **kwargs)
        self._make_live(inner)
        self.replayed = not self.construction.is_handed_over
        self.generation = generation

    def await_members(self) -> None:
        """Set a group that was created without backends to failed, until ``rejoin``. Local."""
        made = self.construction
        self.detach(GroupState.FAILED, "This process replaces one that has ended.")
        self._current.kept = None
        self._current.remedy = "Call reloadpg.recovery.rejoin() once all groups are created."
        self._backend_name = next(iter(made.devices.values()))
        timeout = made.timeout or c10d.default_timeout(made.backend)
        self._timeouts = dict.fromkeys(made.devices, timeout)

    def disown(self) -> Any:
        """In a forked child: refuse the parent's communicator, and return all that refers to it."""
        found = self._current, self._inner
        self.known_loans = None
        self.under_way = None
        self.state = GroupState.FAILED
        self.last_error = "This process was forked, and the communicator is its parent's."
        self._put(Offloaded(self, None, self.last_error))
        self._current.remedy = "Use it in the parent, or start the child with the 'spawn' method."
        return found

    @property
    def kept(self) -> ProcessGroup | None:
        """The backends that stay alive while the group is offloaded, if any."""
        kept: ProcessGroup | None = self._inner.kept
        return kept

    def release_kept(self) -> None:
        """Drop the backends that stay alive while the group is offloaded."""
        self._inner.kept = None

    def suspend(self) -> Any:
        """Replace the live group by a placeholder that keeps it; the caller suspends it."""
        inner = self._current
        self._remember(inner)
        self.state = GroupState.OFFLOADED
        self._put(Offloaded(self, self._kept_group(inner), suspended=inner))
        return inner

    def resume(self) -> None:
        """Make the suspended group the live one again."""
        self._make_live(self._current.suspended)

    def fail(self, reason: str) -> None:
        """Mark an offloaded group as failed, with the reason."""
        self.state = GroupState.FAILED
        self.last_error = reason
        self._current.reason = reason

    def leave_out(self, reason: str) -> None:
        """Record why a reload leaves the group without a communicator."""
        self.last_error = self._current.reason = reason

    def clear_failure(self) -> None:
        """Mark a failed group as offloaded, after a completed offload. Idempotent."""
        if self.state is GroupState.FAILED:
            self.state = GroupState.OFFLOADED
            self.last_error = self._current.reason = ""

    def current_timeouts(self) -> dict[str, timedelta]:
        """Return the timeouts by device type: of the live group, or of the next generation."""
        if self.is_live:
            # Not every backend reports its timeout; a timeout that was set here is known.
            reported = c10d.get_timeouts(self._current, tuple(self.construction.devices))
            return {**self._timeouts, **reported}
        return dict(self._timeouts)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all backends, now or from the next generation on. Local."""
        self._set_timeouts(dict.fromkeys(self.construction.devices, timeout))

    def set_default_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the reloadable backends, now or from the next generation on. Local."""
        self._set_timeouts(dict.fromkeys(self.construction.selected, timeout))

    def _set_timeouts(self, timeouts: Mapping[str, timedelta]) -> None:
        live = self._current if self.is_live else self._current.kept
        if live is not None:
            c10d.set_timeouts(live, timeouts)
        self._timeouts = {**self._timeouts, **timeouts}

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        if self.is_live:  # it applies to pending collectives only
            self._current._add_ephemeral_timeout(timeout)

    def memory_stats(self) -> dict[str, int] | None:
        """Return the bytes that the communicator reports, by NCCL's names; None if unknown.

        Local, at any time. Empty without a communicator, and for one that was never used.
        """
        inner = self.communicator
        if inner is None:
            return {}
        totals: dict[str, int] = {}
        backends = c10d.live_backends(inner, self.construction.selected)
        for backend in {id(backend): backend for backend in backends.values()}.values():
            stats = c10d.memory_stats(backend)
            if stats is None:
                return None
            for name, value in stats.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def _end_loans(self) -> None:
        if self.known_loans is not None:
            self.known_loans.end()

    def _put(self, current: Any) -> None:
        """Dispatch to this live group or placeholder from now on."""
        target = current
        if self.under_way is not None:
            is_placeholder = isinstance(current, Offloaded)
            kept = current.kept if is_placeholder else self._kept_group(current)
            target = Offloaded(self, kept, under_way=self.under_way, current=current)
        self._current, self._inner = current, target

    def _make_live(self, inner: Any) -> None:
        c10d.set_desc(inner, self._desc)
        if self._symm_mem:
            inner.use_pg_for_symm_mem_rendezvous = self._symm_mem
        self._put(inner)
        self.state = GroupState.LIVE
        self.last_error = ""

    def _remember(self, inner: Any) -> None:
        self._timeouts = self.current_timeouts()
        # A Python backend has no C++ backend, and torch's getter then raises.
        with suppress(RuntimeError):
            self._symm_mem = getattr(inner, "use_pg_for_symm_mem_rendezvous", self._symm_mem)

    def _kept_group(self, inner: Any) -> ProcessGroup | None:
        if not self.construction.is_mixed:
            return None
        return c10d.group_of_backends(
            self.rank(), self.size(), c10d.store_of(self), self._kept_backends(inner)
        )

    def _kept_backends(self, group: ProcessGroup) -> Mapping[str, tuple[str, CppBackend]]:
        backends = c10d.live_backends(group, self.construction.kept)
        return {device: (self.construction.devices[device], b) for device, b in backends.items()}


# -- what leaves a group: see .borrowed ---------------------------------------------------------


def _lending(name: str) -> Callable[..., Any]:
    if name.endswith("get_backend"):

        def method(self: ReloadableProcessGroup, *args: Any, **kwargs: Any) -> Any:
            backend = getattr(self._inner, name)(*args, **kwargs)
            # Torch 2.15 gets WORLD's backend four times in each creation: no further call for it.
            caller = sys._getframe(1)
            if (
                caller.f_globals.get("__name__", "").startswith(OURS)
                and caller.f_code.co_name not in THROUGH
            ):
                return backend
            return lent_by(self, backend, (*args, *kwargs.values()))
    else:

        def method(self: ReloadableProcessGroup, *args: Any, **kwargs: Any) -> Any:
            return take(self, name, getattr(self._inner, name)(*args, **kwargs))

    method.__name__ = name
    return method


for _name in ("_get_backend", "get_backend", "new_window", "register_abort_hook"):
    if hasattr(ProcessGroup, _name):  # hasattr() must give the same result as on a plain group
        setattr(ReloadableProcessGroup, _name, _lending(_name))

c10d.skip_in_compiled_code(
    cast(Any, member)
    for member in vars(ReloadableProcessGroup).values()
    if hasattr(member, "__code__")
)


def find_group(name: str, ranks: tuple[int, ...] = ()) -> ProcessGroup:
    """Return this process's group of that name, to resolve a pickled group."""
    for group in c10d.known_groups():
        if c10d.name_of(group) == name:
            if ranks and c10d.ranks_of(group) != tuple(ranks):
                raise GroupPickleError(
                    f"a pickled process group {name!r} of ranks {list(ranks)} cannot be resolved: "
                    f"here the group has the ranks {list(c10d.ranks_of(group))}. Unpickle it "
                    "in a process of the same job, with its groups created in the same order."
                )
            return group
    raise GroupPickleError(
        f"a pickled process group {name!r} cannot be resolved: this process has no group of that "
        "name. A pickle holds only the name. Create the same groups here first, or do not pickle "
        "the group."
    )
