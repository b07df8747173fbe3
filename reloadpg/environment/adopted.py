"""A default group that someone else made: described as it is, and left as it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from reloadpg import c10d
from reloadpg.environment.detect import detect_environment
from reloadpg.environment.device import parse_backend
from reloadpg.environment.errors import DistributedEnvironmentError
from reloadpg.environment.meeting import job_round
from reloadpg.environment.mesh_groups import build_mesh
from reloadpg.environment.model import DistributedEnvironment
from reloadpg.errors import InvalidOptionError
from reloadpg.rendezvous.plan import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["adopt_existing"]


def adopt_existing(
    backend: str | None,
    timeout: timedelta | None,
    init_timeout: timedelta,
    device: torch.device | str | None,
    sizes: Mapping[str, int] | None,
    *,
    expected: bool,
) -> tuple[DistributedEnvironment, torch.device, DeviceMesh | None]:
    """Describe the existing group, and build a mesh over it if one is asked for.

    Local without ``sizes``; with them collective, blocking and bounded. The group itself is not
    touched. A mesh's groups get ``timeout``, or else the group's own.
    """
    world = c10d.world()
    if world is None:
        raise InvalidOptionError("There is no group to adopt. Call init_distributed() instead.")
    current = _timeout_of(world)
    if not expected:
        _warn_of_differences(world, backend, timeout, current)
    try:
        used = torch.device(device) if device is not None else _device_of(world)
    except RuntimeError as error:
        raise InvalidOptionError(
            f"device={device!r} is not a device. Nothing was made. Correct the argument."
        ) from error
    environment = _environment_of_group()
    if sizes is None:
        return environment, used, None
    settings = {"mesh_dims": " x ".join(f"{name}={size}" for name, size in sizes.items())}
    round_ = job_round("init_distributed", ("agree", "connected"), init_timeout)
    round_.agree("agree", Plan("init_distributed", settings))
    bound = timeout or current or c10d.default_timeout(c10d.backend_of(world))
    try:
        mesh = build_mesh(sizes, used.type, bound)
    except BaseException as error:
        round_.fail(error)
        raise
    round_.barrier("connected")
    return environment, used, mesh


def _environment_of_group() -> DistributedEnvironment:
    """The launcher's word where it fits the group, otherwise what the group itself knows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        detected = detect_environment()
    except DistributedEnvironmentError as error:
        reason = str(error)
    else:
        if (detected.rank, detected.world_size) == (rank, world_size):
            return detected
        reason = f"{detected.source} says rank {detected.rank} of {detected.world_size}"
    logging.getLogger(__name__).debug(
        "the adopted group is rank %d of %d, and its nodes are not known: %s",
        rank,
        world_size,
        reason,
    )
    return DistributedEnvironment(
        source="process_group",
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        node_rank=0,
        num_nodes=1,
        master_port=0 if world_size == 1 else 1,
    )


def _device_of(world: ProcessGroup) -> torch.device:
    for kind in c10d.device_backends(world):
        if kind != "cpu" and _is_accelerator(kind):
            return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")


def _is_accelerator(kind: str) -> bool:
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == kind


def _timeout_of(world: ProcessGroup) -> timedelta | None:
    """The longest current timeout of the group's backends; None while it is offloaded."""
    return max(c10d.get_timeouts(world, tuple(c10d.device_backends(world))).values(), default=None)


def _warn_of_differences(
    world: ProcessGroup,
    backend: str | None,
    timeout: timedelta | None,
    current: timedelta | None,
) -> None:
    differing = []
    if backend is not None and not _is_same_backend(world, backend):
        differing.append(f"backend {backend!r} (it has {c10d.backend_of(world)!r})")
    # Read back from gloo, 60000 s is 60000.003 s on torch 2.15.
    slack = timedelta(milliseconds=10)
    if timeout is not None and current is not None and abs(timeout - current) > slack:
        differing.append(
            f"timeout {timeout.total_seconds():g} s (it has {current.total_seconds():g} s)"
        )
    if differing:
        logging.getLogger(__name__).warning(
            "the default group exists already and is adopted as it is; requested, but not "
            "applied: %s",
            ", ".join(differing),
        )


def _is_same_backend(world: ProcessGroup, backend: str) -> bool:
    wanted = parse_backend(backend, built=False)
    has = c10d.device_backends(world)
    if "" in wanted:
        return wanted[""] in (c10d.backend_of(world).lower(), *has.values())
    return all(has.get(kind) == name for kind, name in wanted.items())
