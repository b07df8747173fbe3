"""The interface that gloo uses in a job of several hosts.

Gloo by default uses the address that the host name resolves to, which is a loopback address on
many machines (vLLM#7074): ranks on other hosts cannot connect to it. NCCL selects its interfaces
itself.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from contextlib import ExitStack, suppress
from ipaddress import ip_address

from .model import DistributedEnvironment, ip_of, write_variables

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_SIOCGIFADDR = 0x8915
_ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737), for which the default route is chosen."""

_applied = ExitStack()
"""The changes of bring-ups to ``os.environ`` that are not undone."""


def select_interface(environment: DistributedEnvironment) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` in a job of several hosts, if it is unset. Local.

    To the interface that routes to the rendezvous address; one log line names it. Nothing is set
    if that is the loopback interface, or if it cannot be found.
    """
    spans = environment.local_world_size != environment.world_size
    if not spans or os.environ.get(GLOO_INTERFACE):
        return
    routed = routing_interface(environment.master_addr)
    if routed is None:
        return
    _applied.enter_context(write_variables({GLOO_INTERFACE: routed}))
    logging.getLogger(__name__).info("network: set %s=%s", GLOO_INTERFACE, routed)


def restore_interface() -> None:
    """Undo :func:`select_interface`. Local, idempotent."""
    _applied.close()


def routing_interface(host: str) -> str | None:
    """Return the interface that routes to a host. Local; resolves the name; sends nothing.

    Where the host's name is a loopback address, as on the host itself, the interface of the default
    route is meant. None if that is the loopback interface, too, or if it cannot be found.
    """
    source = _source_address(host)
    if source is None or _is_local(source):
        source = _source_address(_ELSEWHERE)
    if source is None or _is_local(source):
        return None
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if source in _addresses_of(name)), None)


def _source_address(host: str) -> str | None:
    """The local address of a datagram to this host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses a route; a datagram socket sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError, IndexError):
        return None


def _is_local(address: str) -> bool:
    found = ip_of(address)
    return found is None or found.is_loopback or found.is_unspecified


def _addresses_of(interface: str) -> set[str]:
    """The first IPv4 address of an interface, and its IPv6 addresses."""
    found = set()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", interface.encode()[:15])
        found.add(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        rows = [line.split() for line in lines]
        found |= {str(ip_address(bytes.fromhex(row[0]))) for row in rows if row[5] == interface}
    return found


def interface_in_use() -> str:
    """Return the configured interface of communicators, for messages. Local."""
    named = {os.environ.get(name) for name in ("NCCL_SOCKET_IFNAME", GLOO_INTERFACE)} - {None, ""}
    return " and ".join(sorted(map(str, named))) or "the default interface"
