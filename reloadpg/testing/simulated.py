"""Simulated accelerator: backend ``sim``, for jobs and tests on machines without a GPU.

::

    from reloadpg.testing import simulated

    simulated.register()
    torch.distributed.init_process_group("sim")

Its groups behave like an accelerator's: creating one is local, a communicator is created at the
first use and holds memory until it is released, and a group cannot be used after its ``shutdown``
or ``abort``. The memory is real, so it can be measured from outside the process; the results are
gloo's, so they can be compared bit for bit. Everything here is per process. NCCL's own rules, such
as those of a suspend, are in the stand-ins for NCCL (:mod:`reloadpg.testing.standins`).

A test can inject faults::

    with simulated.inject(simulated.Fault("create", rank=1, nth=3, message="no memory")):
        reloadpg.reload()  # fails in the third creation of rank 1

Faults at barriers and in failures happen on all backends, also where ``sim`` is not registered.

Limits: it has no streams, and operations overlap only as in gloo. It cannot be part of a mixed
group (``cpu:gloo,privateuseone:sim``), since torch uses a group from a Python creating function for
all devices. It cannot be split.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed import Backend

from reloadpg.lifecycle import memory
from reloadpg.rendezvous.round import barrier_hooks

from ._sim_group import Communicator, SimulatedProcessGroup
from ._sim_state import (
    DEVICES,
    NAME,
    BarrierInfo,
    Device,
    Fault,
    GroupInfo,
    InjectedFault,
    InjectedFaultError,
    SimState,
    Stats,
)

__all__ = [
    "NAME",
    "BarrierInfo",
    "Fault",
    "GroupInfo",
    "InjectedFault",
    "InjectedFaultError",
    "SimState",
    "Stats",
    "clear_faults",
    "configure",
    "configured",
    "groups",
    "inject",
    "register",
    "stats",
]

_device = Device()


def register() -> None:
    """Make ``sim`` a backend of ``torch.distributed``. Local, idempotent, thread-safe."""
    with _device.lock:
        if NAME not in Backend.backend_list:
            Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
        memory.add_source("simulated", memory.Source(lambda: stats().held_bytes, _free_bytes))


def configure(
    *,
    bytes_per_communicator: int | None = None,
    capacity_bytes: int | None = None,
    eager: bool | None = None,
    creation_seconds: float | None = None,
    release_seconds: float | None = None,
) -> None:
    """Set properties of groups that are created later, and of the device. Local.

    None leaves a setting unchanged.

    Args:
        bytes_per_communicator: bytes that each communicator holds from its first use (default: 32
            MiB).
        capacity_bytes: limit for all communicators of this process together; takes effect
            immediately, 0 removes the limit (default: no limit).
        eager: whether creation connects all members, like NCCL's with a bound device: collective
            and blocking (default: False).
        creation_seconds: duration of a creation, without holding the GIL (default: 0).
        release_seconds: duration of ``shutdown`` or ``abort``, without holding the GIL (default:
            0).

    Raises:
        ValueError: a number is out of range; nothing was changed.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name, value in given.items():
        if value < 0:
            raise ValueError(f"configure({name}={value}): must be 0 or more; nothing was changed")
    if (capacity := given.pop("capacity_bytes", None)) is not None:
        _device.capacity = int(capacity) or None
    _device.settings = replace(_device.settings, **given)


@contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """:func:`configure` within a block; at its end the settings are as before. Local."""
    before = _device.settings, _device.capacity
    configure(**settings)
    try:
        yield
    finally:
        _device.settings, _device.capacity = before


def stats() -> Stats:
    """Counters and held memory of this process. Local; a signal handler may call it."""
    with _device.lock:
        return Stats(**_device.counts)


def groups() -> tuple[GroupInfo, ...]:
    """The groups of this process, in order of creation. Local; a signal handler may call it."""
    with _device.lock:
        return tuple(_device.live.values())


def inject(fault: Fault) -> InjectedFault:
    """Inject a fault into this process. Local.

    Returns:
        A handle that counts and clears the fault; also a context manager.
    """
    if fault.at in ("barrier", "failure") and _at_barrier not in barrier_hooks:
        barrier_hooks.append(_at_barrier)
    handle = InjectedFault(fault, _device.remove)
    with _device.lock:
        _device.faults.append(handle)
    return handle


def clear_faults() -> None:
    """Remove all faults; stalled threads continue. Local, idempotent."""
    for handle in list(_device.faults):
        handle.clear()


def _at_barrier(moment: Any, operation: str, phase: str, rank: int) -> None:
    """A rank reaches a barrier, or fails."""
    name = f"{operation}.{phase}"
    if moment == "failing":
        _device.check("failure", name, BarrierInfo(name, rank))
    else:
        _device.check("barrier", name, BarrierInfo(name, rank), moment)


def _create(received: Any, options: object) -> SimulatedProcessGroup:
    """The creating function: what torch calls, with what it received from its caller."""
    info = GroupInfo(
        name=str(received.group_id),
        desc="",
        rank=int(received.group_rank),
        size=int(received.group_size),
        ranks=tuple(received.global_ranks_in_group),
        timeout=received.timeout,
        pg_options=options,
    )
    device, settings = _device, _device.settings
    device.check("create", "create", info)
    time.sleep(settings.creation_seconds)
    communicator = Communicator(info, received.store, settings, device)
    group = SimulatedProcessGroup(communicator, received.store)
    try:
        if settings.eager:
            communicator.eager_connect_single_device()
        device.check("create", "create", info, "after")
    except BaseException:
        group.abort()
        raise
    return group


def _free_bytes() -> int | None:
    return _device.free_bytes
