"""The tables of c10d, which map objects and names to groups."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch._C import _distributed_c10d as _cpp
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as _c10d

from ..texts import described

_changing_lists = threading.Lock()
"""Held while a list of groups is changed in several steps. Torch appends to it in one step, from
any thread that creates a group, so a list is never replaced by a copy."""


def is_initialized() -> bool:
    return _c10d.is_initialized()


def world() -> ProcessGroup | None:
    return _c10d._world.default_pg


def known_groups() -> list[ProcessGroup]:
    """All groups that this process is a member of, in order of creation."""
    return list(_c10d._world.pg_map)


def is_known(group: ProcessGroup) -> bool:
    return group in _c10d._world.pg_map


def name_of(group: ProcessGroup) -> str:
    """The name under which c10d registered the group, or its own name if it is in no table."""
    name = _c10d._world.pg_names.get(group)
    return str((group.group_name or "(unnamed)") if name is None else name)


def desc_of(group: ProcessGroup) -> str:
    """The description of the group; ``undefined`` or empty without one."""
    return str(getattr(group, "group_desc", ""))


def label_of(group: ProcessGroup) -> str:
    """The group as text, for messages: its name, and its description or ranks."""
    return f"{name_of(group)!r} ({described(desc_of(group), ranks_of(group))})"


def labels_of(groups: Sequence[ProcessGroup]) -> str:
    """The labels of the first eight groups, and the number of the others, for messages."""
    more = f" and {len(groups) - 8} more" if len(groups) > 8 else ""
    return ", ".join(map(label_of, groups[:8])) + more


def is_of_mesh(group: ProcessGroup) -> bool:
    """Whether ``device_mesh`` created the group, by the description that it gives."""
    return desc_of(group).startswith("mesh_")


def references() -> Counter[int]:
    """How many references torch's tables hold to each group, by its id. Local.

    C++ has a table of names, which holds one to each reloadable group.
    """
    tables = cast(Any, _c10d._world)
    holders = map(list, [*_read_by_group(tables), *tables.tags_to_pg.values()])
    found = Counter(map(id, chain.from_iterable(holders)))
    found.update(map(id, known_groups()))  # in C++
    return found


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """Global ranks of the members, in the order of their group ranks."""
    ranks = _c10d._world.pg_group_ranks.get(group)
    return tuple(range(group.size())) if ranks is None else tuple(map(int, ranks))


def backend_of(group: ProcessGroup) -> str:
    """The backend string that the group was created with: ``nccl``, ``cpu:gloo,cuda:nccl``."""
    return str(_c10d._world.pg_map[group][0])


def backend_class(name: str) -> type:
    """The class of the backends of that name, if torch asks for it (2.8 to 2.15)."""
    return cast(type, getattr(_c10d, _CLASSES.get(name, ""), object))


_CLASSES = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}


def store_of(group: ProcessGroup) -> Store:
    """The store that the group's own rendezvous uses."""
    return _c10d._world.pg_map[group][1]


class Entry(NamedTuple):
    """What c10d knows of a group. Torch's own values, which it does not change later.

    Attributes:
        ranks: global ranks of the members, in the order of their group ranks.
        backend: the backend string that the group was created with: ``nccl``.
        config: the backend of each device type: ``cpu:gloo,cuda:nccl``.
        desc: the description; ``undefined`` or empty without one.
    """

    name: str
    ranks: Collection[int]
    backend: str
    config: str
    desc: str = ""

    @property
    def devices(self) -> Mapping[str, str]:
        return devices_of(self.config)


def entry_of(group: ProcessGroup) -> Entry:
    """Read a group's entries. Nothing is copied, since a job creates thousands of groups."""
    tables = _c10d._world
    known = tables.pg_map.get(group)
    if known is None:
        found = {d.type: group._get_backend(d).name() for d in group._device_types}
        config = ",".join(f"{device}:{name}" for device, name in found.items())
        return Entry(name_of(group), range(group.size()), "", config, desc_of(group))
    ranks = tables.pg_group_ranks.get(group)
    if ranks is None:  # created by hand, below another library's wrapper
        ranks = {rank: rank for rank in range(group.size())}
    config = tables.pg_backend_config[group]
    desc = getattr(group, "group_desc", "")
    return Entry(tables.pg_names[group], ranks, known[0], config, desc)


