"""The training script that commands of the pages name: a few steps, each after an offload."""

import os

import torch
import torch.distributed as dist

import reloadpg

backend = "nccl" if torch.cuda.is_available() else "gloo"
reloadpg.install(backends={backend}, recoverable=True)
if backend == "nccl":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
dist.init_process_group(backend)
device = "cuda" if backend == "nccl" else "cpu"
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(3):
    with reloadpg.offloaded():
        pass
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
