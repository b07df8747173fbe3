"""The interfaces of gloo and of NCCL's bootstrap in a job of several hosts.

Gloo by default uses the address of the host name, which is a loopback address on many machines
(vLLM#7074): ranks on other hosts cannot connect to it. NCCL selects its interfaces itself. On a
host with InfiniBand, both are bound to it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path

from .identity import DistributedEnvironment, ip_of, write_variables

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"

_SYSFS = Path("/sys/class/net")
_SIOCGIFADDR = 0x8915
_INFINIBAND = "32"
"""The type of an interface in sysfs: ARPHRD_INFINIBAND."""
_ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737), for which the default route is chosen."""

_applied = ExitStack()
"""The changes of bring-ups to ``os.environ`` that are not undone."""


def select_interfaces(environment: DistributedEnvironment) -> None:
    """Set the interfaces of gloo and NCCL in a job of several hosts, where they are unset. Local.

    * ``NCCL_SOCKET_IFNAME`` is set, to one interface of this host: gloo uses that.
    * The host has an InfiniBand interface that is up and has an address: gloo and NCCL use that.
    * Otherwise gloo uses the interface that routes to the rendezvous address. Nothing is set if
      that is the loopback interface, or if it cannot be found.

    One log line names what was set.
    """
    if environment.local_world_size == environment.world_size:
        return
    unset = [name for name in (GLOO_INTERFACE, NCCL_INTERFACE) if not os.environ.get(name)]
    found: str | None = None
    if NCCL_INTERFACE not in unset:
        # NCCL takes names as prefixes, "=" for an exact one, and "^" to exclude. Gloo takes names.
        named = os.environ[NCCL_INTERFACE].removeprefix("=")
        found = named if has_address(named) else None
    else:
        found = infiniband_interface()
    if found is None:
        unset = [name for name in unset if name == GLOO_INTERFACE]
        found = routing_interface(environment.master_addr) if unset else None
    if found is None or not unset:
        return
    changes = dict.fromkeys(unset, found)
    _applied.enter_context(write_variables(changes))
    shown = ", ".join(f"{name}={value}" for name, value in changes.items())
    logging.getLogger(__name__).info("network: set %s", shown)


def restore_interfaces() -> None:
    """Undo :func:`select_interfaces`. Local, idempotent."""
    _applied.close()


def infiniband_interface() -> str | None:
    """Return the first InfiniBand interface that is up and has an address. Local.

    None without such an interface. An address that is valid on its link alone does not count.
    """
    for _, name in sorted(socket.if_nameindex()):
        with suppress(OSError):  # it is not in this part of sysfs
            kind = (_SYSFS / name / "type").read_text().strip()
            state = (_SYSFS / name / "operstate").read_text().strip()
            if kind == _INFINIBAND and state == "up" and has_address(name):
                return name
    return None


def has_address(interface: str) -> bool:
    """Whether this host has an interface of this name, with a usable address. Local."""
    return any(not ip_address(one).is_link_local for one in _addresses_of(interface))


def wrong_gloo_interfaces() -> str:
    """Say which names in ``GLOO_SOCKET_IFNAME`` are no interface of this host with an address.

    Local. Empty if all are right, or the variable is unset.
    """
    value = os.environ.get(GLOO_INTERFACE, "")
    wrong = [name for name in value.split(",") if value and not _addresses_of(name)]
    if not wrong:
        return ""
    here = ", ".join(repr(name) for _, name in socket.if_nameindex() if _addresses_of(name))
    return (
        f"{GLOO_INTERFACE}={value!r}: {' and '.join(map(repr, wrong))} is no interface of host "
        f"{socket.gethostname()} with an address; it has {here or 'none'}. Names are separated by "
        f"a comma without a space. Correct the variable for this host, or unset it."
    )


def advisory_timeouts(environ: Mapping[str, str]) -> str:
    """Say that torch does not act on NCCL's timeouts, if a variable says so; otherwise empty.

    Pure. With ``TORCH_NCCL_BLOCKING_WAIT``, each wait of the program raises at its timeout.
    """
    waits = environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if environ.get(name) == "0" and not waits:
            return (
                f"{name}=0: torch only logs that a collective of NCCL has reached its timeout, and "
                f"the ranks wait on for a peer that has ended"
            )
    return ""


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
    named = {os.environ.get(name) for name in (NCCL_INTERFACE, GLOO_INTERFACE)} - {None, ""}
    return " and ".join(map(repr, sorted(map(str, named)))) or "the default interface"
