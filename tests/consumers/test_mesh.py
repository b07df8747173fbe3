"""``init_device_mesh`` in 2 and 3 dimensions: meshes keep group names and resolve them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from consumer_run import Consumer, ConsumerTests, Run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def sums(run: Run, mesh: DeviceMesh, dims: list[Any]) -> dict[str, Any]:
    """One value a rank, summed over each dimension, by ``dist`` and by functional collective."""
    out: dict[str, Any] = {}
    for dim in dims:
        group = mesh.get_group(dim)
        tensor = torch.tensor([float(2**run.rank)])
        dist.all_reduce(tensor, group=group)
        functional = funcol.all_reduce(torch.tensor([float(2**run.rank)]), "sum", group)
        out[str(dim)] = {
            "dist": tensor,
            "functional": functional.clone(),
            "by mesh": funcol.all_reduce(
                torch.tensor([float(2**run.rank)]), "sum", (mesh, mesh.mesh_dim_names.index(dim))
            ).clone(),
            "ranks": dist.get_process_group_ranks(group),
            "local rank": mesh.get_local_rank(dim),
        }
    return out


def mesh_program(run: Run) -> dict[str, Any]:
    """A 2-D mesh, a 3-D mesh with a dimension of one rank, a slice, a flattened pair, the world."""
    device = run.device.type
    two = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    three = init_device_mesh(device, (2, 1, 2), mesh_dim_names=("pp", "cp", "tp"))
    line = init_device_mesh(device, (4,), mesh_dim_names=("all",))
    sliced = three["pp", "tp"]
    flat = three["pp", "cp"]._flatten("pp_cp")
    meshes = {
        "two": (two, ["dp", "tp"]),
        "three": (three, ["pp", "cp", "tp"]),
        "line": (line, ["all"]),
        "slice": (sliced, ["pp", "tp"]),
        "tp of two": (two["tp"], ["tp"]),
        "flat": (flat, ["pp_cp"]),
        "all flat": (two._flatten("world"), ["world"]),
    }
    groups = {(n, d): m.get_group(d) for n, (m, dims) in meshes.items() for d in dims}
    run.facts["kinds"] = {f"{n}.{d}": type(g).__name__ for (n, d), g in groups.items()}
    world = dist.group.WORLD
    rounds = []
    for _ in range(3):
        rounds.append({n: sums(run, m, dims) for n, (m, dims) in meshes.items()})
        run.cycle()
        same = all(meshes[n][0].get_group(d) is g for (n, d), g in groups.items())
        run.facts.setdefault("same groups", []).append(same and dist.group.WORLD is world)
    rounds.append({n: sums(run, m, dims) for n, (m, dims) in meshes.items()})
    again = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    late = three["cp", "tp"]._flatten("made_after_three_cycles")
    rounds.append({"again": sums(run, again, ["dp", "tp"])})
    rounds.append({"late": sums(run, late, ["made_after_three_cycles"])})
    return {
        "rounds": rounds,
        "coordinates": [m.get_coordinate() for m, _ in meshes.values()],
        "line is WORLD": line.get_group() is world,
        "equal": again == two,
    }


@pytest.mark.matrix
@pytest.mark.slow
class TestDeviceMesh(ConsumerTests):
    consumer = Consumer(mesh_program, 4, groups=5)

    def test_groups_of_the_mesh_are_reloadable(self) -> None:
        """Likewise those of ``_flatten`` (failure 8). A dimension of one rank is bypassed."""
        for outcome in self.consumer.with_cycles():
            kinds = dict(outcome.facts["kinds"])
            assert kinds.pop("three.cp") == "ProcessGroup"
            assert set(kinds.values()) == {"ReloadableProcessGroup"}

    def test_get_group_returns_the_same_object_before_and_after_each_cycle(self) -> None:
        """Likewise WORLD."""
        for outcome in self.consumer.with_cycles():
            assert outcome.facts["same groups"] == [True] * 3
