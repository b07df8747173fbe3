"""Tests of another project, run by ``test_plugin.py``: on ranks, and with leaks."""

from __future__ import annotations

import os
import threading
import unittest
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import reloadpg
from reloadpg.testing import simulated


@dataclass(frozen=True)
class Size:
    value: int


def summed(group=None):
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def wait_indefinitely():
    dist.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"])


# ---------------------------------------------------------------------------------------------
# the mark ranks


class TestOfAClass:
    word = "class"

    @pytest.mark.ranks(3, backend="gloo", timeout=60, env={"COLOUR": "blue"})
    @pytest.mark.parametrize("size", [Size(4)])
    def test_body_runs_on_ranks(self, size, rank, world_size, tmp_path):
        assert (self.word, size, os.environ["COLOUR"]) == ("class", Size(4), "blue")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        assert summed() == 3
        (tmp_path / f"{rank}.txt").write_text(str(os.getpid()))
        dist.barrier()
        pids = {int(file.read_text()) for file in tmp_path.iterdir()}
        assert len(pids) == 3
        assert os.getppid() not in pids


def initialized_late(*args, **kwargs):
    """Give the other rank time to begin too early."""
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
def test_skips_without_a_collective():
    pytest.skip("no such machine")


@pytest.mark.ranks(2, backend="gloo", preload=["helpers.supervising"])  # rank 0 has time to end
def test_fails_on_one_rank(rank):
    print(f"words of rank {rank}")
    numbers = [1, 2, 3]
    if rank == 1:
        assert numbers[rank] == 7


@pytest.mark.ranks(2, timeout=60, preload=["helpers.supervising"])
def test_hangs_on_one_rank(rank):
    if rank == 0:
        from helpers import supervising

        supervising.await_return()
        supervising.advance(60)
        wait_indefinitely()


@pytest.mark.ranks(2)
def test_skips_on_one_rank(rank):
    if rank == 0:
        pytest.skip("only here")


@pytest.mark.ranks(1)
def test_expected_to_fail():
    pytest.xfail("known")


@pytest.mark.ranks(1)
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
def test_invalid_mark():
    raise RuntimeError("never run")


@pytest.mark.ranks(2)
async def test_async():
    raise RuntimeError("never run")


class Case(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_unittest(self):
        raise RuntimeError("never run")


def test_rank_fixture_without_the_mark(rank):
    raise RuntimeError("never run")


def test_world_size_fixture_without_the_mark(world_size):
    raise RuntimeError("never run")


# ---------------------------------------------------------------------------------------------
# what tests leave behind


def initialized_alone(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def ended():
    """For tests that leave what the plugin must find: the next test must start clean."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_no_leak(assert_no_group_leaks):
    initialized_alone("gloo")
    dist.destroy_process_group(dist.new_group([0]))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["plain", "reloadable", "offloaded"])
def test_leak_around_the_test(kind, assert_no_group_leaks):
    if kind != "plain" and not reloadpg.is_installed():
        reloadpg.install(backends={"gloo"}, min_size=1)
    initialized_alone("gloo")
    dist.new_group([0], group_desc=f"of {kind}")
    if kind == "offloaded":
        reloadpg.offload()


def test_after_leaks(assert_no_group_leaks):
    initialized_alone("gloo")
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_leaks_on_ranks(assert_no_group_leaks):
    simulated.register()
    reloadpg.install(backends={"sim"})
    dist.init_process_group("sim")
    summed()


@pytest.mark.ranks(2, backend="gloo")
def test_no_leak_on_ranks(assert_no_group_leaks):
    reloadpg.install(backends={"gloo"})
    group = dist.new_group([0, 1])
    summed(group)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2, backend="gloo")
def test_leak_with_a_default_group(assert_no_group_leaks):
    dist.new_group([0, 1])


@pytest.mark.ranks(1)
def test_body_failure_with_a_leak(assert_no_group_leaks):
    simulated.register()
    dist.init_process_group("sim")
    summed()
    raise LookupError("of the body")
