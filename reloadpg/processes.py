"""Which process an id means: on which host, in which namespace, started when. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def process_table() -> str:
    """The identifier of this host and of the processes that can be seen here; empty if unknown.

    Local. It is equal in two processes if a process id means the same in both.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        text = boot + os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/net")
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return ""


def absence_of(pid: int, started: str) -> str:
    """Why a process that started then does not run: ``gone``, ``stopped``, or empty. Local.

    It has ended if the id is not in use, or by a process that started at another time. A process
    that cannot be looked up, such as when no file descriptor is left, counts as running.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    if fields[18] != started:
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "")


def start_of(pid: int) -> str:
    """The start time of a process, in ticks since boot; empty if it has ended."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]
    return ""
