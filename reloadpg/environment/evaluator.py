"""A group for programs that only gather results, created if the launcher started several ranks.

Imports torch.distributed only if it creates a group, since an evaluator may run without it.
"""

from __future__ import annotations

import os
from datetime import timedelta

from .launchers import check_group, identify, is_initialized

TIMEOUT = timedelta(seconds=60000)
INIT_TIMEOUT = timedelta(minutes=5)


def ensure_process_group(
    *,
    timeout: timedelta | float = TIMEOUT,
    init_timeout: timedelta | float = INIT_TIMEOUT,
) -> bool:
    """Create a gloo group if the launcher started several ranks and there is no group.

    Collective over the job if it creates the group; blocking, with the timeout ``init_timeout``;
    idempotent. Does and logs nothing in a world of 1, or if a group exists.

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
    if is_initialized():
        check_group()
        return False
    if identify(os.environ).world_size == 1:
        return False
    from .bringup import init_distributed

    init_distributed("gloo", device="cpu", timeout=timeout, init_timeout=init_timeout)
    return True
