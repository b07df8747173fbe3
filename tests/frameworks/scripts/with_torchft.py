"""torchft's Manager over two replicas, each of two ranks with FSDP2: ``with_torchft.py DIRECTORY``.

The groups of a replica are torch's; torchft makes the ones across replicas.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchft import manager
from torchft.checkpointing.pg_transport import PGTransport
from torchft.coordination import LighthouseServer
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

LOOPBACK = "127.0.0.1"
SIZE = 2
STEPS = 8
TIMEOUT = timedelta(seconds=60)


def on_loopback(start=manager.ManagerServer, **options):
    return start(**{**options, "hostname": LOOPBACK, "bind": f"{LOOPBACK}:0"})


def main(folder):
    manager.ManagerServer = on_loopback  # torchft's listens on all interfaces
    number = int(os.environ["RANK"])
    replica, rank = divmod(number, SIZE)
    job = dist.TCPStore(LOOPBACK, int(os.environ["MASTER_PORT"]), is_master=False)
    if number == 0:
        lighthouse = LighthouseServer(f"{LOOPBACK}:0", min_replicas=2, join_timeout_ms=60_000)
        job.set("lighthouse", lighthouse.address())
    if rank == 0:
        store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        job.set(f"store of {replica}", str(store.port))
    port = int(job.get(f"store of {replica}"))
    if rank:
        store = dist.TCPStore(LOOPBACK, port, is_master=False)
    store = dist.PrefixStore("torch", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    fully_shard(model)
    group = ProcessGroupGloo(TIMEOUT)
    replicas = manager.Manager(
        group,
        model.load_state_dict,
        model.state_dict,
        min_replica_size=2,
        rank=rank,
        world_size=SIZE,
        store_addr=LOOPBACK,
        store_port=port,
        lighthouse_addr=job.get("lighthouse").decode(),
        replica_id=f"replica {replica}",
        checkpoint_transport=PGTransport(group, TIMEOUT, torch.device("cpu")),  # listens nowhere
        init_sync=False,  # the replicas start with equal weights
    )
    optimizer = OptimizerWrapper(replicas, torch.optim.AdamW(model.parameters(), lr=0.02))
    generator = torch.Generator().manual_seed(number)
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(4, 6, generator=generator)
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        for parameter in model.parameters():
            replicas.allreduce(parameter.grad.to_local()).wait()
        optimizer.step()
        losses.append(loss.item())
    weights = [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]
    facts = {"losses": losses, "weights": weights, "steps": replicas.current_step()}
    facts["participants"] = replicas.num_participants()
    (folder / f"training.{number}.json").write_text(json.dumps(facts))
    replicas.shutdown()
    dist.destroy_process_group()
    if job.add("ended", 1) == 2 * SIZE:
        job.set("all have ended", "")
    if number == 0:
        job.wait(["all have ended"])  # the others need the lighthouse until then


if __name__ == "__main__":
    main(Path(sys.argv[1]))
