"""Every touch of torch's private names, and every branch on torch's version.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. Other modules of the package ask this one and never
import a name with a leading underscore from torch themselves. What torch really does here was
learnt by running it; each function says what it relies on.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import ModuleType
from typing import Any, cast

import torch
from torch._C._distributed_c10d import (
    Backend as CppBackend,
)
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import ProcessGroup, device_mesh
from torch.distributed import distributed_c10d as _c10d

_GLOO = getattr(_c10d, "ProcessGroupGloo", None)

# ---------------------------------------------------------------------------------------------
# the module and its tables


def creator_modules() -> tuple[ModuleType, ...]:
    """Torch's modules that bind the creating functions: where they live, and who imports them."""
    return (_c10d, torch.distributed, device_mesh)


def batching_refuses_subclasses() -> bool:
    """Whether ``batch_isend_irecv`` coalesces for plain ``ProcessGroup`` objects alone.

    Seen on 2.8 and 2.13: it asks ``type(group) is ProcessGroup``, so a batch on a subclass is
    issued operation by operation, which NCCL can deadlock on. 2.15 asks the backend only.
    """
    try:
        return "type(group)" in inspect.getsource(_c10d.batch_isend_irecv)
    except OSError:  # no source at hand
        return bool(cast(Any, torch.__version__) < (2, 15))


def check_batch(operations: Any) -> None:
    """Raise what ``batch_isend_irecv`` raises for a list that is no batch."""
    _c10d._check_p2p_op_list(operations)


def batch_coalesced(operations: Sequence[Any]) -> list[Any]:
    """What ``batch_isend_irecv`` does for a group whose backend coalesces."""
    first = operations[0]
    with _c10d._coalescing_manager(first.group, first.tensor.device, async_ops=True) as manager:
        for one in operations:
            peer = "group_dst" if one.op in (_c10d.isend, _c10d.send) else "group_src"
            one.op(one.tensor, group=one.group, tag=one.tag, **{peer: one.group_peer})
    return cast("list[Any]", manager.works)


def init_process_group_original() -> Callable[..., Any]:
    """The unpatched ``init_process_group``."""
    function = _c10d.init_process_group
    return cast("Callable[..., Any]", getattr(function, "__wrapped__", function))


def is_initialized() -> bool:
    """Whether a default group exists."""
    return _c10d.is_initialized()


def world() -> ProcessGroup | None:
    """The default group as c10d's tables have it, or None."""
    return _c10d._world.default_pg


def known_groups() -> list[ProcessGroup]:
    """All groups that this process is a member of, in order of creation."""
    return list(_c10d._world.pg_map)


def is_known(group: ProcessGroup) -> bool:
    return group in _c10d._world.pg_map


def name_of(group: ProcessGroup) -> str:
    """The name under which c10d registered the group."""
    return str(_c10d._world.pg_names[group])


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """Global ranks of the members, in the order of their group ranks."""
    return tuple(_c10d._world.pg_group_ranks[group])


def backend_of(group: ProcessGroup) -> str:
    """The backend string as the group was asked for: ``nccl``, ``cpu:gloo,cuda:nccl``."""
    return str(_c10d._world.pg_map[group][0])


def store_of(group: ProcessGroup) -> Store:
    """The store that the group's own rendezvous uses."""
    return _c10d._world.pg_map[group][1]


