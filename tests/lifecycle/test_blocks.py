"""``offloaded()`` and ``colocated()`` reload what they have offloaded, whatever ends them."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
import worlds
from tables import meet_at_rank_0, store_closed_by_rank_0, summed

import reloadpg
from reloadpg.c10d import devices
from reloadpg.integrations import colocated
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix

TIMEOUT = timedelta(seconds=30)


def _install(**options):
    return reloadpg.install(**{"backends": {worlds.BACKEND}, "timeout": TIMEOUT, **options})


def _nested(rank, world_size, raising):
    _install()
    worlds.init(timeout=TIMEOUT)
    called = []
    reloadpg.on_offload(lambda: called.append(reloadpg.status().cycles))
    states = []
    try:
        with reloadpg.offloaded():
            with reloadpg.offloaded() as inner:
                states.append((inner.changed, reloadpg.status().state))
                if raising:
                    raise KeyError("in the inner block")
            states.append(reloadpg.status().state)
    except KeyError:
        states.append("raised")
    states.append(reloadpg.status().state)
    with reloadpg.offloaded():  # a block of its own again, also after an offload by hand
        pass
    reloadpg.offload()
    with reloadpg.offloaded():
        pass
    return states, reloadpg.status().state, reloadpg.status().cycles, len(called)


@pytest.mark.parametrize("raising", [False, True])
def test_the_outermost_block_reloads(raising):
    """A library's block inside the caller's leaves the groups offloaded (failure 23)."""
    middle = "raised" if raising else "offloaded"
    for facts in run_ranks(_nested, 2, args=(raising,)):
        assert facts == ([(False, "offloaded"), middle, "live"], "live", 3, 3)


def _listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _blocks_and_jobs(rank, world_size, case, folder):
    _install()
    worlds.init(timeout=TIMEOUT)
    with reloadpg.offloaded():
        if case == "reloaded inside":
            reloadpg.reload()
        else:
            meet_at_rank_0(rank, "offloaded")
            dist.destroy_process_group()
            if rank == 0:  # its store, or the next job would find the keys of this one
                assert not _listens(int(os.environ["MASTER_PORT"]))
            store_closed_by_rank_0(rank, folder / "closed")
            worlds.init(timeout=TIMEOUT)
        with reloadpg.offloaded():
            state = reloadpg.status().state
        within = summed(None, rank)
    with reloadpg.offloaded():
        pass
    return state, within, summed(None, rank)


@pytest.mark.parametrize("case", ["reloaded inside", "another job"])
def test_a_block_reloads_what_it_has_offloaded(case, tmp_path):
    """In a block whose groups were reloaded, or whose job has ended, the next one is outermost."""
    for facts in run_ranks(_blocks_and_jobs, 2, args=(case, tmp_path), store="rank0"):
        assert facts == ("offloaded", 3, 3)


def _in_each_other(rank, world_size):
    """The state in the outer block after the inner one, and after the outer one."""
    _install()
    worlds.init(timeout=TIMEOUT)
    kinds = {"offloaded": reloadpg.offloaded, "colocated": lambda: colocated()}
    seen = {}
    for outer, begin in kinds.items():
        for inner, begin_inner in kinds.items():
            with begin():
                with begin_inner():
                    pass
                within = reloadpg.status().state
            seen[outer, inner] = within, reloadpg.status().state
    return seen, summed(None, rank)


def test_blocks_of_both_kinds_nest():
    """A rollout within a block, or a block within a rollout, brings no group back too early."""
    for seen, total in run_ranks(_in_each_other, 2):
        assert set(seen.values()) == {("offloaded", "live")}
        assert len(seen) == 4
        assert total == 3


def _interrupted_at_its_end(rank, world_size, kind):
    _install()
    worlds.init(timeout=TIMEOUT)
    reports = []

    def interrupt(report):
        reports.append(report.operation)
        if rank == 1 and len(reports) == 1:
            raise KeyboardInterrupt

    reloadpg.on_report(interrupt)
    ended = ""
    try:
        with reloadpg.offloaded() if kind == "offloaded" else colocated():
            pass
    except KeyboardInterrupt:
        ended = "interrupted"
    return ended, reports, reloadpg.status().state, summed(None, rank)


@pytest.mark.parametrize("kind", ["offloaded", "colocated"])
def test_an_interrupt_at_the_very_end_of_the_offload(kind):
    """All ranks have offloaded and the others are in their blocks: this rank reloads with them."""
    results = run_ranks(_interrupted_at_its_end, 2, args=(kind,))
    both = (["offload", "reload"], "live", 3)
    assert results == [("", *both), ("interrupted", *both)]


def _interrupted_on_the_way_back(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    keep = devices.empty_cache

    def interrupt():
        raise KeyboardInterrupt

    ended = ""
    try:
        with colocated():
            devices.empty_cache = interrupt
    except KeyboardInterrupt:
        ended = "interrupted"
    devices.empty_cache = keep
    with reloadpg.offloaded():  # it finds the groups as the interrupt has left them
        left = reloadpg.status().state
    return ended, left, reloadpg.status().state, summed(None, rank)


def test_a_rollout_that_was_interrupted_on_its_way_back_is_over():
    """The next block is an outermost one, and brings back what the rollout left offloaded."""
    results = run_ranks(_interrupted_on_the_way_back, 2)
    assert results == [("interrupted", "offloaded", "live", 3)] * 2


def _reload_fails_too(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)

    def broken():
        raise RuntimeError("an accelerator's own error")

    keep = devices.empty_cache
    try:
        with reloadpg.offloaded():
            if rank == 0:
                devices.empty_cache = broken
            raise ValueError("of the body")
    except Exception as error:
        kind = type(error).__name__
    devices.empty_cache = keep
    failed = reloadpg.status().state
    reloadpg.reload()
    return kind, failed, summed(None, rank)


def test_the_bodys_exception_is_seen_whatever_the_reload_raises():
    """An accelerator that fails in the body fails in the reload again, with torch's own error."""
    for kind, failed, total in run_ranks(_reload_fails_too, 2):
        assert (kind, total) == ("ValueError", 3)
        assert failed in ("failed", "offloaded")
