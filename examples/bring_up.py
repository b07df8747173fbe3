"""Bring-up and end of a job under any launcher: the same program, one process or many.

    python bring_up.py
    torchrun --nproc-per-node 2 bring_up.py
    srun -n 2 python bring_up.py
    mpirun -n 2 python bring_up.py

On GPUs, remove ``"gloo"``: the backend is then that of the device.
"""

import torch
import torch.distributed as dist

from reloadpg import environment

with environment.init_distributed("gloo", timeout=600, mesh_dims={"dp": -1}, seed=7) as context:
    total = torch.ones(1)
    dist.all_reduce(total, group=context.mesh.get_group("dp"))
    environment.barrier("after the sum", timeout=20)
    source, device = context.environment.source, context.device
    print(f"rank {context.rank} of {context.world_size} ({source}) on {device}: {total.item():g}")