def device_backends(group: ProcessGroup) -> dict[str, str]:
    """Backend by device type, as c10d resolved it: ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = str(_c10d._world.pg_backend_config[group])
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)  # type: ignore[misc]


def is_non_member(result: object) -> bool:
    """Whether a creating function answered that this rank is no member of the group."""
    return result is None or result == _c10d.GroupMember.NON_GROUP_MEMBER


def known_backends() -> frozenset[str]:
    """Names that torch accepts as a backend in this process, registered plugins included."""
    return frozenset(str(name) for name in _c10d.Backend.backend_list)


def default_timeout(backend: str) -> timedelta:
    return _c10d._get_default_timeout(cast(Any, backend))


def barrier_after_creation() -> bool:
    """Whether ``TORCH_DIST_INIT_BARRIER=1`` makes every creation wait for all ranks."""
    return _c10d._is_barrier_after_init() == 1


def has_peers() -> bool:
    """Whether other processes take part: not so with the fake backend, which has no real store."""
    group = world()
    return group is not None and group.size() > 1 and "fake" not in device_backends(group).values()


def take_place(inner: ProcessGroup, proxy: ProcessGroup) -> None:
    """Put ``proxy`` where ``inner`` stands in c10d's tables and in the C++ name registry.

    Afterwards every ``dist.*`` function finds the proxy, by object and by name, and ``inner`` is
    in no table. Local, not idempotent.
    """
    tables = _c10d._world
    name = tables.pg_names[inner]
    for table in _tables_by_group():
        if inner in table:
            table[proxy] = table.pop(inner)
    for groups in tables.tags_to_pg.values():
        groups[:] = [proxy if group is inner else group for group in groups]
    _unregister_process_group(name)
    _register_process_group(name, proxy)
    if tables.default_pg is inner:
        tables.default_pg = proxy


def take_generation(inner: ProcessGroup, proxy: ProcessGroup) -> None:
    """Remove a rebuilt ``inner`` from the tables; its proxy, there already, gets its store.

    Local, not idempotent.
    """
    tables = _c10d._world
    backend, _ = tables.pg_map[proxy]
    store = store_of(inner)
    hooks = _flight_recorder_hooks()
    hook = hooks.pop(inner, None)
    evict(inner)
    tables.pg_map[proxy] = (backend, store)
    if hook is not None:
        hooks[proxy] = hook


def evict(inner: ProcessGroup) -> None:
    """Remove a group from c10d's tables and from the C++ name registry. Local, idempotent."""
    tables = _c10d._world
    name = tables.pg_names.get(inner)
    tag = tables.pg_to_tag.get(inner)
    for table in _tables_by_group():
        table.pop(inner, None)
    for groups in tables.tags_to_pg.values():
        groups[:] = [group for group in groups if group is not inner]
    # Tags are made of names, so every generation has one: its empty list would stay for ever.
    if tag and not tables.tags_to_pg.get(tag):
        tables.tags_to_pg.pop(tag, None)
    if name is not None:
        with suppress(RuntimeError):
            _unregister_process_group(name)


def close_coalescing(group: ProcessGroup) -> None:
    """Take a group out of torch's table of groups that collect operations. Local, idempotent.

    ``_coalescing_manager`` enters a group there before it asks it to start and leaves it there if
    that fails; from then on torch collects the group's collectives and never runs them.
    """
    _c10d._world.pg_coalesce_state.pop(group, None)


def drop_generation(proxy: ProcessGroup) -> None:
    """Forget what the tables keep for one generation only. Local, idempotent."""
    _flight_recorder_hooks().pop(proxy, None)


def _tables_by_group() -> tuple[dict[Any, Any], ...]:
    tables = _c10d._world
    return (
        tables.pg_map,
        tables.pg_names,
        tables.pg_group_ranks,
        tables.pg_backend_config,
        tables.pg_to_tag,
        tables.pg_coalesce_state,
        _flight_recorder_hooks(),
    )


def _flight_recorder_hooks() -> dict[Any, Any]:
    # 2.15 parks the recorder of a group here; earlier versions have no such table.
    return cast("dict[Any, Any]", getattr(_c10d._world, "pg_flight_recorder_hooks", {}))


# ---------------------------------------------------------------------------------------------
# names: which one torch gives, and which one a replay must get


