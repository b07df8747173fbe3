"""The ranks on this host: which of their processes have ended, and messages between them.

Each rank appends its process to a key for its host. The key contains the kernel's boot id and the
PID and network namespaces, so a rank finds only processes that it can watch and connect to. A
process is watched with a pidfd (Linux 5.3) and identified by its start time, since PIDs are reused.
"""

from __future__ import annotations

import hashlib
import os
import select
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch._C._distributed_c10d import Store

from .host_channel import HostChannel
from .protocol import Gather, Hand, Hear, Meet, OnHost, Publish, Spread
from .store_client import read

__all__ = ["Peers"]


_HEAR_S = 2.0
"""Seconds after which a rank without a message from the leader of its host reads the store."""

_GATHER_S = 1.0
"""Maximum of the seconds after which a leader that waits for the other ranks reads the store."""


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
        self._channel: HostChannel | None = None
        self.host = _host() if watches and hasattr(os, "pidfd_open") else ""

    def perform(self, store: Store, command: OnHost, pause_s: float) -> Any:
        """Perform a command of the protocol, and return the reply. Blocking, for at most 2 s."""
        match command:
            case Publish(key):
                return self.publish(store, key)
            case Meet(key):
                return self.meet(store, key)
        channel = self._channel
        match command:
            case Hand(key, amount):
                return channel is not None and channel.hand(key, amount)
            case Gather(key, waits) if channel is not None:
                return channel.gather(key, min(pause_s, _GATHER_S) if waits else 0.0)
            case Gather():
                return 0, True
            case Spread(key, text) if channel is not None:
                channel.spread(key, text)
            case Hear(key, waits) if channel is not None:
                return channel.hear(key, _HEAR_S if waits else 0.0)
        return None

    def pause(self, seconds: float) -> None:
        """Sleep until a rank of this host sends a message."""
        (self._channel.pause if self._channel is not None else time.sleep)(seconds)

    def publish(self, store: Store, key: str) -> None:
        """Append this process to the list of this host. One request."""
        self.forget()
        with suppress(OSError):  # out of file descriptors: arrives alone
            self._channel = HostChannel(self._rank)
        address = self._channel.address if self._channel else "-"
        entry = f"{self._rank} {os.getpid()} {_started(os.getpid())} {address}\n"
        with suppress(NotImplementedError):
            cast(Any, store).append(key, entry)

    def meet(self, store: Store, key: str) -> tuple[int, ...]:
        """Watch the published processes, and connect to their leader. One request.

        Returns:
            Their ranks, in order.
        """
        entries = [line.split() for line in (read(store, key) or "").splitlines()]
        latest = {int(rank): rest for rank, *rest in entries}
        ranks = tuple(sorted(latest))
        for rank, (pid, started, _) in latest.items():
            if int(pid) != os.getpid() and (pidfd := _open(int(pid), started)) is not None:
                self._pidfds[rank] = pidfd
        if self._channel is not None and self._rank in latest:
            if self._rank == ranks[0]:
                self._channel.expect(ranks[1:])
            else:
                self._channel.follow(latest[ranks[0]][-1])
        return ranks

    def dead(self) -> tuple[int, ...]:
        """List the ranks whose processes have ended. Local, non-blocking."""
        pidfds = self._pidfds
        poll = select.poll()
        for pidfd in pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, event in poll.poll(0) if event & select.POLLIN}
        return tuple(sorted(rank for rank, pidfd in pidfds.items() if pidfd in ended))

    def forget(self) -> None:
        """Stop watching all processes, and close all connections. Local."""
        pidfds, self._pidfds = self._pidfds, {}
        for pidfd in pidfds.values():
            os.close(pidfd)
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

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
    """The identifier of this host; empty if the kernel does not provide it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        text = boot + os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/net")
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return ""


def _started(pid: int) -> str:
    """The start time of a process, in ticks since boot; empty if it has ended."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]
    return ""
