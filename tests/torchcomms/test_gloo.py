"""TorchComms with its gloo backend, on the CPU: ``nox -s torchcomms`` builds it and runs this."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_job
import pytest
import torch
import torch.distributed as dist
import worlds
from cli_process import command, decoded
from torch.distributed import distributed_c10d

import reloadpg
from reloadpg import c10d
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.torchcomms

RING = ((0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2, 3))


def start(size: int, subgroups: Any = (), **options: Any) -> list[Any]:
    """Install, and create the default group and those of some ranks. Returns this rank's."""
    assert c10d.uses_torchcomms()
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT, **options)
    worlds.init(timeout=worlds.TIMEOUT)
    made = [dist.new_group(list(ranks)) for ranks in subgroups]
    return [dist.group.WORLD, *(one for one in made if isinstance(one, dist.ProcessGroup))]


def cycle() -> None:
    reloadpg.offload()
    reloadpg.reload()


def held() -> tuple[int, int]:
    """Threads and sockets of this process."""
    return len(os.listdir("/proc/self/task")), len(fault_job.sockets())


def forty_cycles(rank: int, size: int) -> tuple[Any, ...]:
    groups = start(size, [[0, 1], [0, 1], [0, 1]])
    right = worlds.sums_right(*groups)
    live = held()
    reloadpg.offload()
    offloaded = held()
    reloadpg.reload()
    counts = [held()]
    for _ in range(40):
        cycle()
        right &= worlds.sums_right(*groups)
    counts.append(held())
    listed = len(distributed_c10d._world.comms)
    return right, live, offloaded, counts, listed


def test_an_offload_frees_connections_and_forty_cycles_leak_none() -> None:
    """Each of the four groups has a thread and a connection to the other rank."""
    for right, live, offloaded, counts, listed in run_ranks(forty_cycles, 2, timeout=300):
        assert right
        assert offloaded[0] <= live[0] - 4
        assert offloaded[1] <= live[1] - 4
        assert counts[1] <= counts[0]  # a thread of the library may have ended since
        assert listed == 0


def destroy_groups(rank: int, size: int) -> list[bool]:
    _, first, second, third = start(size, [[0, 1], [0, 1], [0, 1]])
    plain = dist.new_group([0, 1], backend="cpu:gloo")
    dist.destroy_process_group(first)
    reloadpg.offload()
    dist.destroy_process_group(second)
    reloadpg.reload()
    right = [worlds.sums_right(None, third, plain)]
    cycle()
    dist.destroy_process_group(third)
    reloadpg.offload()
    dist.destroy_process_group()
    worlds.init(timeout=worlds.TIMEOUT)
    return [*right, worlds.sums_right(None)]


def test_groups_can_be_destroyed_live_and_offloaded() -> None:
    assert run_ranks(destroy_groups, 2, timeout=120) == [[True, True]] * 2


def recover_twice(rank: int, size: int, how: str) -> tuple[bool, list[str]]:
    groups = start(size, RING, recoverable=True)
    right, texts = worlds.sums_right(*groups), []
    for _ in range(2):
        cycle()
        right &= worlds.sums_right(*groups)
        try:
            if rank == 1:
                if how == "raises":
                    raise ValueError("of the program")
                fault_job.cut(fault_job.connections())
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))
        except (RuntimeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
            reloadpg.recovery.recover(error)
        right &= worlds.sums_right(*groups)
    cycle()
    return right and worlds.sums_right(*groups), texts


@pytest.mark.parametrize("how", ["cut", "raises"])
def test_four_ranks_recover_twice(how: str) -> None:
    """After one rank's connections are cut, or after it raises while the others wait for it."""
    for right, texts in run_ranks(recover_twice, 4, args=(how,), timeout=240):
        assert right
        assert len(texts) == 2


def sum_over_meshes(rank: int, size: int) -> list[bool]:
    start(size)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh.get_group("dp"), mesh.get_group("tp")]
    right = [worlds.sums_right(None, *groups)]
    for _ in range(3):
        cycle()
        right.append(worlds.sums_right(None, *groups))
    same = [mesh.get_group("dp") is groups[0], mesh["tp"].get_group() is groups[1]]
    return [*right, *same]


