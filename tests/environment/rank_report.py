"""Run by real launchers: bring up, sum the ranks in each of four generations, and write a file.

``python rank_report.py DIRECTORY [NAME OTHER]``: with a NAME, it stays up until the job that is
called OTHER is up at the same time.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import reloadpg
from reloadpg import environment


def main() -> None:
    folder = Path(sys.argv[1])
    early = (environment.get_rank(), environment.is_rank_zero())
    torch_free = "torch" not in sys.modules
    import torch
    import torch.distributed as dist

    reloadpg.install(backends={"gloo"}, min_size=1)
    with reloadpg.environment.init_distributed("gloo", timeout=120, init_timeout=60) as context:
        sums = []
        for cycle in range(4):
            if cycle:
                reloadpg.offload()
                reloadpg.reload()
            value = torch.tensor([float(context.environment.rank)])
            dist.all_reduce(value)
            sums.append(value.item())
        reloadpg.environment.barrier("all are up")
        if len(sys.argv) > 2:
            name, other = sys.argv[2:]
            meeting = dist.FileStore(str(folder / "meeting"))
            meeting.set(f"{name}{context.environment.rank}", "up")
            meeting.wait([f"{other}{context.environment.rank}"], timedelta(seconds=60))
        report = {
            **asdict(context.environment),
            "early": early,
            "torch_free": torch_free,
            "sums": sums,
            "generation": dist.group.WORLD.generation,
            "group": (dist.get_rank(), dist.get_world_size()),
        }
    label = sys.argv[2] if len(sys.argv) > 2 else "job"
    (folder / f"{label}.{os.getpid()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
