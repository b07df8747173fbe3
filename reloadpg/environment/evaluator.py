"""A group for programs that only gather results: made where the launcher started several ranks.

Imports torch.distributed only where it makes a group: an evaluator may run without it.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

from ..observability.logs import name_rank_in_records
from .launchers import is_initialized
from .model import DistributedEnvironment
from .variables import Variables, as_timedelta

__all__ = ["ensure_process_group"]

TIMEOUT = timedelta(seconds=60000)
INIT_TIMEOUT = timedelta(minutes=5)


def ensure_process_group(
    *,
    timeout: timedelta | float = TIMEOUT,
    init_timeout: timedelta | float = INIT_TIMEOUT,
) -> bool:
    """Make a gloo group if torch-style variables say that there are several ranks.

    Needs what ``init_method="env://"`` needs: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``. Collective over the job where it makes the group; blocking, bounded by
    ``init_timeout``; idempotent. Logs one line if it makes one. Nothing is done, and nothing
    logged, in a world of 1, without ``WORLD_SIZE``, or if a group exists. If only addresses are
    missing, it warns and does nothing: the ranks then work alone.

    Args:
        timeout: of the group; by default the 60000 s that long evaluations need.
        init_timeout: bound of bring-up.

    Returns:
        Whether it made the group. Then ``destroy_distributed()`` is the caller's to call.

    Raises:
        DistributedEnvironmentError: a variable is missing, empty, not a number or out of range.
        DisagreementError, RendezvousTimeoutError, PeerFailedError: as ``init_distributed``.
    """
    name_rank_in_records()
    bound = as_timedelta(timeout, "timeout")
    init_bound = as_timedelta(init_timeout, "init_timeout")
    if is_initialized() or "WORLD_SIZE" not in os.environ:
        return False
    read = Variables(os.environ, "torchrun")
    world_size = read.integer("WORLD_SIZE", minimum=1)
    if world_size == 1:
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in read]
    if missing:
        logging.getLogger(__name__).warning(
            "WORLD_SIZE=%d, but %s is not set: no process group is made, each rank works alone. "
            "Set it, or start the ranks with torchrun",
            world_size,
            " and ".join(missing),
        )
        return False
    read.require(("RANK", "WORLD_SIZE"))
    environment, knows_local_rank = _environment(read, world_size)

    from .bringup import bring_up
    from .device import choose_placement

    placement = choose_placement("gloo", "cpu", None, environment.local_rank)
    bring_up(environment, placement, bound, init_bound, None, knows_local_rank=knows_local_rank)
    return True


def _environment(read: Variables, world_size: int) -> tuple[DistributedEnvironment, bool]:
    """The ranks as far as env:// knows them: without a local rank, nodes are not known."""
    rank = read.below("RANK", "WORLD_SIZE", world_size)
    knows = "LOCAL_RANK" in read
    local_rank = read.below("LOCAL_RANK", "WORLD_SIZE", world_size) if knows else rank
    environment = DistributedEnvironment(
        source="torchrun",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=world_size,
        node_rank=0,
        num_nodes=1,
        master_addr=read.host("MASTER_ADDR"),
        master_port=read.integer("MASTER_PORT", minimum=1, maximum=65535),
    )
    return environment, knows
