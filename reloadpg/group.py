"""``ReloadableProcessGroup``: a first-class process group whose communicator can go and come back.

What must not be assumed of it:

* A backend object taken out of it (``group._get_backend(device)``) belongs to one generation and
  is dead after an offload. Take it again after a reload.
* Its C++ object has no backend of its own; C++ code that asks it for one finds none. All that
  torch itself does goes through methods that find the live group.
* While it is offloaded, everything that needs a communicator raises
  :class:`~reloadpg.errors.GroupOffloadedError`. It never stands for another group.

Cost of a collective: one Python call that forwards to the live group; nothing else runs per
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from torch.distributed import ProcessGroup

from . import c10d, surface
from .construction import Construction
from .errors import GroupDestroyedError, GroupOffloadedError, GroupPickleError
from .forwarding import Forwarding
from .state import GroupState, History
from .vacant import Vacant

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as CppBackend

__all__ = ["GroupState", "History", "ReloadableProcessGroup"]


@dataclass
class _Settings:
    """What was changed on the live group after its creation; the next generation gets it too."""

    timeouts: dict[str, timedelta] = field(default_factory=dict)
    desc: str = ""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


_BOUND_DEVICE: property = ProcessGroup.__dict__["bound_device_id"]


class ReloadableProcessGroup(Forwarding):
    """A process group that keeps its identity while its communicator is released and rebuilt.

    Instances are made by the patched ``torch.distributed`` functions, never by hand. Identity,
    hash, ``group_name``, rank and size never change. Copying gives the same object; a pickle
    holds the group's name and is resolved in the receiving process.

    Attributes:
        construction: how the group was made.
        generation: number of times that the group was rebuilt.
        state: :class:`GroupState`.
        is_live: whether the group owns a communicator now.
    """

    def __init__(self, inner: ProcessGroup, construction: Construction) -> None:
        self._rank, self._size = inner.rank(), inner.size()
        # The (store, rank, size) form, the only one in torch's stubs, fails for subclasses.
        super().__init__(self._rank, self._size)  # type: ignore[call-arg, arg-type]
        self.construction = construction
        self.generation = 0
        self.state = GroupState.LIVE
        self.last_error = ""
        self.history = History()
        self._inner: Any = inner
        self._name = construction.name
        self._backend_name = str(inner.name())
        self._devices = list(inner._device_types)
        self._settings = _Settings(desc=str(inner.group_desc))
        self._symm_mem: Any = None
        self._solitary = False
        # Where the generations so far have left keys in the job's store.
        self.store_paths = [c10d.store_path(self._name, is_world=inner is c10d.world())]
        device = inner.bound_device_id
        if device is not None:
            # The C++ getter is not virtual: the proxy's own C++ object must hold the device.
            _BOUND_DEVICE.__set__(self, device)

    @property
    def is_live(self) -> bool:
        return self.state is GroupState.LIVE

    # -- identity: answered in every state --------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # C++ asks the class for these names whenever it wants rank and size. Finding none cost 0.6 us
    # each time (get_world_size took 3.5 times as long); finding a C function, it asks no more.
    getRank = ProcessGroup.__dict__["rank"]  # noqa: N815
    getSize = ProcessGroup.__dict__["size"]  # noqa: N815

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupName(self) -> str:  # noqa: N802 - looked up by C++
        return self._name

    @property
    def group_desc(self) -> str:
        return self._settings.desc

    def getGroupDesc(self) -> str:  # noqa: N802 - looked up by C++
        return self._settings.desc

    def getBackendName(self) -> str:  # noqa: N802 - looked up by C++
        # Not the inner backend's name: DDP's logger, told "gloo", fetches a gloo backend from the
        # C++ object and fails, since none is mounted there.
        return "reloadable"

    def name(self) -> str:
        return self._backend_name

    def _get_backend_name(self) -> str:
        return self._backend_name

    @property
    def _device_types(self) -> list[Any]:
        return [] if self._solitary else list(self._devices)

    def _bind_device(self, device: Any) -> None:
        _BOUND_DEVICE.__set__(self, device)
        if self.is_live:
            self._inner.bound_device_id = device

    # Read by every barrier: torch's own getter, with no Python in between.
    bound_device_id = property(_BOUND_DEVICE.fget, _bind_device)

    @property
    def use_pg_for_symm_mem_rendezvous(self) -> Any:
        return self._inner.use_pg_for_symm_mem_rendezvous if self.is_live else self._symm_mem

    @use_pg_for_symm_mem_rendezvous.setter
    def use_pg_for_symm_mem_rendezvous(self, value: Any) -> None:
        self._symm_mem = value
        if self.is_live:
            self._inner.use_pg_for_symm_mem_rendezvous = value

    def get_group_store(self) -> Any:
        return c10d.store_of(self)

    def _set_group_name(self, name: str) -> None:
        if name != self._name:
            raise ValueError(
                f"the name of {self!r} is fixed for the life of the job (meshes and compiled code "
                "find the group by it); create a new group for another name"
            )

    def _set_group_desc(self, desc: str) -> None:
        self._settings.desc = desc
        if self.is_live:
            self._inner._set_group_desc(desc)

    def _has_hooks(self) -> bool:
        return bool(self._inner._has_hooks()) if self.is_live else False

    def _wait_for_pending_works(self) -> None:
        if self.is_live:
            self._inner._wait_for_pending_works()

    def _start_coalescing(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._inner._start_coalescing(*args, **kwargs)
        except (GroupOffloadedError, GroupDestroyedError):
            c10d.close_coalescing(self)
            raise

    def __copy__(self) -> ReloadableProcessGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ReloadableProcessGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return find_group, (self._name, self.construction.ranks)

    def __repr__(self) -> str:
        ranks = self.construction.ranks
        shown = str(list(ranks)) if len(ranks) <= 8 else f"{len(ranks)} ranks"
        return (
            f"<ReloadableProcessGroup {self._name!r} ({self.group_desc}) {shown} "
            f"{self.construction.backend} {self.state} generation {self.generation}>"
        )

    @contextmanager
    def solitary(self) -> Iterator[None]:
        """Within this block, look like a group without devices to torch's creating functions.

        They ask WORLD for a communicator to split from; an offloaded WORLD has none, and the new
        group must get a fresh one. Local.
        """
        device = self.bound_device_id
        self._solitary = True
        _BOUND_DEVICE.__set__(self, None)
        try:
            yield
        finally:
            self._solitary = False
            _BOUND_DEVICE.__set__(self, device)

    # -- the shortest collectives, written out: 5% of their time (benchmarks/dispatch.py) ------

    def send(self, tensors: Any, dstRank: int, tag: int) -> Any:  # noqa: N803 - torch's names
        work = self._inner.send(tensors, dstRank, tag)
        return surface.COMPLETED_WORK if work is None else work

    def recv(self, tensors: Any, srcRank: int, tag: int) -> Any:  # noqa: N803
        work = self._inner.recv(tensors, srcRank, tag)
        return surface.COMPLETED_WORK if work is None else work

    def barrier(self, *args: Any, opts: Any = None, **kwargs: Any) -> Any:
        if opts is not None:  # so dist.barrier passes it; pybind takes longer over a keyword
            args = (*args, opts)
        work = self._inner.barrier(*args, **kwargs)
        return surface.COMPLETED_WORK if work is None else work

    # -- end of life: the user destroys the group -------------------------------------------

    def shutdown(self) -> None:
        """Shut the communicator down for good; called by ``destroy_process_group``. Idempotent."""
        if self.is_live and self._inner._has_hooks():
            self._inner._wait_for_pending_works()
        self._end(lambda inner: inner.shutdown())

    def abort(self) -> None:
        """Abort the communicator for good; called by ``_abort_process_group``. Idempotent."""
        self._end(lambda inner: inner.abort())

    def _end(self, how: Callable[[Any], None]) -> None:
        vacant = self._inner if isinstance(self._inner, Vacant) else None
        inner = self._inner if vacant is None else vacant.rest
        self.state = GroupState.DESTROYED
        self._inner = Vacant(self, None)
        if vacant is not None and vacant.parked is not None:
            vacant.parked.abort()  # suspended: the peers cannot be asked to take part in an end
        elif inner is not None:
            how(inner)

    # -- generations: called by the strategies ----------------------------------------------

    def _detach(self, state: GroupState = GroupState.OFFLOADED, reason: str = "") -> Any:
        """Give up the live or parked group and remember what was set on it; the caller ends it."""
        inner = self.communicator
        if self.is_live:
            self._remember(inner)
        self.state = state
        self._inner = Vacant(self, self._kept(inner), reason)
        self.last_error = reason
        c10d.drop_generation(self)
        return inner

    def _park(self) -> Any:
        """Set the live group aside, whole, and refuse its use; the caller suspends it."""
        inner = self._inner
        self._remember(inner)
        self.state = GroupState.OFFLOADED
        self._inner = Vacant(self, self._kept(inner), parked=inner)
        return inner

    def _unpark(self) -> None:
        """Make the group that was set aside the live one again."""
        inner = self._inner.parked
        inner._set_group_desc(self._settings.desc)
        if self._symm_mem is not None:
            inner.use_pg_for_symm_mem_rendezvous = self._symm_mem
        self._inner = inner
        self.state = GroupState.LIVE
        self.last_error = ""

    @property
    def communicator(self) -> Any:
        """The group that torch made: the live one or the one that is parked; None without."""
        return self._inner.parked if isinstance(self._inner, Vacant) else self._inner

    def _remember(self, inner: Any) -> None:
        """Note what was set on a live group, for the next generation."""
        self._settings.timeouts = c10d.get_timeouts(inner, tuple(self.construction.devices))
        # A group made by a Python backend has no C++ backend, and torch's getter then raises.
        with suppress(RuntimeError):
            self._symm_mem = getattr(inner, "use_pg_for_symm_mem_rendezvous", self._symm_mem)

    def _attach(self, inner: ProcessGroup, generation: int) -> None:
        """Make a rebuilt group the live one, with the settings of the one before."""
        if isinstance(self._inner, Vacant) and self._inner.rest is not None:
            c10d.add_backends(inner, self._kept_backends(self._inner.rest))
        c10d.take_generation(inner, self)
        c10d.set_timeouts(inner, self._settings.timeouts)
        inner._set_group_desc(self._settings.desc)
        if self._symm_mem is not None:
            cast(Any, inner).use_pg_for_symm_mem_rendezvous = self._symm_mem
        for name, args, kwargs in self._settings.calls:
            getattr(inner, name)(*args, **kwargs)
        self._inner = inner
        self.generation = generation
        self.state = GroupState.LIVE
        self.last_error = ""

    def current_timeouts(self) -> dict[str, timedelta]:
        """Timeouts by device type: the live group's, or those that the next one will get."""
        if self.is_live:
            return c10d.get_timeouts(self._inner, tuple(self.construction.devices))
        return dict(self._settings.timeouts)

    def memory_stats(self) -> dict[str, int] | None:
        """What the communicator says it holds, in bytes, by NCCL's names; None if it says nothing.

        Local, at any time; empty without a communicator and for one that was never used.
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

    def _settle_offloaded(self) -> None:
        """A failed group that an offload has met again is an offloaded one. Local, idempotent."""
        if self.state is GroupState.FAILED:
            self.state = GroupState.OFFLOADED
            self.last_error = self._inner.reason = ""

    def _fail(self, reason: str) -> None:
        """Mark an offloaded group as failed: still without a communicator, with the reason."""
        self.state = GroupState.FAILED
        self.last_error = reason
        self._inner.reason = reason

    def _kept(self, inner: Any) -> ProcessGroup | None:
        if not self.construction.is_mixed:
            return None
        return c10d.group_of_backends(
            self.rank(), self.size(), c10d.store_of(self), self._kept_backends(inner)
        )

    def _kept_backends(self, group: ProcessGroup) -> Mapping[str, tuple[str, CppBackend]]:
        backends = c10d.live_backends(group, self.construction.kept)
        return {device: (self.construction.devices[device], b) for device, b in backends.items()}


def find_group(name: str, ranks: tuple[int, ...] = ()) -> ProcessGroup:
    """The group of that name in this process: how a pickled group is resolved.

    Local; works while the group is offloaded.

    Raises:
        GroupPickleError: this process has no group of that name, or one of other ranks.
    """
    for group in c10d.known_groups():
        if c10d.name_of(group) == name:
            if ranks and c10d.ranks_of(group) != tuple(ranks):
                raise GroupPickleError(
                    f"a pickled process group {name!r} of ranks {list(ranks)} cannot be resolved: "
                    f"here that name is a group of ranks {list(c10d.ranks_of(group))}. Unpickle it "
                    "in a process of the same job, with its groups created in the same order."
                )
            return group
    raise GroupPickleError(
        f"a pickled process group {name!r} cannot be resolved: this process has no group of that "
        "name. A pickle holds only the name; create the same groups here first (or leave the "
        "group out of what is pickled)."
    )