def device_backends(group: ProcessGroup) -> dict[str, str]:
    """Backend by device type, as c10d resolved it: ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return dict(entry_of(group).devices)


@lru_cache(maxsize=64)  # a job has thousands of groups, and a few configurations
def devices_of(config: str) -> Mapping[str, str]:
    """The backend of each device type, from the value that c10d keeps of a group."""
    pairs = [pair.split(":", 1) for pair in config.split(",") if ":" in pair]
    return MappingProxyType(dict(pairs))


NON_MEMBERS = (None, _c10d.GroupMember.NON_GROUP_MEMBER)
"""What a creating function returns to a rank that is not a member of the group."""


def is_non_member(result: object) -> bool:
    """Whether a creating function returned that this rank is not a member of the group."""
    return result in NON_MEMBERS


def known_backends() -> frozenset[str]:
    """Names that torch accepts as a backend in this process, registered plugins included."""
    return frozenset(str(name) for name in _c10d.Backend.backend_list)


def default_timeout(backend: str) -> timedelta:
    return _c10d._get_default_timeout(cast(Any, backend))


def has_peers() -> bool:
    """Whether other processes take part. False with the fake backend, which has no real store."""
    group = world()
    return group is not None and group.size() > 1 and "fake" not in device_backends(group).values()


def take_place(inner: ProcessGroup, proxy: ProcessGroup) -> None:
    """Put ``proxy`` in the place of ``inner`` in c10d's tables and in the C++ name registry.

    An open coalescing stays with ``inner``, on which torch will end it.
    """
    tables: Any = _c10d._world
    by_group, tags = _read_by_group(tables), tables.tags_to_pg
    for table in by_group:
        if inner in table:
            table[proxy] = table.pop(inner)
    name, tag = by_group[_NAMES][proxy], by_group[_TAGS].get(proxy)
    with _changing_lists:
        for groups in (tags.get("", []), tags.get(tag, []) if tag else []):
            # Torch appends: a new group is the last. Its index does not change here.
            for index in range(len(groups) - 1, -1, -1):
                if groups[index] is inner:
                    groups[index] = proxy
                    break
    _cpp._unregister_process_group(name)
    _cpp._register_process_group(name, proxy)
    if tables.default_pg is inner:
        tables.default_pg = proxy


def take_generation(inner: ProcessGroup, proxy: ProcessGroup) -> None:
    """Move c10d's entries of a rebuilt ``inner``, which is in no table of names, to the proxy.

    The proxy keeps the store of its first generation, which may hold keys of users.
    """
    hooks = _flight_recorder_hooks()
    hook = hooks.pop(inner, None)
    if hook is not None:
        hooks[proxy] = hook


NAMED_TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"),
)
"""The tables in which torch enters a new group."""
_HOOKS = "pg_flight_recorder_hooks"  # the recorder of a group, from 2.15 on
_BY_GROUP = (*NAMED_TABLES[:-1], *([_HOOKS] if hasattr(_c10d._world, _HOOKS) else []))
_read_by_group = attrgetter(*_BY_GROUP)
_NAMES, _TAGS = _BY_GROUP.index("pg_names"), _BY_GROUP.index("pg_to_tag")


_NESTED = 4
"""Maximum number of NCCL group calls to end; torch opens two."""


def close_coalescing(group: ProcessGroup) -> None:
    """End the coalescing of a group that an error has left open. Local, idempotent.

    ``_coalescing_manager`` does not clean up: after an error in its block, the group stays in
    torch's table and NCCL's group call stays open in this thread. Torch and NCCL then queue all
    later operations of the thread and run none of them (seen on 2.13 and 2.15).
    """
    if _c10d._world.pg_coalesce_state.pop(group, None) is None:
        return
    for device in device_backends(group):
        # Repeat until NCCL returns an error: its own, or that no group call is open. A failed
        # transfer leaves a second group call open. Other backends raise at once.
        with suppress(RuntimeError):
            for _ in range(_NESTED):
                cast(Any, group)._end_coalescing(torch.device(device))


def drop_generation(group: ProcessGroup) -> None:
    """Remove what c10d keeps of a generation by its group or its proxy. Local, idempotent."""
    _flight_recorder_hooks().pop(group, None)


def _flight_recorder_hooks() -> dict[Any, Any]:
    return getattr(_c10d._world, _HOOKS, {})
