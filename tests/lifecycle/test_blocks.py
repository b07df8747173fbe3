"""``offloaded()`` and ``colocated()`` reload what they have offloaded, also after an error."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import BOUND, base_store
from helpers.jobs import TIMEOUT, start
from helpers.tables import meet_at_rank_0, store_closed_by_rank_0, summed

import reloadpg
from reloadpg.c10d import devices
from reloadpg.integrations import ColocationError, colocated

pytestmark = pytest.mark.matrix

BLOCKS = {"offloaded": reloadpg.offloaded, "colocated": colocated}


def _state():
    return reloadpg.status().state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("raising", [False, True])
def test_the_outermost_block_reloads(raising):
    """A library's block inside the caller's leaves the groups offloaded (failure 23)."""
    start()
    called = []
    reloadpg.on_offload(lambda: called.append(1))
    try:
        with reloadpg.offloaded():
            with reloadpg.offloaded() as inner:
                assert (inner.changed, _state()) == (False, "offloaded")
                if raising:
                    raise KeyError("in the inner block")
            assert _state() == "offloaded"
    except KeyError:
        assert raising
    assert _state() == "live"
    with reloadpg.offloaded():  # an outermost block again, also after a call of offload()
        pass
    reloadpg.offload()
    with reloadpg.offloaded():
        pass
    assert (_state(), reloadpg.status().generation, len(called)) == ("live", 3, 3)


@pytest.mark.ranks(2, env=worlds.SILENCE)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("end", ["default", "timeout", "exception"])
def test_the_end_of_a_block_waits_for_ranks_that_are_still_in_it(rank, name, end):
    """Rollouts differ in length: longer than an operation that all ranks begin together. A rank
    whose body has raised does not wait that long.
    """
    start(timeout=60 if end == "timeout" else BOUND)
    store = base_store().clone()
    timeout = (BOUND, 60)[rank] if end == "timeout" else None
    raised = ended = None
    try:
        with BLOCKS[name](timeout=timeout):
            if rank == 1:
                store.wait(["waited"])
            else:
                ended = _after_a_wait(lambda: store.set("waited", ""))
            if rank == 0 and end == "exception":
                raise KeyError("in the rollout")
    except (KeyError, reloadpg.RendezvousTimeoutError) as error:
        raised = error
    except ColocationError as error:
        [(_, raised)] = error.failures
    if ended is not None:
        ended()
    if rank == 1 or end == "default":  # rank 1 completes rank 0's next call
        assert (raised, _state()) == (None, "live")
        return
    assert _state() == "offloaded"
    if end == "exception":
        assert isinstance(raised, KeyError)
    else:
        assert isinstance(raised, reloadpg.RendezvousTimeoutError)
        assert f"rank 0 waited {BOUND:g} s" in str(raised)
        assert "offloaded(timeout=...)" in str(raised)
    reloadpg.reload()
    assert _state() == "live"


def _after_a_wait(act):
    """Call a function when this rank's reload has waited for longer than BOUND, or has ended;
    returns what ends it.
    """
    ended = threading.Event()

    def watch():
        begun = None
        while not ended.wait(0.1) and (begun is None or time.monotonic() < begun + BOUND + 2):
            running = reloadpg.status().running
            if begun is None and running is not None and running.waiting:
                begun = time.monotonic()
        act()

    thread = threading.Thread(target=watch)
    thread.start()

    def end():
        ended.set()
        thread.join()

    return end


def test_the_timeout_of_a_block_is_checked():
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="timeout"):
        reloadpg.offloaded(timeout=0)


def _listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.ranks(2, store="rank0")
def test_a_block_reloads_what_it_has_offloaded(rank, tmp_path):
    """After the end of the job inside a block, the next block is an outermost one."""
    start()
    with reloadpg.offloaded():
        meet_at_rank_0(rank, "offloaded")
        dist.destroy_process_group()
        if rank == 0:  # a store that still listens would have the keys of this job
            assert not _listens(int(os.environ["MASTER_PORT"]))
        store_closed_by_rank_0(rank, tmp_path / "closed")
        worlds.init(timeout=TIMEOUT)
        with reloadpg.offloaded():
            assert _state() == "offloaded"
        assert summed(None, rank) == 3
    with reloadpg.offloaded():
        pass
    assert summed(None, rank) == 3


@pytest.mark.ranks(2)
def test_blocks_of_both_kinds_nest(rank):
    """The groups stay offloaded until the outer block ends."""
    start()
    for outer in BLOCKS.values():
        for inner in BLOCKS.values():
            with outer():
                with inner():
                    pass
                assert _state() == "offloaded"
            assert _state() == "live"
    assert summed(None, rank) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recoverable", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_an_interrupt_at_the_end_of_the_offload_still_reloads(rank, kind, recoverable):
    """All ranks have offloaded and the others are in their blocks, so this rank reloads as well.

    With the same ``connect`` as the others, which a recoverable job determines by default.
    """
    start(recoverable=recoverable)
    reports = []

    def interrupt(report):
        reports.append(report.operation)
        if rank == 1 and len(reports) == 1:
            raise KeyboardInterrupt

    reloadpg.on_report(interrupt)
    interrupted = False
    try:
        with BLOCKS[kind]():
            pass
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted == (rank == 1)
    assert reports == ["offload", "reload"]
    assert (_state(), summed(None, rank)) == ("live", 3)


def _raising(error):
    def empty_cache():
        raise error

    return empty_cache


@pytest.mark.ranks(2)
def test_a_block_that_was_interrupted_in_its_reload_has_ended(rank):
    """The next block is an outermost one, and reloads what the interrupted one left offloaded."""
    start()
    keep = devices.empty_cache
    # A rank can hear of the other one's interrupt before its own.
    with pytest.raises((KeyboardInterrupt, ColocationError)), colocated():
        devices.empty_cache = _raising(KeyboardInterrupt())
    devices.empty_cache = keep
    with reloadpg.offloaded():
        assert _state() == "offloaded"
    assert (_state(), summed(None, rank)) == ("live", 3)


@pytest.mark.ranks(2)
def test_the_exception_of_the_body_is_raised_even_if_the_reload_fails(rank):
    """An accelerator that fails in the body also fails in the reload, with an error of torch."""
    start()
    keep = devices.empty_cache
    with pytest.raises(ValueError, match="of the body"), reloadpg.offloaded():
        if rank == 0:
            devices.empty_cache = _raising(RuntimeError("an accelerator's own error"))
        raise ValueError("of the body")
    devices.empty_cache = keep
    assert _state() in ("failed", "offloaded")
    reloadpg.reload()
    assert summed(None, rank) == 3


@pytest.mark.ranks(2)
def test_the_last_of_several_tasks_reloads(rank):
    """Blocks of a set are counted, whoever opened them, and in whichever order they end."""
    start()
    seen = []

    async def work(entered, may_leave):
        with reloadpg.offloaded("trainer"):
            entered.set()
            await may_leave.wait()
        seen.append(_state())

    async def both():
        events = [asyncio.Event() for _ in range(4)]
        first = asyncio.create_task(work(*events[:2]))
        await events[0].wait()
        second = asyncio.create_task(work(*events[2:]))
        await events[2].wait()
        events[1].set()
        await first
        events[3].set()
        await second

    asyncio.run(both())
    assert seen == ["offloaded", "live"]
    assert summed(None, rank) == 3


@pytest.mark.ranks(2)
def test_blocks_of_two_threads_are_counted(rank):
    """The thread that leaves first leaves the groups offloaded for the other."""
    start()
    outer = reloadpg.offloaded()
    outer.__enter__()
    done = threading.Thread(target=_enter_and_leave, args=(inner := reloadpg.offloaded(),))
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert _state() == "offloaded"
    done.start()
    done.join()
    assert (_state(), summed(None, rank)) == ("live", 3)


def _enter_and_leave(block):
    with reloadpg.offloaded():
        pass
    block.__exit__(None, None, None)


@pytest.mark.ranks(2)
def test_a_decorated_function_runs_in_the_block(rank):
    """Each call is a separate block, also if it calls itself."""
    start()

    @reloadpg.offloaded()
    def generate(depth):
        """Of the function."""
        within = [_state()]
        return within + (generate(depth - 1) if depth else [])

    assert generate.__doc__ == "Of the function."
    for _ in range(2):
        assert generate(2) == ["offloaded"] * 3
        assert _state() == "live"
    assert summed(None, rank) == 3


@pytest.mark.ranks(2)
def test_a_region_decorates_a_function():
    """The groups that its body creates are in the set."""
    start(sets="engine")
    create = reloadpg.region("engine")(lambda: dist.new_group([0, 1]))
    assert create()._managed.set_name == "engine"
