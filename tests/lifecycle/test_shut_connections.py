"""The connections that an abort of gloo groups shuts down."""

from __future__ import annotations

import os
import socket
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fault_job import connections

from reloadpg import c10d
from reloadpg.testing import run_ranks


def closes(rank: int, world_size: int) -> int:
    """Gloo's thread closes one of this rank's two connections while they are looked for."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    found, fstat = [*filter(has_peer, connections())], os.fstat

    def look(descriptor: int) -> Any:
        if descriptor == min(found):
            raise OSError("closed")
        return fstat(descriptor)

    # Only noted: gloo's threads would close what is shut before it can be counted.
    with mock.patch.object(socket.socket, "shutdown") as shut, mock.patch.object(os, "fstat", look):
        c10d.shut_connections(1)
    return len(found) - shut.call_count


def has_peer(descriptor: int) -> bool:
    """Whether it is connected, and does not listen."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        try:
            one.getpeername()
        except OSError:
            return False
        return True


def test_a_connection_that_closes_meanwhile_does_not_keep_the_others_open() -> None:
    """Otherwise the peers wait for their timeouts, and the recovery 10 s for their groups."""
    assert run_ranks(closes, 3, timeout=240) == [1, 1, 1]
