"""A default group that contradicts the launcher is refused, in real processes (failure 44)."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers.in_turn import variables

import reloadpg
from reloadpg import environment
from reloadpg.environment import DistributedEnvironmentError
from reloadpg.testing import run_ranks

CALLS: dict[str, Callable[[], object]] = {
    "init_distributed": lambda: reloadpg.environment.init_distributed(init_timeout=60),
    "ensure_process_group": reloadpg.environment.ensure_process_group,
}


def create(rank: int, size: int, path: str) -> None:
    """A default group of other numbers than the launcher's, as a library or a notebook makes it."""
    store = dist.FileStore(path, size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


SLURM = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")),
    **dict.fromkeys(("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
}


@pytest.mark.ranks(2)
def test_a_group_in_which_the_rank_is_another_one_is_an_error(rank: int, tmp_path: object) -> None:
    """The size alone fits: shards and checkpoints would be exchanged. It is left as it was, and
    ``get_rank`` returns its rank from then on."""
    assert (environment.get_rank(), environment.is_rank_zero()) == (rank, rank == 0)
    create(1 - rank, 2, f"{tmp_path}/store")
    said = rf"the default group \(gloo\) has it as rank {1 - rank} of 2.*destroy_process_group\(\)"
    with pytest.raises(DistributedEnvironmentError, match=said):
        environment.init_distributed(init_timeout=60)
    assert dist.is_initialized()
    assert (environment.get_rank(), environment.is_rank_zero()) == (1 - rank, rank == 1)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("tasks", [1, 2])
def test_tasks_of_slurm_may_each_start_several_ranks(
    tasks: int, rank: int, tmp_path: object
) -> None:
    """One task a node, as ``mp.spawn`` in each: the group is larger than the step."""
    create(rank, 3, f"{tmp_path}/store")
    task = {"SLURM_STEP_NUM_TASKS": f"{tasks}", "SLURM_PROCID": f"{rank % tasks}"}
    with variables({**SLURM, **task}):
        context = reloadpg.environment.init_distributed()
        assert (context.rank, context.world_size, context.owned) == (rank, 3, False)
        assert (context.environment.source, context.local_rank) == ("process_group", None)
        assert not reloadpg.environment.ensure_process_group()


def fork_and_call(rank: int, world_size: int, installed: bool) -> None:
    """The parent has a group of one; a forked child is started as one of two ranks."""
    with variables(dict.fromkeys(SLURM)):
        if installed:
            reloadpg.install(backends={"gloo"}, min_size=1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ |= {"RANK": str(number), "WORLD_SIZE": "2"}
                os.environ |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": "2"}
                for call in CALLS.values():
                    with pytest.raises(reloadpg.ReloadpgError) as caught:
                        call()
                    print(f"child {number}: {caught.value}", flush=True)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.destroy_process_group()


@pytest.mark.matrix
@pytest.mark.parametrize("installed", [False, True])
def test_a_forked_child_does_not_adopt_the_group_of_its_parent(installed: bool) -> None:
    """Torch's own init_process_group raises there, too (failure 44)."""
    [outcome] = run_ranks(fork_and_call, 1, args=(installed,), check=False, timeout=150)
    assert outcome.ok, (outcome.exception, outcome.output)
    for number in range(2):
        said = f"started this process as rank {number} of 2, but the default group (gloo)"
        assert outcome.output.count(said) == 2
