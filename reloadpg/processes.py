"""Processes of this host: their identity, and which have ended. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def process_table() -> str:
    """The identifier of this host and of the processes that can be seen here; empty if unknown.

    Local. It is equal in two processes if a process id means the same in both.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        text = boot + os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/net")
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return ""


def absence_of(pid: int, started: str) -> str:
    """Why a process that started then does not run: ``gone``, ``stopped``, or empty. Local.

    It has ended if the id is not in use, or by a process that started at another time. A process
    that cannot be looked up, such as when no file descriptor is left, counts as running.
    """
    try:
        state, now = _state_and_start(pid)
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except OSError:
        return ""
    if now != started:
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "")


def start_of(pid: int) -> str:
    """The start time of a process, in ticks since boot; empty if it has ended."""
    with suppress(OSError):
        return _state_and_start(pid)[1]
    return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat.rpartition(")")[2].split()  # the name before it may have blanks
    return fields[0], fields[19]


def forked_holders() -> str:
    """Say which children of this process were forked with its connections; empty without any.

    Local; Linux only. A child that has executed another program does not hold them.
    """
    held: set[str] = set()
    holders = []
    for pid in _children():
        held = held or {inode for inode, fd in _sockets("self").items() if _is_connection(fd)}
        if held.intersection(_sockets(pid)):
            holders.append(pid)
    if not holders:
        return ""
    return (
        f"Processes that this one has forked hold copies of its connections (pid "
        f"{', '.join(holders)}), such as the workers of a DataLoader. So a peer in a collective of "
        f"gloo waits until they end, or for the timeout of the group. Start them with spawn or "
        f"forkserver, or before the groups."
    )


def _children() -> list[str]:
    """The ids of the processes that this one has started, if the kernel lists them."""
    found = []
    with suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with suppress(OSError):  # the thread has ended
                found += Path(f"/proc/self/task/{task}/children").read_text().split()
    return sorted(found, key=int)


def _sockets(pid: str) -> dict[str, int]:
    """The open sockets of a process: its descriptors by inode; empty if it has ended."""
    found = {}
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it was closed
                found[os.readlink(f"/proc/{pid}/fd/{fd}")] = int(fd)
    return {name: fd for name, fd in found.items() if name.startswith("socket:")}


def _is_connection(fd: int) -> bool:
    """Whether a descriptor of this process is a connection of TCP."""
    with suppress(OSError), socket_of(fd) as one:
        return one.family in (socket.AF_INET, socket.AF_INET6) and bool(one.getpeername())
    return False


@contextmanager
def socket_of(fd: int) -> Iterator[socket.socket]:
    """A duplicate of a socket of this process. Raises OSError if the descriptor is none."""
    copy = os.dup(fd)
    try:
        duplicate = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with duplicate:
        yield duplicate


class Peers:
    """The processes of the other ranks on this host.

    Each rank that joins a job appends its process to the list of its host, so a rank finds only
    processes that it can watch.

    Args:
        rank: this rank.

    Attributes:
        host: identifier of the host; empty if it or this process cannot be looked up.
        entry: this process, for the list of its host.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._watched: dict[int, tuple[int, str]] = {}  # by rank: process id and start time
        pid, parent = os.getpid(), os.getppid()
        started = start_of(pid)
        self._parent = f"{parent}-{start_of(parent)}"
        self.host = process_table() if started else ""
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

    def state_of(self, rank: int) -> str:
        """What a rank's process does: ``runs``, ``stopped`` or ``gone``. Local.

        Empty if it is not watched: it is this one, on another host, or has not joined the job.
        """
        process = self._watched.get(rank)
        return "" if process is None else absence_of(*process) or "runs"

    def dead(self) -> tuple[int, ...]:
        """List the ranks whose processes have ended. Local, non-blocking."""
        watched = dict(self._watched)  # another thread may add to them
        return tuple(sorted(r for r, process in watched.items() if absence_of(*process) == "gone"))
