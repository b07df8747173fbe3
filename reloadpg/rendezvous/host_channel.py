"""Messages between the ranks of one host: their arrivals at barriers, and the decisions.

The ranks connect to their leader through a Unix socket with an abstract name, so no file is left
and no other host can connect. Messages are sent and received as a whole (``SOCK_SEQPACKET``). No
method raises: a message that cannot be sent or received is the protocol's concern.
"""

from __future__ import annotations

import errno
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from os import getuid
from typing import Any

from .decision import Decision

_MOST_BYTES = 1 << 18
"""Longest message; the default buffer of a Unix socket is smaller."""

GATHER_S = 0.75
"""Seconds that a leader waits for the other ranks before it counts those that have arrived, and
polls the store. Each later arrival costs four requests. Interrupts and dead peers end the wait."""

HEAR_S = 1.2
"""Seconds after which a rank without a message from the leader of its host reads the store. Longer
than the leader's wait, and shorter than the grace period: the leader may be in a callback."""


class HostChannel:
    """One rank's end of the channel. Until it is opened, it sends and receives nothing.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._listener: socket.socket | None = None
        self._full = False  # whether this process has no file descriptor for another connection
        self._leader: socket.socket | None = None
        self._others: dict[int, socket.socket] = {}  # by file descriptor
        self._expected: set[int] = set()
        self._arrived: dict[str, dict[int, int]] = {}  # by key and rank: what was not taken
        self._draining = threading.Lock()  # an abandoned call may still run; never held in a wait

    def listen(self) -> str:
        """Accept connections, before any rank knows its leader. Return the address, if possible."""
        address = f"reloadpg-{secrets.token_hex(8)}"
        with suppress(OSError):
            self._listener = _socket()
            self._listener.bind(f"\0{address}")
            self._listener.listen(1024)
        return address

    def expect(self, ranks: Iterable[int]) -> None:
        """Lead these ranks."""
        self._expected.update(ranks)

    def follow(self, address: str) -> None:
        """Connect to the leader, if possible."""
        self.close()
        with suppress(OSError):
            leader = _socket()
            leader.connect(f"\0{address}")
            self._leader = leader

    def close(self) -> None:
        """Close all connections. The other ends notice it."""
        for one in (self._listener, self._leader, *self._others.values()):
            if one is not None:
                one.close()
        self._listener, self._leader, self._others = None, None, {}

    def hand(self, key: str, amount: int) -> bool:
        """Hand the leader this rank's arrival; return whether that was possible."""
        leader = self._leader
        return leader is not None and _send(leader, [self._rank, key, amount])

    def gather(self, key: str, seconds: float) -> tuple[int, bool]:
        """Take the arrivals handed to this rank, after a wait for all ranks."""
        end = time.monotonic() + seconds
        while True:
            with self._draining:
                self._drain()
                arrived = self._arrived.setdefault(key, {})
                complete = self._expected <= arrived.keys()
                if complete or time.monotonic() >= end:
                    taken = sum(arrived.values())
                    arrived.update(dict.fromkeys(arrived, 0))
                    return taken, complete
            self.pause(end - time.monotonic())

    def spread(self, key: str, text: str) -> None:
        """Send a decision to the ranks that follow."""
        for one in list(self._others.values()):
            _send(one, [key, text])
        with self._draining:
            arrived = self._arrived.pop(key, {})
            if Decision.from_json(text).ok:  # one that arrived alone will do so again
                self._expected &= arrived.keys()

    def hear(self, key: str, seconds: float) -> str | None:
        """Return the decision that the leader has sent, after a wait for it."""
        end = time.monotonic() + seconds
        while (leader := self._leader) is not None:
            message = _receive(leader)
            if message == "":
                self.close()
            elif message is None:
                if (left := end - time.monotonic()) <= 0:
                    break
                self.pause(left)
            elif message[0] == key:
                return str(message[1])
        return None

    def pause(self, seconds: float) -> None:
        """Sleep until there is a message."""
        poll = select.poll()
        listener = None if self._full else self._listener  # it would end the sleep at once
        for one in (self._leader, listener, *list(self._others.values())):
            with suppress(OSError, ValueError):
                if one is not None:
                    poll.register(one, select.POLLIN)
        poll.poll(max(0.0, seconds * 1e3))

    def _drain(self) -> None:
        try:
            while self._listener is not None:
                other = self._listener.accept()[0]
                other.setblocking(False)
                peer = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if struct.unpack("3i", peer)[1] == getuid():
                    self._others[other.fileno()] = other
                else:
                    other.close()
        except OSError as error:
            self._full = error.errno in (errno.EMFILE, errno.ENFILE)
        for number, one in list(self._others.items()):
            while (message := _receive(one)) is not None:
                if message == "":
                    self._others.pop(number).close()
                    break
                rank, key, amount = message
                self._expected.add(rank)
                self._arrived.setdefault(key, {})[rank] = amount


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _send(one: socket.socket, message: Any) -> bool:
    with suppress(OSError):
        one.send(json.dumps(message).encode())
        return True
    return False


def _receive(one: socket.socket) -> Any:
    """The next message; None if there is none, an empty string at the end of the connection."""
    try:
        data = one.recv(_MOST_BYTES)
        return json.loads(data) if data else ""
    except BlockingIOError:
        return None
    except OSError:
        return ""
