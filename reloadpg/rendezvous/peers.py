"""The processes of the ranks on this host, and which of them have ended.

Each rank appends its process to a key for its host. The key contains the kernel's boot id and the
PID namespace, so a rank finds only processes in its own namespace. A process is watched with a
pidfd (Linux 5.3) and identified by its start time, since PIDs are reused.
"""

from __future__ import annotations

import hashlib
import os
import select
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch._C._distributed_c10d import Store

from .store_client import read

__all__ = ["Peers"]


class Peers:
    """The processes of other ranks on this host.

    Args:
        rank: this rank.
        watches: whether to watch processes at all.
    """

    def __init__(self, rank: int, *, watches: bool = True) -> None:
        self._rank = rank
        self._pidfds: dict[int, int] = {}  # by rank
        self._host = _host() if watches and hasattr(os, "pidfd_open") else ""

    @property
    def watches(self) -> bool:
        """Whether processes are watched here."""
        return bool(self._host)

    def publish(self, store: Store) -> None:
        """Publish this process to the ranks on this host. One request."""
        with suppress(NotImplementedError):
            entry = f"{self._rank} {os.getpid()} {_started(os.getpid())}\n"
            cast(Any, store).append(self._host, entry)

    def find(self, store: Store) -> None:
        """Watch the published processes in place of those watched before. One request."""
        entries = read(store, self._host)
        latest = {line.split()[0]: line.split() for line in (entries or "").splitlines()}
        found = {
            int(rank): pidfd
            for rank, pid, started in latest.values()
            if int(pid) != os.getpid() and (pidfd := _open(int(pid), started)) is not None
        }
        self.forget()
        self._pidfds = found

    def dead(self) -> tuple[int, ...]:
        """List the ranks whose processes have ended. Local, non-blocking."""
        pidfds = self._pidfds
        poll = select.poll()
        for pidfd in pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, event in poll.poll(0) if event & select.POLLIN}
        return tuple(sorted(rank for rank, pidfd in pidfds.items() if pidfd in ended))

    def forget(self) -> None:
        """Stop watching all processes. Local."""
        pidfds, self._pidfds = self._pidfds, {}
        for pidfd in pidfds.values():
            os.close(pidfd)

    def __del__(self) -> None:
        self.forget()


def _open(pid: int, started: str) -> int | None:
    """Open a process's pidfd; None if that is not possible here.

    A process that is not found is not reported as ended: it was alive when its rank was counted,
    and clones of a virtual machine can have the same host name.
    """
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        if _started(pid) == started:
            return pidfd
        os.close(pidfd)
    return None


def _host() -> str:
    """The key of this host; empty if the kernel does not provide it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        text = boot + os.readlink("/proc/self/ns/pid")
        return f"host/{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    return ""


def _started(pid: int) -> str:
    """The start time of a process, in ticks since boot; empty if it has ended."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]
    return ""
