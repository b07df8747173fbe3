"""The ranks on this host: which of their processes have ended.

Each rank appends its process to a key for its host when it joins a job. The key contains the
kernel's boot id and the PID and network namespaces, so a rank finds only processes that it can
watch. A process is watched with a pidfd (Linux 5.3) and identified by its start
time, since PIDs are reused.
"""

from __future__ import annotations

import os
import select

from ..processes import process_table, start_of


class Peers:
    """The other ranks on this host.

    Args:
        rank: this rank.
        watches: whether to have any.

    Attributes:
        host: identifier of the host; empty if this rank has no peers.
    """

    def __init__(self, rank: int, *, watches: bool = True) -> None:
        self._rank = rank
        self._pidfds: dict[int, int] = {}  # by rank
        self._ended: set[int] = set()  # ranks whose processes were not found
        self._parent = ""
        self.host = process_table() if watches and hasattr(os, "pidfd_open") else ""

    def entry(self) -> str:
        """Begin an epoch; return the entry of this process in the list of this host. Local."""
        self.forget()
        pid, parent = os.getpid(), os.getppid()
        self._parent = f"{parent}-{start_of(parent)}"
        return f"{self._rank} {pid} {start_of(pid)} {self._parent}\n"

    def meet(self, entries: str) -> None:
        """Watch the listed processes. Local.

        A process that is not found has ended if it had the same parent as this one. Otherwise it
        is not reported as ended, since clones of a virtual machine can have the same host name.

        Args:
            entries: the list of this host.
        """
        latest = {int(rank): rest for rank, *rest in map(str.split, entries.splitlines())}
        for rank, (pid, started, parent) in latest.items():
            if int(pid) == os.getpid() or rank in self._pidfds:
                continue
            try:
                self._pidfds[rank] = _open(int(pid), started)
            except ProcessLookupError:
                if parent == self._parent:
                    self._ended.add(rank)
            except OSError:
                pass  # not permitted, or no file descriptor left: this rank is not watched

    def dead(self) -> tuple[int, ...]:
        """List the ranks whose processes have ended. Local, non-blocking."""
        pidfds = dict(self._pidfds)  # another thread may add to them
        poll = select.poll()
        for pidfd in pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, event in poll.poll(0) if event & select.POLLIN}
        dead = {rank for rank, pidfd in pidfds.items() if pidfd in ended}
        return tuple(sorted(dead | self._ended))

    def forget(self) -> None:
        """Stop watching all processes. Local."""
        pidfds, self._pidfds, self._ended = self._pidfds, {}, set()
        for pidfd in pidfds.values():
            os.close(pidfd)

    def __del__(self) -> None:
        self.forget()


def _open(pid: int, started: str) -> int:
    """Open the pidfd of the process that began then; it is not found if it has ended."""
    pidfd = os.pidfd_open(pid)
    if start_of(pid) != started:
        os.close(pidfd)
        raise ProcessLookupError
    return pidfd
