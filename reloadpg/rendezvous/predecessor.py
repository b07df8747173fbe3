"""A process that replaces one that has ended, according to the job's store.

A process of a recoverable job writes a mark to the store when it begins the job, and another when
it ends the job. A process that finds another process's mark under its own rank replaces that
process, unless all ranks have ended the job.
"""

from __future__ import annotations

import os
import secrets
from typing import NamedTuple

from torch.distributed import PrefixStore, Store

from .protocol import base

LOST = "lost"
"""The key for :func:`lost_state`."""

_tokens: dict[int, str] = {}


class Predecessor(NamedTuple):
    """The process that this one replaces in a job.

    Attributes:
        instance: number of the job among those on its store.
        epoch: number of the last recovery requested before this process started. The old process
            may have been counted in it.
    """

    instance: int
    epoch: int

    @classmethod
    def find(cls, root: Store, rank: int, size: int) -> Predecessor | None:
        """Find the process that this one replaces, and mark it as replaced; None in a new job.

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
        """Whether there is a process to replace; changes nothing."""
        return bool(_left(root, rank, size))


def _left(root: Store, rank: int, size: int) -> int:
    """The number of the job in which another process of this rank has ended; 0 for none."""
    instance = root.add(f"reloadpg/instance/{rank}", 0)
    store = job_keys(root, instance)
    if not instance or not store.check([_begun(rank)]):
        return 0
    if store.get(_begun(rank)).decode() == process_mark():
        return 0  # this process has ended that job and begins another one
    return 0 if store.check([_ended(other) for other in range(size)]) else instance


def lost_state(root: Store, rank: int) -> str:
    """Why the job of a rank cannot continue, if a new process found its state to be lost."""
    store = job_keys(root, root.add(f"reloadpg/instance/{rank}", 0))
    return store.get(LOST).decode() if store.check([LOST]) else ""


def job_keys(root: Store, instance: int) -> Store:
    """Return the part of the store that belongs to one job."""
    return PrefixStore(base(instance), root)


def _begun(rank: int) -> str:
    return f"process/{rank}"


def _ended(rank: int) -> str:
    return f"ended/{rank}"


def process_mark() -> str:
    """An identifier of this process, unique also among forked children."""
    return _tokens.setdefault(os.getpid(), secrets.token_hex(8))