class _Names:
    """Takes the place of ``_process_group_name`` while a creating function runs.

    Names normally come from a process-wide counter that all ranks must advance alike, so a
    replay by the members alone needs its own. The hook is per thread: a group that another
    thread creates meanwhile gets its name from torch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._original: Callable[..., Any] | None = None
        self._users = 0
        self._local = threading.local()

    @contextmanager
    def forced(self, name: str) -> Iterator[None]:
        with self._hooked():
            self._local.forced = name
            try:
                yield
            finally:
                self._local.forced = None

    @contextmanager
    def observed(self) -> Iterator[list[str]]:
        """The names that torch gave in this block, in order."""
        with self._hooked():
            seen: list[str] = []
            self._local.seen = seen
            try:
                yield seen
            finally:
                self._local.seen = None

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._original = _c10d._process_group_name
                _c10d._process_group_name = self._name
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    _c10d._process_group_name = cast(Any, self._original)

    def _name(self, *args: Any, **kwargs: Any) -> Any:
        forced = getattr(self._local, "forced", None)
        if forced is not None:
            return forced
        original = self._original
        if original is None:  # a caller that looked the hook up just before it was taken off
            original = _c10d._process_group_name
        name = original(*args, **kwargs)
        seen = getattr(self._local, "seen", None)
        if seen is not None:
            seen.append(str(name))
        return name


_names = _Names()
forced_name = _names.forced
observed_names = _names.observed


# ---------------------------------------------------------------------------------------------
# WORLD


def root_store(group: ProcessGroup) -> Store:
    """The store beneath the group's own name prefix: shared by all ranks, not by generations."""
    store = store_of(group)
    return store.underlying_store if isinstance(store, PrefixStore) else store


def clone_store(store: Store) -> Store:
    """A handle on the same store with its own connection.

    A blocking wait holds the lock of its TCPStore client until it ends, so two threads that must
    not wait for each other need a client each.
    """
    return cast(Store, cast(Any, store).clone())


def create_world(
    *,
    rank: int,
    size: int,
    backend: str,
    store: Store,
    name: str,
    options: object,
    timeout: timedelta,
    device: torch.device | None,
    desc: str,
) -> ProcessGroup:
    """A default group as ``init_process_group`` makes it, given the store, and in the tables.

    ``init_process_group`` itself cannot be called again: it refuses a second default group, it
    opens a new rendezvous, and it wraps ``sys.excepthook`` once more each time. Collective over
    all ranks for backends that connect at creation; blocking.
    """
    group, _ = _c10d._new_process_group_helper(
        size,
        rank,
        [],
        _c10d.Backend(backend),
        store,
        cast(Any, name),
        backend_options=options,
        timeout=timeout,
        device_id=device,
        group_desc=desc,
    )
    created = cast(ProcessGroup, group)
    tables = _c10d._world
    ranks = tables.pg_group_ranks.get(cast(ProcessGroup, tables.default_pg))
    # The mapping is as long as the job is large: a rebuilt WORLD shares that of the one before.
    tables.pg_group_ranks[created] = ranks or {rank: rank for rank in range(size)}
    return created


# ---------------------------------------------------------------------------------------------
# what is inside a group


def live_backends(group: ProcessGroup, devices: Sequence[str]) -> dict[str, CppBackend]:
    """The backend objects of a group by device type; devices without one are left out."""
    found: dict[str, CppBackend] = {}
    for device in devices:
        with suppress(RuntimeError, AttributeError):
            found[device] = group._get_backend(torch.device(device))
    return found


def options_of(group: ProcessGroup, devices: Sequence[str]) -> object:
    """The options object of the first of the given backends that has one (NCCL does), or None."""
    for backend in live_backends(group, devices).values():
        options = getattr(backend, "options", None)
        if options is not None and not isinstance(options, getattr(_GLOO, "_Options", ())):
            return cast(object, options)
    return None


def get_timeouts(group: ProcessGroup, devices: Sequence[str]) -> dict[str, timedelta]:
    """Current timeouts by device type, as changed by ``_set_pg_timeout`` or ``set_timeout``."""
    found: dict[str, timedelta] = {}
    for device, backend in live_backends(group, devices).items():
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            found[device] = timeout
    return found


def set_timeouts(group: ProcessGroup, timeouts: Mapping[str, timedelta]) -> None:
    """Give a group's backends the timeouts read by :func:`get_timeouts`. Local, idempotent."""
    now = get_timeouts(group, tuple(timeouts))
    backends = live_backends(group, tuple(timeouts))
    for device, timeout in timeouts.items():
        if device in backends and now.get(device) != timeout:
            cast(Any, backends[device])._set_default_timeout(timeout)


@contextmanager
def together(parts: Sequence[Any]) -> Iterator[None]:
    """Within this block, NCCL communicators are aborted as one.

    Aborting several communicators of one job one by one can hang (pytorch#119797, #150690);
    torch's own ``_abort_process_group`` brackets them the same way.
    """
    nccl = getattr(_c10d, "ProcessGroupNCCL", None)
    backend = None
    for part in parts:
        found = live_backends(part, ("cuda",)) if isinstance(part, ProcessGroup) else {"": part}
        backend = next((b for b in found.values() if nccl and isinstance(b, nccl)), backend)
    if backend is None:
        yield
        return
    cast(Any, backend)._group_start()
    try:
        yield
    finally:
        cast(Any, backend)._group_end()


