"""The rank, before and after a group exists, and what only rank 0 does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import ParamSpec, TypeVar

from reloadpg.environment.detect import detect_environment

__all__ = ["get_rank", "is_rank_zero", "rank_zero_first", "rank_zero_only"]

P = ParamSpec("P")
R = TypeVar("R")


def get_rank() -> int:
    """The rank of this process: the default group's, or before it exists the launcher's.

    Local, non-blocking; imports no torch. Right under srun and mpirun too, where ``RANK`` is not
    set and every process used to think that it was rank 0.

    Raises:
        DistributedEnvironmentError: there is no group, and the variables are incomplete or wrong.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return detect_environment().rank


def is_rank_zero() -> bool:
    """Whether this process is rank 0; see :func:`get_rank`. Local, non-blocking."""
    return get_rank() == 0


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Make ``function`` do nothing, and return None, on every rank but 0.

    The rank is looked up at each call, not at decoration: a module is often imported before the
    group exists. Local: no rank waits for another.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if is_rank_zero() else None

    return wrapper


@contextmanager
def rank_zero_first(timeout: timedelta | float = timedelta(minutes=30)) -> Iterator[None]:
    """Run the body on rank 0, and when that is done on the other ranks.

    Collective over all ranks of the job; blocking. The ranks wait on the rendezvous store, so it
    works while groups are offloaded and never starts an accelerator's communicator. In a world of
    1 the body just runs.

    Args:
        timeout: how long the others wait for rank 0; a timedelta, or seconds.

    Raises:
        RendezvousTimeoutError: rank 0 did not finish in time. Also a TimeoutError.
        PeerFailedError: the body raised on rank 0; it is not run on the other ranks.
        GroupNotInitializedError: several ranks, but no group yet.
    """
    from reloadpg.environment.meeting import wait_for_rank_zero

    with wait_for_rank_zero(timeout):
        yield
