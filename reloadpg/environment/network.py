"""The network interface that communicators use."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Literal

from ..errors import InvalidOptionError
from ..texts import is_first_of_host
from .model import DistributedEnvironment, Export, ip_of

Network = Literal["auto", "off"]
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

# InfiniBand verbs, and direct access to devices on the same PCI bridge.
_INFINIBAND = {"NCCL_IB_DISABLE": "0", "NCCL_NET_GDR_LEVEL": "2"}

_SIOCGIFADDR = 0x8915
_SIOCETHTOOL = 0x8946
_ETHTOOL_GLINK = 0x0A
_LINK_LOCAL = "20"
_NOT_USABLE = 0x08 | 0x40
"""Flags of an IPv6 address: a failed duplicate, and one that is tentative."""
_ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737), for which the default route is chosen."""
_INTERFACE = re.compile(r"[A-Za-z0-9_.@-]+", re.ASCII)


def detect_ib_interface() -> str | None:
    """Return the first InfiniBand interface (named ``ib*``) that is up and has a usable address.

    Local, read-only, of Linux. Interfaces are in the kernel's order. Addresses that are link-local,
    tentative or failed duplicates are not usable.

    Returns:
        The name, as NCCL and gloo look it up, or None if there is none.
    """
    for _, name in socket.if_nameindex():
        if name.startswith("ib") and _is_running(name) and _address_of(name) is not None:
            return name
    return None


def _is_running(interface: str) -> bool:
    """Whether an interface is up and has a carrier."""
    link = (ctypes.c_uint32 * 2)(_ETHTOOL_GLINK, 0)
    _asked(interface, _SIOCETHTOOL, struct.pack("P", ctypes.addressof(link)))
    return link[1] == 1


def _asked(interface: str, what: int, data: bytes = b"") -> bytes | None:
    """The kernel's answer about an interface; None if there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("16s240s", interface.encode()[:15], data)
        return fcntl.ioctl(probe.fileno(), what, asked)
    return None


def configure_network_environment(
    environ: MutableMapping[str, str] | None = None,
) -> dict[str, str]:
    """Configure NCCL and gloo for InfiniBand, unless variables are preset.

    Local, idempotent. Call it before groups are created, or use
    ``init_distributed(network="auto")``. Preset variables are kept. If there is a usable InfiniBand
    interface, both use it, ``NCCL_IB_DISABLE`` is 0 and ``NCCL_NET_GDR_LEVEL`` 2; otherwise nothing
    is set. A preset ``NCCL_SOCKET_IFNAME`` is copied to ``GLOO_SOCKET_IFNAME`` if it is one name:
    NCCL's forms for exclusion, exact match, lists and prefixes are not gloo's.
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is not set: 1 breaks the flight recorder's dumps; a preset 0
    is kept with a warning.

    Args:
        environ: the variables; ``os.environ`` if None.

    Returns:
        The changes: value by variable.
    """
    variables = os.environ if environ is None else environ
    changes = _changes(variables)
    variables.update(changes)
    return changes


def validate_network(network: object) -> None:
    """Check the argument ``network`` of ``init_distributed``. Local, pure."""
    if network not in ("auto", "off"):
        raise InvalidOptionError(
            f"network={network!r} is neither 'auto' nor 'off'. Nothing was started. Pass 'off' to "
            f"set variables such as NCCL_SOCKET_IFNAME yourself."
        )


_applied: list[Export] = []
"""The changes of bring-ups to ``os.environ`` that are not undone."""


def apply_network(network: Network, environment: DistributedEnvironment) -> None:
    """Set unset variables in ``os.environ``, and log one line with the changes. Local.

    Without InfiniBand, gloo and NCCL use the interface that routes to the
    rendezvous address, unless a variable is preset. Gloo by default uses the address that the host
    name resolves to, which is a loopback address on many machines (vLLM#7074).
    """
    if network == "off":
        return
    export = Export(os.environ)
    changes = _changes(os.environ)
    if not any(os.environ.get(n) or n in changes for n in SOCKET_VARIABLES):
        spans = environment.local_world_size != environment.world_size
        routed = routing_interface(environment.master_addr, other_hosts=spans)
        if routed is not None:
            changes.update(dict.fromkeys(SOCKET_VARIABLES, routed))
    for name, value in changes.items():
        export.write(name, value)
    if export.changed:
        _applied.append(export)
        logging.getLogger(__name__).info(
            "network: set %s", ", ".join(f"{name}={os.environ[name]}" for name in export.changed)
        )


def restore_network() -> None:
    """Undo :func:`apply_network`. Local, idempotent; see :class:`~.model.Export`."""
    while _applied:
        _applied.pop()()


def routing_interface(host: str, *, other_hosts: bool = False) -> str | None:
    """Return the interface that routes to a host. Local; resolves the name; sends nothing.

    None if it is the loopback interface, or if it cannot be found. With ``other_hosts`` the job has
    several hosts: where the host's name is a loopback address, as on the host itself, the interface
    of the default route is meant.
    """
    source = _source_address(host)
    if other_hosts and (source is None or _is_local(source)):
        source = _source_address(_ELSEWHERE)
    if source is None or _is_local(source):
        return None
    for _, name in socket.if_nameindex():
        if _address_of(name) == source:
            return name
    return None


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


def _address_of(interface: str) -> str | None:
    """The first IPv4 address of an interface, or else its IPv6 address in use."""
    found = _asked(interface, _SIOCGIFADDR)
    if found is not None and not ip_address(found[20:24]).is_link_local:
        return socket.inet_ntoa(found[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            digits, _, _, scope, flags, name = line.split()
            usable = scope != _LINK_LOCAL and not int(flags, 16) & _NOT_USABLE
            if name == interface and usable:
                return str(ip_address(bytes.fromhex(digits)))
    return None


def interface_in_use() -> str:
    """Return the configured interface of communicators, for messages. Local."""
    named = {os.environ.get(name) for name in SOCKET_VARIABLES} - {None, ""}
    return " and ".join(sorted(map(str, named))) or "the default interface"


def _changes(variables: Mapping[str, str]) -> dict[str, str]:
    if variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0" and is_first_of_host():
        logging.getLogger(__name__).warning(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a collective whose peer died will wait "
            "indefinitely. The value is kept; unset it to use torch's default"
        )
    wanted: dict[str, str] = {}
    if "NCCL_SOCKET_IFNAME" not in variables:
        found = detect_ib_interface()
        if found is not None:
            wanted = {"NCCL_SOCKET_IFNAME": found, "GLOO_SOCKET_IFNAME": found, **_INFINIBAND}
    preset = variables.get("NCCL_SOCKET_IFNAME", wanted.get("NCCL_SOCKET_IFNAME"))
    if preset is not None and _is_concrete(preset):
        wanted.setdefault("GLOO_SOCKET_IFNAME", preset)
    return {name: value for name, value in wanted.items() if name not in variables}


def _is_concrete(name: str) -> bool:
    """Whether the value is one interface name, also for gloo, which does not match prefixes."""
    if not _INTERFACE.fullmatch(name):
        return False
    existing = [existing for _, existing in socket.if_nameindex()]
    return name in existing or not any(other.startswith(name) for other in existing)
