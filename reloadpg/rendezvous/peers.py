"""The ranks on this host: which of their processes have ended.

Each rank appends its process to a key for its host when it joins a job. The key contains the
kernel's boot id and the PID and network namespaces, so a rank finds only processes that it can
watch. A process is identified by its start time, since PIDs are reused.
"""

from __future__ import annotations

import os

from ..processes import absence_of, process_table, start_of


class Peers:
    """The other ranks on this host.

    Args:
        rank: this rank.
        watches: whether to have any.

    Attributes:
        host: identifier of the host; empty if this rank has no peers.
        entry: this process, for the list of its host.
    """

    def __init__(self, rank: int, *, watches: bool = True) -> None:
        self._rank = rank
        self._watched: dict[int, tuple[int, str]] = {}  # by rank: process id and start time
        pid, parent = os.getpid(), os.getppid()
        started = start_of(pid)
        self._parent = f"{parent}-{start_of(parent)}"
        self.host = process_table() if watches and started else ""
        self.entry = f"{rank} {pid} {started} {self._parent}\n"

    def meet(self, entries: str) -> None:
        """Watch the listed processes. Local.

        A process that has ended before is watched only if it had the same parent as this one, since
        clones of a virtual machine can have the same host name.

        Args:
            entries: the list of this host.
        """
        latest = {int(rank): rest for rank, *rest in map(str.split, entries.splitlines())}
        for rank, (pid, started, parent) in latest.items():
            gone = absence_of(int(pid), started) == "gone"
            if rank != self._rank and (not gone or parent == self._parent):
                self._watched[rank] = int(pid), started

    def dead(self) -> tuple[int, ...]:
        """List the ranks whose processes have ended. Local, non-blocking."""
        watched = dict(self._watched)  # another thread may add to them
        return tuple(sorted(r for r, process in watched.items() if absence_of(*process) == "gone"))
