"""A device mesh with slices and flattened dimensions, which find their groups by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from consumer_run import Run, same_results
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def sums(run: Run, meshes: dict[str, DeviceMesh]) -> dict[tuple[str, str], Any]:
    """One value a rank, summed over each dimension, by ``dist`` and by functional collectives."""
    out: dict[tuple[str, str], Any] = {}
    for name, mesh in meshes.items():
        for index, dim in enumerate(mesh.mesh_dim_names or ()):
            group, tensor = mesh.get_group(dim), torch.tensor([float(2**run.rank)])
            functional = [
                funcol.all_reduce(tensor, "sum", one).clone() for one in (group, (mesh, index))
            ]
            dist.all_reduce(tensor, group=group)
            ranks = dist.get_process_group_ranks(group)
            out[name, dim] = [tensor, functional, ranks, mesh.get_local_rank(dim)]
    return out


def mesh_program(run: Run) -> dict[str, Any]:
    """Meshes of a job, and two more after three cycles."""
    device = run.device.type
    two = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    three = init_device_mesh(device, (2, 1, 2), mesh_dim_names=("pp", "cp", "tp"))
    meshes = {
        "two": two,
        "three": three,
        "line": init_device_mesh(device, (4,), mesh_dim_names=("all",)),
        "slice": three["pp", "tp"],
        "tp of two": two["tp"],
        "flat": three["pp", "cp"]._flatten("pp_cp"),
        "all flat": two._flatten("world"),
    }
    groups = {(n, d): m.get_group(d) for n, m in meshes.items() for d in m.mesh_dim_names or ()}
    run.facts["kinds"] = {key: type(group).__name__ for key, group in groups.items()}
    world, rounds = dist.group.WORLD, [sums(run, meshes)]
    for _ in range(3):
        run.cycle()
        rounds.append(sums(run, meshes))
        assert all(meshes[n].get_group(d) is group for (n, d), group in groups.items())
        assert dist.group.WORLD is world
    again = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    late = three["cp", "tp"]._flatten("made_after_three_cycles")
    rounds.append(sums(run, {"again": again, "late": late}))
    return {
        "rounds": rounds,
        "coordinates": [mesh.get_coordinate() for mesh in meshes.values()],
        "line is WORLD": meshes["line"].get_group() is world,
        "equal": again == two,
    }


@pytest.mark.matrix
@pytest.mark.slow
def test_groups_of_meshes() -> None:
    """Likewise those of ``_flatten`` (failure 8). A dimension of one rank is bypassed."""
    for outcome in same_results(mesh_program, 4, groups=5):
        kinds = dict(outcome.facts["kinds"])
        assert kinds.pop(("three", "cp")) == "ProcessGroup"
        assert set(kinds.values()) == {"ReloadableProcessGroup"}
