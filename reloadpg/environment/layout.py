"""What follows from a launcher's numbers: the port of a job step, and where ranks should lie."""

from __future__ import annotations

import logging
import zlib

__all__ = ["check_layout", "port_from_ids", "port_from_text"]

FIRST_PORT = 15000
LAST_PORT = 30000
_PORTS = LAST_PORT - FIRST_PORT + 1
# Coprime to _PORTS (7 * 2143). The first 211 steps of 71 consecutive jobs all get different ports:
# jobs that share a host were usually submitted close to each other.
_STRIDE = 211


def port_from_ids(job: int, step: int) -> int:
    """A port in 15000..30000 that all ranks of one step compute alike. Local, pure.

    Below the usual range of ephemeral ports (32768 and up). Two steps of one job differ unless
    their ids differ by a multiple of 15001.
    """
    return FIRST_PORT + (job * _STRIDE + step) % _PORTS


def port_from_text(*ids: str) -> int:
    """A port in 15000..30000 from ids that are not numbers. Local, pure."""
    return FIRST_PORT + zlib.crc32("\0".join(ids).encode()) % _PORTS


def check_layout(source: str, *, rank: int, local_rank: int, first: int) -> None:
    """Warn unless the ranks of a node are consecutive. Local.

    Args:
        source: the launcher.
        rank: the rank in the world.
        local_rank: the rank on the node.
        first: the rank with which this node should begin: node rank times ranks per node.
    """
    if rank != first + local_rank:
        logging.getLogger(__name__).warning(
            "%s placed rank %d as local rank %d on a node whose ranks should begin at %d: ranks "
            "of a node are not consecutive, so groups of neighbouring ranks cross nodes; use a "
            "block distribution",
            source,
            rank,
            local_rank,
            first,
        )
