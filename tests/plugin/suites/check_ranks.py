"""Tests of somebody else's project, run by ``test_plugin.py``: on ranks, as the mark says."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Size:
    value: int


def summed() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.ranks(2, backend="gloo", timeout=30)
def test_the_body_runs_on_ranks(rank, world_size, tmp_path):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert summed() == 2
    (tmp_path / f"{rank}.txt").write_text(str(os.getpid()))
    dist.barrier()
    pids = {int(file.read_text()) for file in tmp_path.iterdir()}
    assert len(pids) == 2
    assert os.getppid() not in pids


@pytest.mark.ranks(3, env={"COLOUR": "blue"})
@pytest.mark.parametrize("size", [Size(4)])
def test_values_are_sent(size, rank, tmp_path):
    assert size == Size(4)
    assert os.environ["COLOUR"] == "blue"
    assert not dist.is_initialized()
    (tmp_path / f"of-{rank}").touch()


class TestOfAClass:
    word = "class"

    @pytest.mark.ranks(2, backend="gloo")
    def test_a_method(self, rank):
        assert self.word == "class"
        assert summed() == 2


def initialized_late(*args, **kwargs):
    """Give the other rank the time to begin too early."""
    initialized(*args, **kwargs)
    try:
        store().wait(["begun"], timedelta(seconds=0.5))
    except RuntimeError:
        return
    raise AssertionError("the other rank began before this one was connected")


def store():
    return dist.distributed_c10d._get_default_store()


if os.environ.get("LATE_RANK", "none") == os.environ.get("RANK"):
    initialized, dist.init_process_group = dist.init_process_group, initialized_late


@pytest.mark.ranks(2, backend="gloo", env={"LATE_RANK": "1"})
def test_begins_where_all_are_connected():
    store().set("begun", "1")


@pytest.mark.ranks(2, backend="gloo", store="rank0")
def test_has_no_collective():
    pass


@pytest.mark.ranks(2, backend="gloo")
def test_skips_without_a_collective():
    pytest.skip("no such machine")


@pytest.mark.ranks(2, backend="gloo")
def test_fails_on_one_rank(rank):
    print(f"words of rank {rank}")
    numbers = [1, 2, 3]
    if rank == 1:
        assert numbers[rank] == 7


@pytest.mark.ranks(2, timeout=4)
def test_hangs_on_one_rank(rank):
    if rank == 0:
        dist.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"])


@pytest.mark.ranks(2)
def test_dies_on_one_rank(rank):
    if rank == 1:
        os._exit(7)


@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("no such machine")


@pytest.mark.ranks(2)
def test_skips_on_one_rank(rank):
    if rank == 0:
        pytest.skip("only here")


@pytest.mark.ranks(2)
def test_expected_to_fail():
    pytest.xfail("known")


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, reason="a failure on ranks is a failure")
def test_marked_as_expected_to_fail():
    raise RuntimeError


@pytest.fixture
def lock():
    return threading.Lock()


@pytest.mark.ranks(2)
def test_argument_that_cannot_be_sent(lock):
    raise RuntimeError("never run")


@pytest.mark.ranks(0)
def test_mark_without_sense():
    raise RuntimeError("never run")


@pytest.mark.ranks(2)
async def test_async():
    raise RuntimeError("never run")


def test_rank_fixture_without_the_mark(rank):
    raise RuntimeError("never run")


@pytest.mark.reload_each_phase
def test_reloads_without_ranks():
    raise RuntimeError("never run")


def where(rank: int, world_size: int) -> str:
    import tempfile

    return tempfile.gettempdir()


def test_run_ranks_is_bound_to_the_test(run_ranks, tmp_path):
    assert run_ranks(where, 2) == [str(tmp_path)] * 2


def test_run_ranks_has_a_limit(run_ranks):
    run_ranks(forever, 1, timeout=2)


def forever(rank: int, world_size: int) -> None:
    dist.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"])


def test_unmarked_runs_here():
    assert Path(sys.argv[0]).name == "__main__.py"
