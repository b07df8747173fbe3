"""A rank with an FSDP2 trainer and vLLM with tensor parallelism in the same process.

Run by torchrun: ``hybrid_job.py FOLDER CASE ORDER``. The folder holds a model and a tokenizer. Each
iteration generates, trains on the samples, and passes the weights on to the engine. Rank 0 prints
one line of JSON: a hash of all tokens, a hash of the trained weights, and the groups' sets.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import contextmanager, nullcontext

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import reloadpg

ITERATIONS, TOKENS = 3, 8


def install(case):
    """Install as the case says; return the context around the rollout and around the engine."""
    if case == "plain":
        return nullcontext, nullcontext()
    rules = {"rule": {"engine": "vllm.*"}, "alone": {None: "vllm.*"}}
    reloadpg.install(backends={"gloo"}, sets=rules.get(case, "engine"))
    if case == "alone":
        return reloadpg.offloaded, nullcontext()
    region = reloadpg.region("engine") if case == "region" else nullcontext()
    return engine_live, region


@contextmanager
def engine_live():
    """The engine's groups are live, and the trainer's offloaded."""
    with reloadpg.offloaded("trainer"):
        try:
            reloadpg.reload("engine")
            yield
        finally:
            reloadpg.offload("engine")


def engine_of(folder, size):
    from vllm import LLM
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    # Otherwise tensor parallelism on the CPU uses shared memory, and no group.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    return LLM(
        folder,
        tensor_parallel_size=size,
        distributed_executor_backend="external_launcher",
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        seed=0,
        disable_log_stats=True,
    )


def trainer_of(folder, size):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gathered(model):
    """The whole weights, by name; collective."""
    return {name: one.full_tensor().detach() for name, one in model.state_dict().items()}


def train(model, optimizer, samples):
    batch = torch.tensor(samples)
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def hash_of(weights):
    found = hashlib.sha256()
    for name, one in sorted(weights.items()):
        found.update(name.encode() + one.numpy().tobytes())
    return found.hexdigest()


def main(folder, case, order):
    from vllm import SamplingParams

    rollout, place = install(case)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = min(size, 2)
    if order == "engine first":
        with place:
            llm = engine_of(folder, parallel)
        model = trainer_of(folder, size)
    else:
        model = trainer_of(folder, size)
        with place:
            llm = engine_of(folder, parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    tokens, states = hashlib.sha256(), []
    for step in range(ITERATIONS):
        weights = gathered(model)
        with rollout():
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            prompt = {"prompt_token_ids": [5 + step, 6, 7, 8]}
            outputs = llm.generate([prompt] * 2, sampling, use_tqdm=False)
            states.append({n: one.state for n, one in reloadpg.status().sets.items()})
        samples = [list(one.outputs[0].token_ids) for one in outputs]
        tokens.update(json.dumps(samples).encode())
        train(model, optimizer, samples)
    reloadpg.reload() if case != "plain" else None
    sets = {one.set for one in reloadpg.status().groups}
    result = {
        "tokens": tokens.hexdigest(),
        "weights": hash_of(gathered(model)),
        "states": states,
        "sets": sorted(sets),
    }
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # vLLM's own end destroys every group of the process


if __name__ == "__main__":
    main(*sys.argv[1:])
