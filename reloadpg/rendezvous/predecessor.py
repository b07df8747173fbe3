"""Whether this process takes the place of one that has ended, as the job's store tells it.

A process of a recoverable job leaves a mark on the store when it has begun the job, and another
when it has ended it. A process that finds the mark of another one under its own rank replaces it,
as long as any rank has not ended the job.
"""

from __future__ import annotations

import os
import secrets
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from .protocol import base

__all__ = ["Predecessor", "job_keys", "process_mark"]

_tokens: dict[int, str] = {}


class Predecessor(NamedTuple):
    """The place that another process has left in a job.

    Attributes:
        instance: number of the job among those on its store.
        epoch: number of the last recovery that was requested before this process: it may have
            counted the other one.
    """

    instance: int
    epoch: int

    @classmethod
    def find(cls, root: Store, rank: int, size: int) -> Predecessor | None:
        """Find the place that this process takes, and mark it as taken; None in a job that begins.

        Args:
            root: the job's store.
            rank: this rank.
            size: number of ranks.
        """
        instance = _left(root, rank, size)
        if not instance:
            return None
        store = job_keys(root, instance)
        store.delete_key(_ended(rank))
        store.set(_begun(rank), process_mark())
        return cls(instance, store.add("recovery", 0))

    @staticmethod
    def exists(root: Store, rank: int, size: int) -> bool:
        """Whether there is such a place; it is not taken."""
        return bool(_left(root, rank, size))


def _left(root: Store, rank: int, size: int) -> int:
    """The number of the job in which another process has left this rank's place; 0 for none."""
    instance = root.add(f"reloadpg/instance/{rank}", 0)
    store = job_keys(root, instance)
    if not instance or not store.check([_begun(rank)]):
        return 0
    if store.get(_begun(rank)).decode() == process_mark():
        return 0  # this process has ended that job, and begins another one
    return 0 if store.check([_ended(other) for other in range(size)]) else instance


def job_keys(root: Store, instance: int) -> Store:
    """Return the part of the store that belongs to one job."""
    return PrefixStore(base(instance), root)


def _begun(rank: int) -> str:
    return f"process/{rank}"


def _ended(rank: int) -> str:
    return f"ended/{rank}"


def process_mark() -> str:
    """A word that no other process has; a forked child has its own."""
    return _tokens.setdefault(os.getpid(), secrets.token_hex(8))