def sum_over_splits(rank: int, size: int) -> list[bool]:
    start(size)
    half = dist.split_group(None, [[0, 1], [2, 3]], timeout=worlds.TIMEOUT)
    pair = dist.split_group(half, [[1, 0]], timeout=worlds.TIMEOUT)
    managed = [isinstance(one, reloadpg.ReloadableProcessGroup) for one in (half, pair)]
    right = [worlds.sums_right(None, half, pair)]
    for _ in range(3):
        cycle()
        right.append(worlds.sums_right(None, half, pair))
    ranks = dist.get_process_group_ranks(pair)
    return [*managed, *right, ranks in ([1, 0], [3, 2]), pair.rank() == 1 - rank % 2]


@pytest.mark.parametrize("job", [sum_over_meshes, sum_over_splits])
def test_meshes_and_splits_sum_over_their_members(job: Callable[..., Any]) -> None:
    """Also a split of a split with its ranks in another order."""
    for found in run_ranks(job, 4, timeout=240):
        assert found == [True] * len(found)


def changed_timeouts(rank: int, size: int) -> list[str]:
    _, group, late = start(size, [[0, 1], [0, 1]])
    dist.set_timeout(timedelta(milliseconds=1234), group)
    cycle()
    reloadpg.offload()
    dist.set_timeout(timedelta(milliseconds=2345), late)
    reloadpg.reload()
    cycle()
    texts = []
    for one in (group, late) if rank == 1 else ():
        with pytest.raises(RuntimeError) as caught:
            dist.recv(torch.ones(1), 0, group=one)  # rank 0 sends nothing
        texts.append(str(caught.value))
    return texts


def test_a_changed_timeout_holds_in_later_generations() -> None:
    """Whether it is set while the group is live or offloaded; gloo's message names it."""
    _, (live, offloaded) = run_ranks(changed_timeouts, 2, timeout=60)
    assert "1234ms" in live
    assert "2345ms" in offloaded


def keys_after_cycles(rank: int, size: int) -> list[list[str]]:
    start(size, RING)
    dist.split_group(None, [[0, 1], [2, 3]], timeout=worlds.TIMEOUT)
    found = []
    for number in range(6):
        cycle()
        fault_job.meet(f"listed{number}", size)
        listed = [key for key in fault_job.base_store().list_keys() if "@" in key]
        found.append(sorted(listed))
        fault_job.meet(f"go on{number}", size)
    return found


def test_the_store_does_not_grow() -> None:
    """It has the keys of the last generation only."""
    for found in run_ranks(keys_after_cycles, 4, timeout=240):
        assert len({len(names) for names in found}) == 1
        assert not {*found[0]} & {*found[-1]}
        assert any("init_count" in name for name in found[-1])


def cycles_in_parallel(rank: int, size: int) -> list[bool]:
    """On different ranks in each thread, as many groups as ring and pairs make."""
    groups = start(size, RING * 3, parallelism=8)
    right = [worlds.sums_right(*groups)]
    for _ in range(5):
        cycle()
        right.append(worlds.sums_right(*groups))
    return right


def test_groups_are_created_one_at_a_time() -> None:
    """Whatever ``parallelism`` is: torch writes the rank into the process's environment."""
    for right in run_ranks(cycles_in_parallel, 4, timeout=240):
        assert right == [True] * 6


def not_enabled(rank: int, size: int) -> bool:
    assert distributed_c10d._TORCHCOMM_AVAILABLE
    assert not c10d.uses_torchcomms()
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init(timeout=worlds.TIMEOUT)
    gone, kept = dist.new_group([0, 1]), dist.new_group([0, 1])
    reloadpg.offload()
    dist.destroy_process_group(gone)
    reloadpg.reload()
    return worlds.sums_right(kept)


def test_torchcomms_that_is_not_enabled_changes_nothing() -> None:
    """Torch then reads the backends of a group that is destroyed while offloaded."""
    env = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": None}
    assert run_ranks(not_enabled, 2, env=env, start_method="spawn", timeout=120) == [True] * 2


SCRIPT = """
import torch.distributed as dist
import reloadpg
reloadpg.install(backends={"gloo"})
dist.init_process_group("gloo")
dist.new_group([0, 1])
"""


def test_doctor_and_explain_state_what_is_supported(tmp_path: Path) -> None:
    found = decoded(command("doctor", "--json"))
    (line,) = [one for one in found["findings"] if one["check"] == "torchcomms"]
    assert line["level"] == "note"
    assert line["message"] == c10d.TORCHCOMMS_SUPPORT
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    explained = command("explain", script, "--world-size", 2)
    assert explained.returncode == 0
    assert "2 of 2 groups of this rank would be reloadable" in explained.stdout
    assert c10d.TORCHCOMMS_SUPPORT in " ".join(explained.stdout.split())
