"""A group for programs that only gather results, created if the launcher started several ranks.

Imports torch.distributed only if it creates a group, since an evaluator may run without it.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from datetime import timedelta

from ..observability.logs import name_rank_in_records
from ..settings import as_timedelta
from .launchers import check_group, identify, is_initialized
from .model import ADDRESS, DistributedEnvironmentError, Variables

TIMEOUT = timedelta(seconds=60000)
INIT_TIMEOUT = timedelta(minutes=5)


def ensure_process_group(
    *,
    timeout: timedelta | float = TIMEOUT,
    init_timeout: timedelta | float = INIT_TIMEOUT,
) -> bool:
    """Create a gloo group if torch's variables define several ranks.

    Requires the variables of ``init_method="env://"``: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``
    and ``MASTER_PORT``. Collective over the job if it creates the group; blocking, with the timeout
    ``init_timeout``; idempotent. Logs one line if it creates a group. Does and logs nothing in a
    world of 1, without ``WORLD_SIZE``, if a group exists, or on a torch without
    ``torch.distributed``. If only addresses are missing, it warns and does nothing: each rank then
    works alone, and ``get_rank()`` identifies it.

    Args:
        timeout: timeout of the group; by default 60000 s, for long evaluations.
        init_timeout: timeout of bring-up.

    Returns:
        Whether it created the group. If so, the caller must call ``destroy_distributed()``.

    Raises:
        DistributedEnvironmentError: a variable is missing, empty, not a number or out of range; or
            a default group exists that contradicts the launcher, as in ``init_distributed``.
        DisagreementError, RendezvousTimeoutError, PeerFailedError: as ``init_distributed``.
    """
    name_rank_in_records()
    timeout = as_timedelta(timeout, "timeout")
    init_timeout = as_timedelta(init_timeout, "init_timeout")
    if is_initialized():
        check_group()
        return False
    if "WORLD_SIZE" not in os.environ:
        with suppress(DistributedEnvironmentError):
            identify(os.environ)  # warns of variables of unknown launchers
        return False
    read = Variables(os.environ, "torchrun")
    if read.integer("WORLD_SIZE", minimum=1) == 1:
        return False
    identify(os.environ)  # the rank must be known even if each rank works alone
    missing = [name for name in ADDRESS if name not in read]
    if missing:
        logging.getLogger(__name__).warning(
            "WORLD_SIZE=%s, but %s is not set: no process group is created, each rank works alone. "
            "Set it, or start the ranks with torchrun",
            os.environ["WORLD_SIZE"],
            " and ".join(missing),
        )
        return False
    environment = identify(os.environ, address=True)
    import torch.distributed as dist

    if not dist.is_available():
        return False

    from .bringup import bring_up
    from .device import choose_placement

    placement = choose_placement("gloo", "cpu", None, environment.local_rank)
    bring_up(environment, placement, timeout, init_timeout)
    return True
