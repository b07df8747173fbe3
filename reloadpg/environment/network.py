"""The address that gloo publishes in a job of several hosts.

Gloo by default publishes the address that the host name resolves to, which is a loopback address on
many machines (vLLM#7074): ranks on other hosts cannot connect to it. NCCL selects its interfaces
itself.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress

from .model import DistributedEnvironment, ip_of

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def warn_of_loopback(environment: DistributedEnvironment) -> None:
    """Warn, in a job of several hosts, if gloo would publish a loopback address. Local."""
    if environment.local_world_size == environment.world_size or os.environ.get(GLOO_INTERFACE):
        return
    name, published = socket.gethostname(), None
    with suppress(OSError, UnicodeError):
        published = ip_of(socket.gethostbyname(name))
    if published is not None and published.is_loopback:
        logging.getLogger(__name__).warning(
            "the host name %s resolves to %s: gloo publishes this address, to which no other host "
            "can connect. Set %s on each host to the interface that the others reach",
            *(name, published, GLOO_INTERFACE),
        )


def interface_in_use() -> str:
    """Return the configured interface of communicators, for messages. Local."""
    named = {os.environ.get(name) for name in ("NCCL_SOCKET_IFNAME", GLOO_INTERFACE)} - {None, ""}
    return " and ".join(sorted(map(str, named))) or "the default interface"
