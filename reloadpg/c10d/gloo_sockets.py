"""The connections of gloo groups, which gloo itself cannot abort."""

from __future__ import annotations

import os
import re
import select
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch.distributed import ProcessGroup

from .backends import GLOO, live_backends, wraps_backends


def drop_inherited_connections() -> None:
    """Close the parent's gloo connections in a forked child. Local, idempotent.

    A connection ends when all processes have closed it. If a child, such as a worker of a
    DataLoader, holds it, the peers of an abort wait until their timeouts. The descriptors are
    replaced by the null device, because gloo would close their numbers again.
    """
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in chain(*_gloo_sockets()):
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def shut_connections(groups: Sequence[ProcessGroup], others: int = 0) -> list[socket.socket]:
    """Make the pending collectives of gloo groups fail, here and on their peers. Local.

    Gloo cannot abort, and a connection stays open while any object refers to work that was started
    on it: a variable, a graph of autograd, the reducer of ``DistributedDataParallel``.

    If a connection breaks while a send is being written, gloo loses the send: the collective then
    waits until its timeout, and the group's destructor waits for the collective (torch 2.13 and
    2.15). So this function first ends the collectives of a connection, and then shuts only its
    sending side. The peers can still write to it until they have read its end.

    If gloo has closed a connection of which a duplicate is still open, the thread of a device that
    is being destroyed may handle its events, which ends the process with SIGABRT. So only the
    connections of live groups are duplicated, and no lazy ones: gloo destroys their device first.

    ``others`` is the number of other groups that are aborted, whose objects are unknown. Their
    connections are shut if no further group has connections. Returns the connections for
    :func:`await_peers`.
    """
    backends = {group: connected for group in groups if (connected := _connected_gloo(group))}
    devices = _gloo_sockets()
    # Nothing says which group a socket belongs to. But gloo closes the socket of a receive that
    # times out: a duplicate whose original is closed is of these groups.
    own = list(chain(*map(_connections, devices))) if backends else []
    for backend in chain(*backends.values()):
        _fail_pending(backend)
    shut = []
    for duplicate, descriptor in own:
        if _is_open(descriptor, duplicate):
            duplicate.close()
        else:
            shut.append(duplicate)
            with suppress(OSError):
                duplicate.shutdown(socket.SHUT_WR)
    rest = [connections for sockets in devices if (connections := _connections(sockets))]
    hidden = len(groups) - len(backends) + others
    if wraps_backends():
        hidden += len(groups) + others  # each wrapper has a gloo group that compares the calls
    # With more devices than hidden groups, a device serves a group that stays.
    shuts = len(rest) <= hidden
    for duplicate, _ in chain(*rest):
        with duplicate, suppress(OSError):
            if shuts:
                duplicate.shutdown(socket.SHUT_WR)
    return shut


def _connections(sockets: Mapping[int, int]) -> list[tuple[socket.socket, int]]:
    """Duplicates of the connected sockets, with the descriptors of the originals."""
    duplicates = []
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            duplicate = socket.socket(fileno=os.dup(descriptor))
            with suppress(OSError):
                duplicate.getpeername()  # a socket that listens has none
                if os.fstat(duplicate.fileno()).st_ino == inode:
                    duplicates.append((duplicate, descriptor))
                    continue
            duplicate.close()
    return duplicates


def await_peers(connections: Sequence[socket.socket], seconds: float) -> None:
    """Close shut connections when the peers have closed them, or after a timeout. Blocking."""
    waiting = select.poll()
    for connection in connections:
        waiting.register(connection, select.POLLRDHUP)
    left, end = len(connections), time.monotonic() + seconds
    while left and (pause := end - time.monotonic()) > 0:
        for descriptor, _ in waiting.poll(1e3 * pause):
            waiting.unregister(descriptor)
            left -= 1
    for connection in connections:
        connection.close()


def _connected_gloo(group: ProcessGroup) -> list[Any]:
    """The gloo backends of a group that connected all members when they were created. Local."""
    devices = [device.type for device in getattr(group, "_device_types", ())]
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in ("", "0", "false", "off", "n")
    backends = live_backends(group, devices).values()
    return [] if lazy else [backend for backend in backends if type(backend) is GLOO]


def _fail_pending(backend: Any) -> None:
    """End the pending collectives of a gloo backend by a receive that times out."""
    for peer in range(backend.size()):
        with suppress(RuntimeError):
            if peer != backend.rank():
                work = backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG)
                work.wait(timedelta(milliseconds=1))


_UNUSED_TAG = 2**31 - 1


def _is_open(descriptor: int, duplicate: socket.socket) -> bool:
    try:
        return os.fstat(descriptor).st_ino == os.fstat(duplicate.fileno()).st_ino
    except OSError:
        return False


def _gloo_sockets() -> list[dict[int, int]]:
    """The sockets of each gloo device of this process: descriptors and inodes; Linux only.

    A device has an epoll instance that is inherited over ``exec``, with pointers as data, one pipe,
    and its sockets (seen on torch 2.13).
    """
    devices = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if "eventpoll" not in os.readlink(f"/proc/self/fd/{name}"):
                continue
            with open(f"/proc/self/fdinfo/{name}", encoding="ascii") as file:
                text = file.read()
            served = [(int(fd), int(data, 16), int(inode, 16)) for fd, data, inode in _SERVED(text)]
            if re.search(r"flags:\s*0*2\b", text) and all(fd != data for fd, data, _ in served):
                sockets: dict[int, int] = {}
                others = 0
                for fd, _, inode in served:
                    with suppress(OSError):  # gloo's thread closes those that fail, as now
                        is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
                        sockets |= {fd: inode} if is_socket else {}
                        others += not is_socket
                if others == 1:
                    devices.append(sockets)
    return devices


_SERVED = re.compile(r"tfd:\s*(\d+).*?data:\s*([0-9a-f]+).*?ino:([0-9a-f]+)").findall
