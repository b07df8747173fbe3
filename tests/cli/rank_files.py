"""Status files as the ranks of a job write them."""

import json
import os
import time


def group(name, desc="", size=2, **values):
    return {
        "name": name,
        "desc": desc,
        "ranks": list(range(size)),
        "backend": "nccl",
        "state": "live",
        "generation": 3,
        "timeout_s": 600.0,
        "last_error": "",
        "strategy": "recreate",
        "memory_bytes": 100 << 20,
        "cycles": 3,
        "last_offload_ms": 10.0,
        "last_reload_ms": 20.0,
        **values,
    }


def status(rank, size, *, installed=True, **values):
    groups = [group("0", "default_pg", size), group("7", "TENSOR")] if installed else []
    return {
        "installed": installed,
        "initialized": True,
        "rank": rank,
        "world_size": size,
        "state": "live",
        "generation": 3 if installed else 0,
        "cycles": 3,
        "options": {},
        "groups": groups,
        "bypassed": 1,
        "memory": {"device": 5 << 30},
        "last_error": "",
        "memory_bytes": 200 << 20 if installed else None,
        **values,
    }


def running(**values):
    """The operation in progress on a rank."""
    return {
        "operation": "offload",
        "sequence": 4,
        "phase": "released",
        "waiting": False,
        "started_at": time.time() - 2.0,
        "since": time.time() - 1.0,
        "doing": "",
        "groups_done": 3,
        "groups": 12,
        **values,
    }


def report(**values):
    return {
        "operation": "reload",
        "changed": True,
        "generation": 3,
        "started_at": 1000.0,
        "total_ms": 40.0,
        "error": "",
        "groups": [],
        **values,
    }


def record(rank, size, **values):
    """One rank's record. Its time is in the future by default, so that its age is always 0 s."""
    installed = values.get("installed", True)
    return {
        "version": 1,
        "pid": 100 + rank,
        "rank": rank,
        "world_size": size,
        "host": "node0",
        "time": time.time() + 600,
        "exited": False,
        "running": None,
        "collectives": {},
        "installed": values.get("status", {}).get("installed", installed),
        "status": status(rank, size, installed=installed),
        "last_report": report() if installed else None,
        "last_ms": {"offload": 20.0, "reload": 40.0},
        **values,
    }


def write_rank(directory, rank, size, **values):
    """Write the file of one rank, atomically."""
    temporary = directory / f".rank-{rank}"
    temporary.write_text(json.dumps(record(rank, size, **values)))
    os.replace(temporary, directory / f"rank-{rank}.json")
