"""``torch.compile(fullgraph=True)`` of functions with collectives, compiled before any offload."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from consumer_run import Run, same_results
from helpers import worlds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reloadpg
from reloadpg.testing import run_ranks


def compiled_with(run: Run, backend: str) -> dict[str, Any]:
    """Functions of a group, of a mesh, of WORLD and of DTensors; graphs counted."""
    from torch._dynamo.utils import counters

    group = dist.new_group(list(range(run.world_size)))
    world = dist.group.WORLD
    mesh = init_device_mesh(run.device.type, (run.world_size,), mesh_dim_names=("tp",))

    @torch.compile(fullgraph=True, backend=backend)
    def of_groups(x: torch.Tensor) -> torch.Tensor:
        summed = funcol.all_reduce(x * 2, "sum", group)
        gathered = funcol.all_gather_tensor(summed + 1, 0, world)
        scattered = funcol.reduce_scatter_tensor(gathered * 3, "sum", 0, (mesh, 0))
        return funcol.all_reduce(scattered.sin(), "max", (mesh, 0)) + x

    @torch.compile(fullgraph=True, backend=backend)
    def of_gradients(x: torch.Tensor) -> torch.Tensor:
        gathered = funcol.all_gather_tensor_autograd(x.sin(), 0, group)
        return funcol.reduce_scatter_tensor_autograd(gathered * 3, "sum", 0, mesh)

    @torch.compile(fullgraph=True, backend=backend)
    def of_dist(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        out = y.new_empty(y.shape[0] * run.world_size, *y.shape[1:])
        dist.all_gather_into_tensor(out, y + 1, group=group)
        return out.cos()

    @torch.compile(fullgraph=True, backend=backend)
    def of_dtensor(x: torch.Tensor, w: DTensor) -> torch.Tensor:
        sharded = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        return (sharded @ w).redistribute(placements=[Replicate()]).to_local().tanh()

    weight = torch.randn(3, 3, generator=worlds.generator(7))
    weight_dtensor = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)

    def step(number: int) -> list[torch.Tensor]:
        x = torch.randn(4, 3, generator=worlds.generator(10 * number + run.rank))
        leaf = x.clone().requires_grad_()
        differentiable = of_gradients(leaf)
        differentiable.square().sum().backward()
        few = [of_groups(x), differentiable, leaf.grad]
        return few if backend == "inductor" else [*few, of_dist(x), of_dtensor(x, weight_dtensor)]

    def compiled() -> dict[str, Any]:
        return {
            "frames": dict(counters["frames"]),
            "graphs": dict(counters["stats"]),
            "breaks": dict(counters["graph_break"]),
        }

    results = [step(number) for number in range(2)]
    run.facts["compiled"] = [compiled()]
    for number in range(3):
        run.cycle()
        with torch.compiler.set_stance("fail_on_recompile"):
            results.append(step(2 + number))
        run.facts["compiled"].append(compiled())
    return {"results": results}


needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
    reason="inductor compiles C++ and this machine has no C++ compiler (g++, clang++ or CXX)",
)
needs_triton = pytest.mark.skipif(
    worlds.NCCL and importlib.util.find_spec("triton") is None,
    reason="inductor compiles for the device with triton, which is not installed",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "graphs"),
    [("aot_eager", 4), pytest.param("inductor", 2, marks=[needs_compiler, needs_triton])],
)
def test_the_graphs_compiled_before_the_first_offload_serve_all_cycles(
    backend: str, graphs: int
) -> None:
    """Functions of groups, of gradients, of ``torch.distributed`` and of DTensors.

    Inductor lowers collectives to in-place operations on names, in compiled code. Its C++ compiler
    takes seconds a graph, so it gets two of the functions.
    """
    for outcome in same_results(partial(compiled_with, backend=backend), 2, groups=2):
        before, *after = outcome.facts["compiled"]
        assert before["graphs"]["unique_graphs"] == graphs
        assert before["breaks"] == {}
        assert after == [before] * 3


def _compiled_while_offloaded(rank: int, world_size: int, cache: str) -> list[int]:
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{rank}"
    reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    hits = []
    for _ in range(2):
        torch.compiler.reset()
        reloadpg.offload()
        doubled = torch.compile(lambda x: x * 2 + 1)(torch.ones(3))
        reloadpg.reload()
        assert doubled.tolist() == [3.0] * 3
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
    return hits


@pytest.mark.slow
@needs_compiler
def test_a_graph_is_read_from_the_warm_cache_while_groups_are_offloaded(tmp_path: Any) -> None:
    """Torch then extends the timeout of every group, offloaded ones too."""
    for cold, warm in run_ranks(_compiled_while_offloaded, 2, args=(str(tmp_path),), timeout=300):
        assert (cold, warm) == (0, 1)
