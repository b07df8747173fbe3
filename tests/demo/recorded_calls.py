"""Prints, as JSON, which groups ``ParallelGroups.create`` asks torch for, by Megatron and by hand.

``python recorded_calls.py RANKS:RANK...``, on torch's fake backend.
"""

import json
import sys

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from reloadpg.demo import parallel
from reloadpg.demo.layout import Layout

ROLES = ("tensor", "pipeline", "data", "expert")
new_group = dist.new_group


def recorded(ranks, rank):
    """The calls of ``new_group`` for one rank of a job, and the groups with a role."""
    calls = []

    def record(**kwargs):
        calls.append({**kwargs, "timeout": str(kwargs["timeout"])})
        return new_group(**kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    dist.new_group = record
    made = parallel.ParallelGroups.create(Layout.of(ranks))
    dist.new_group = new_group
    roles = {role: dist.get_process_group_ranks(getattr(made, role)) for role in ROLES}
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return {"calls": calls, "roles": roles}


jobs = [tuple(map(int, job.split(":"))) for job in sys.argv[1:]]
result = {"megatron": [recorded(*job) for job in jobs]}
parallel.megatron_version = lambda: None
result["by_hand"] = [recorded(*job) for job in jobs]
print(json.dumps(result))
