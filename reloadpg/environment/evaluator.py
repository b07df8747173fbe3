"""A group for programs that only gather results: made where the launcher started several ranks.

Imports torch.distributed only where it makes a group: an evaluator may run without it.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

from ..errors import as_timedelta
from ..observability.logs import name_rank_in_records
from .launchers import identify, is_initialized
from .model import ADDRESS, Variables

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
    logged, in a world of 1, without ``WORLD_SIZE``, if a group exists, or on a torch without
    ``torch.distributed``. If only addresses are
    missing, it warns and does nothing: the ranks then work alone; ``get_rank()`` tells them apart.

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
    if read.integer("WORLD_SIZE", minimum=1) == 1:
        return False
    identity = identify(os.environ)  # the rank must be known, also where each works alone
    missing = [name for name in ADDRESS if name not in read]
    if missing:
        logging.getLogger(__name__).warning(
            "WORLD_SIZE=%s, but %s is not set: no process group is made, each rank works alone. "
            "Set it, or start the ranks with torchrun",
            os.environ["WORLD_SIZE"],
            " and ".join(missing),
        )
        return False
    environment = identity.environment()
    import torch.distributed as dist

    if not dist.is_available():
        return False

    from .bringup import bring_up
    from .device import choose_placement

    placement = choose_placement("gloo", "cpu", None, environment.local_rank)
    bring_up(environment, placement, bound, init_bound, None)
    return True
