"""Status files as the ranks of a job write them."""

import json
import os
import time


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


def record(rank, size, **values):
    """One rank's record. Its time is in the future by default, so that its age is always 0 s."""
    installed = values.get("state") != "not installed"
    return {
        "rank": rank,
        "world_size": size,
        "state": "live",
        "host": "node0",
        "pid": 100 + rank,
        "started": "",
        "process_table": "",
        "time": time.time() + 600,
        "generation": 3 if installed else 0,
        "groups": 2 if installed else 0,
        "memory_bytes": 200 << 20 if installed else None,
        "last_ms": {"offload": 20.0, "reload": 40.0},
        **values,
    }


def write_rank(directory, rank, size, **values):
    """Write the file of one rank, atomically."""
    temporary = directory / f".rank-{rank}"
    temporary.write_text(json.dumps(record(rank, size, **values)))
    os.replace(temporary, directory / f"rank-{rank}.json")
