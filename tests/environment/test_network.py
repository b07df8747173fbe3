"""The address that gloo publishes, with a host name in a namespace of the test."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from dataclasses import replace

import pytest
from helpers.in_turn import variables

from reloadpg.environment.launchers import SINGLE
from reloadpg.environment.network import warn_of_loopback

NEW_HOST_NAME = 0x04000000
"""CLONE_NEWUTS: a host name of the calling thread, and of those that it starts."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a thread a host name")
@pytest.mark.ranks(1, env={"GLOO_SOCKET_IFNAME": None})
def test_a_host_name_that_resolves_to_a_loopback_address_is_a_warning_between_hosts() -> None:
    """Gloo publishes that address, and ranks of other hosts connect to themselves (failure 38)."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_HOST_NAME):
        pytest.skip(f"no namespaces here: {os.strerror(ctypes.get_errno())}")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg.environment.network").addHandler(handler)
    hosts = replace(SINGLE, world_size=2)
    socket.sethostname("localhost")
    warn_of_loopback(hosts)
    (warning,) = said
    assert warning.startswith("the host name localhost resolves to 127.0.0.1")
    assert "Set GLOO_SOCKET_IFNAME on each host" in warning
    with variables({"GLOO_SOCKET_IFNAME": "eth0"}):
        warn_of_loopback(hosts)
    warn_of_loopback(replace(SINGLE, world_size=2, local_world_size=2))
    for name in ("192.0.2.7", "absent.invalid"):
        socket.sethostname(name)
        warn_of_loopback(hosts)
    assert len(said) == 1