def suspend_obstacle(backend: CppBackend) -> str:
    """Why the communicators of a backend cannot be suspended, in words; empty if they can. Local.

    ``Backend.suspend`` is in torch 2.12 and later; NCCL has it from 2.29.7 on. With
    ``NCCL_CUMEM_ENABLE=0`` NCCL says that it worked and gives nothing back.
    """
    suspend = getattr(type(backend), "suspend", None)
    name = backend.name()
    if suspend is None:
        return f"torch {torch.__version__} cannot suspend {name} communicators (2.12 and later)"
    if suspend is not getattr(CppBackend, "suspend", None):
        return _cumem_obstacle()  # a backend written in Python that has its own
    if not name.startswith("nccl"):
        return f"backend {name} cannot suspend its communicators"
    version = cast(Any, torch.cuda.nccl).version()
    if version < (2, 29, 7):
        shown = ".".join(map(str, version))
        return f"NCCL {shown} cannot suspend communicators (2.29.7 and later)"
    return _cumem_obstacle()


def _cumem_obstacle() -> str:
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE=0 makes a suspend give nothing back"
    return ""


def memory_stats(backend: CppBackend) -> dict[str, int] | None:
    """What a backend's communicators say they hold, in bytes; empty if they were never used.

    Local. Keys as NCCL has them: ``total``, ``suspend`` (what a suspend gives back), ``persist``
    (what it leaves), ``suspended`` (1 while suspended). None if the backend gives no account.
    """
    stats = getattr(backend, "memory_stats", None)
    if stats is None:
        return None
    try:
        return dict(stats())
    except RuntimeError as error:
        return {} if "initialized" in str(error) else None


def group_of_backends(
    rank: int, size: int, store: Store, backends: Mapping[str, tuple[str, CppBackend]]
) -> ProcessGroup:
    """A bare group, in no table, that serves the given devices with existing backends.

    Args:
        rank: rank in the group.
        size: number of members.
        store: the store of the group.
        backends: by device type, the backend's name and the object.
    """
    group = ProcessGroup(store, rank, size)
    add_backends(group, backends)
    name, _ = next(iter(backends.values()))
    group._set_default_backend(_backend_type(name))
    return group


def add_backends(group: ProcessGroup, backends: Mapping[str, tuple[str, CppBackend]]) -> None:
    """Mount existing backends on a group, for devices that it does not serve yet. Local."""
    for device, (name, backend) in backends.items():
        group._register_backend(torch.device(device), _backend_type(name), backend)


def _backend_type(name: str) -> Any:
    return _c10d.Backend.backend_type_map.get(name, ProcessGroup.BackendType.CUSTOM)


def store_path(name: str, *, is_world: bool) -> str:
    """Where a group of that name, created now, keeps its keys in the job's store.

    Torch puts the default group's under its name, and all others under the default group's.
    """
    top = None if is_world else world()
    if top is None:
        return f"{name}//"
    paths: list[str] = getattr(top, "store_paths", None) or [f"{name_of(top)}//"]
    return f"{paths[-1]}{name}//"


def rendezvous_keys(path: str, devices: Sequence[str], rank: int) -> list[str]:
    """The keys that one member of a group writes to connect it, in the job's store.

    A group leaves them in the store for ever; with names that change from generation to
    generation the store would grow. Seen: gloo writes ``0/<rank>`` in the device's prefix on
    torch 2.8 to 2.15; NCCL's unique id is written by group rank 0 as ``0``.
    """
    return [
        f"{path}{device}//{key}"
        for device in devices
        for key in ([f"0/{rank}", "0"] if rank == 0 else [f"0/{rank}"])
    ]


def replace_store(group: ProcessGroup, store: Store) -> None:
    """Let a group, and the groups created after it, use another client of the same store."""
    tables = _c10d._world
    tables.pg_map[group] = (tables.pg_map[group][0], store)
