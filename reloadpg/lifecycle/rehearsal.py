"""A rehearsal on groups of this process alone, before the first offload releases anything.

A new torch may have every name that this library uses and still behave differently. The rehearsal
runs the functions that an offload and a reload call for each group: it captures a creation,
releases the communicator, replays the creation and puts the result in place. Its groups are in no
table of torch, and torch's counter of names is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
from torch.distributed import HashStore, ProcessGroup

from .. import c10d
from ..errors import GroupOffloadedError, ReloadpgError
from ..groups.creation import WORLD_ORDER, Construction, Order, by_members
from ..groups.proxy import ReloadableProcessGroup

_TIMEOUT = timedelta(minutes=1)
"""Nothing waits for it: the groups have no peers."""


def rehearse(world: ProcessGroup) -> None:
    """Offload and reload two groups of this process alone. Local; some milliseconds.

    Raises:
        ReloadpgError: a step failed; nothing was changed. The cause is chained.
    """
    try:
        with c10d.solitary_backend() as backend:
            _cycle(world, backend, None)
            _cycle(world, backend, WORLD_ORDER)
    except Exception as cause:
        raise ReloadpgError(
            f"offload: the rehearsal on a group of this process alone failed with torch "
            f"{torch.__version__}: {type(cause).__name__}: {cause}. No group was changed, and no "
            "communicator was released. Use a version of torch that reloadpg was tested with, and "
            "report this error."
        ) from cause


def _cycle(world: ProcessGroup, backend: str, place: Order | None) -> None:
    is_world = place is not None  # its timeout is torch's default
    name = "reloadpg rehearsal of the default group" if is_world else "reloadpg rehearsal"
    rank = c10d.ranks_of(world)[world.rank()]
    call = by_members([rank], None if is_world else _TIMEOUT, backend, name)
    store = HashStore()
    devices = dict([backend.split(":")])
    record = Construction(call, name, [0], backend, devices, tuple(devices), 0, name, place=place)
    with c10d.Unseen():
        inner = record.replay(name, store, None)
        entry = c10d.entry_of(inner)
        _expect(entry[0] == name and dict(entry[3]) == devices, f"torch's tables have {entry}")
        group = ReloadableProcessGroup(inner, record)
    try:
        group._managed.detach().shutdown()
        _expect(_refuses(group), "a collective on an offloaded group raised no error")
        with c10d.Unseen():
            rebuilt = record.replay(f"{name}@1", store, None)
        _expect(rebuilt is not inner, "a replay returned the released group")
        group._managed.attach(rebuilt, 1)
        c10d.group_of_backends(0, 1, store, _backends(rebuilt, devices))  # as for a mixed group
        group.allreduce([torch.zeros(1)]).wait()
    finally:
        group.shutdown()
        c10d.drop_generation(group)


def _backends(
    group: ProcessGroup, devices: Mapping[str, str]
) -> dict[str, tuple[str, c10d.CppBackend]]:
    live = c10d.live_backends(group, tuple(devices))
    _expect(live.keys() == devices.keys(), f"a rebuilt group has backends for {[*live]}")
    return {device: (devices[device], backend) for device, backend in live.items()}


def _refuses(group: ProcessGroup) -> bool:
    try:
        group.allreduce([torch.zeros(1)])
    except GroupOffloadedError:
        return True
    return False


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)
