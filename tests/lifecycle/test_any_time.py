"""Events at any moment: a signal, an interrupt, a look at the status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from worlds import start, summed

import reloadpg
from reloadpg.testing import run_ranks, simulated


def _status_from_a_signal_handler(rank, world_size, world):
    start(world)
    simulated.register()
    pair = dist.new_group([0, 1])
    seen = []

    def look(*_):
        seen.append(str(reloadpg.status()))
        # Armed again at its end: a look that takes longer than the interval would leave no time.
        signal.setitimer(signal.ITIMER_REAL, 0.005 if arming else 0)

    arming = True
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    for _ in range(6):
        reloadpg.offload()
        reloadpg.reload()
        for _ in range(100):
            reloadpg.status()
            simulated.stats()
    arming = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    return len(seen), summed(pair, rank)


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_status_can_be_asked_from_a_signal_handler(world):
    """Whatever it interrupts, a status or an operation: no lock is waited for by its own holder."""
    for count, total in run_ranks(_status_from_a_signal_handler, 2, args=(world,), timeout=280):
        assert count > 20
        assert total == 3.0


def _running(rank, world_size, world, directory):
    start(world)
    dist.new_group([0, 1])
    before, inside, waiting, late = reloadpg.status().running, [], [], Path(directory, "late")

    def look():
        while not waiting:
            status = reloadpg.status()
            if status.running is not None and status.running.waiting:
                waiting.append((status.running, str(status).splitlines()[0]))
                late.touch()

    def callback():
        inside.append(reloadpg.status().running)

    reloadpg.on_offload(callback, name="ours")
    reloadpg.on_reload(callback, name="theirs")
    if rank == 0:
        looker = threading.Thread(target=look)
        looker.start()
    while not late.exists():  # rank 1 calls when rank 0 was seen to wait for it
        if rank == 0:
            break
        time.sleep(0.01)
    reloadpg.offload()
    reloadpg.reload()
    if rank == 0:
        looker.join()
    return before, inside, waiting, reloadpg.status().running


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_a_running_operation_says_where_it_is(world, tmp_path):
    """To other threads and to callbacks: its barrier, who waits, its groups; then it is over."""
    first, second = run_ranks(_running, 2, args=(world, str(tmp_path)), timeout=120)
    for before, (at_offload, at_reload), _, after in (first, second):
        assert before is after is None
        assert (at_offload.operation, at_offload.phase) == ("offload", "quiesced")
        assert (at_offload.waiting, at_offload.doing) == (False, "callback ours")
        assert (at_offload.sequence, at_offload.groups) == (1, 0)
        assert (at_reload.operation, at_reload.phase) == ("reload", "done")
        assert (at_reload.sequence, at_reload.doing) == (2, "callback theirs")
        assert (at_reload.groups_done, at_reload.groups) == (2, 2)
        assert at_offload.started_at <= at_offload.since < at_reload.started_at
    ((waiting, line),) = first[2]
    assert (waiting.operation, waiting.phase, waiting.doing) == ("offload", "enter", "")
    assert waiting.since >= waiting.started_at
    assert line.startswith("offload is running, before barrier 'enter': waiting for other ranks")


def _interrupted_at_each_call(rank, world_size):
    """An interrupt at every point of the library's own code, with its traceback held."""
    start("unbound")
    held = []
    for count in range(0, 400, 7):
        left = [count]

        def trace(frame, event, argument, left=left):
            if threading.current_thread() is not threading.main_thread():
                return None
            if "/reloadpg/" in frame.f_code.co_filename:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            return None

        sys.settrace(trace)
        try:
            with reloadpg.offloaded():
                pass
        except BaseException as error:
            sys.settrace(None)
            held.append(error)  # and with it its frames, and theirs
        finally:
            sys.settrace(None)
        reloadpg.reload()  # never "offload is running in this process"
    return len(held), reloadpg.status().state, summed(None, rank)


def test_an_interrupt_leaves_no_operation_running():
    """However long its traceback is held: contextlib's managers ended only with it."""
    ((held, state, total),) = run_ranks(_interrupted_at_each_call, 1, timeout=280)
    assert held > 20
    assert (state, total) == ("live", 1.0)


def _interrupted_in_a_commit(rank, world_size):
    """An interrupt before each line of the commit of each operation, until none is reached."""
    start("unbound", min_size=1)
    seen = []
    for name in ("offload", "reload", "recover"):
        line = 0
        while True:
            line, left = line + 1, [line + 1]

            def trace(frame, event, argument, left=left):
                commits = frame.f_code.co_name == "complete" and "operation" in str(frame.f_code)
                if event == "line" and commits:
                    left[0] -= 1
                    if left[0] == 0:
                        raise KeyboardInterrupt
                return trace if commits else None

            if name == "reload":
                reloadpg.offload()
            before = reloadpg.status()
            sys.settrace(trace)
            with contextlib.suppress(KeyboardInterrupt):
                getattr(reloadpg, name)()
            sys.settrace(None)
            after = reloadpg.status()
            went_on = (after.cycles - before.cycles, after.generation - before.generation)
            seen.append((name, after.state, went_on))
            reloadpg.reload()
            if left[0] > 0:  # there are no more lines
                break
    return seen, summed(None, rank)


def test_an_interrupted_commit_is_done_whole():
    """All ranks have completed the operation: so has this one, whatever line was interrupted."""
    ((seen, total),) = run_ranks(_interrupted_in_a_commit, 1, timeout=280)
    assert len(seen) > 20
    assert set(seen) == {
        ("offload", "offloaded", (1, 0)),
        ("reload", "live", (0, 1)),
        ("recover", "live", (0, 1)),
    }
    assert total == 1.0


def _shut_down_on_one_rank(rank, world_size, world):
    start(world)
    pair = dist.new_group([0, 1], group_desc="the pair")
    summed(pair, rank)
    if rank == 1:
        pair.shutdown()
    try:
        reloadpg.offload()
        return ""
    except reloadpg.DisagreementError as error:
        return str(error)


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_a_group_that_one_rank_has_shut_down_is_noticed(world):
    """Before anything is touched; its other members would wait for it at their next collective."""
    for text in run_ranks(_shut_down_on_one_rank, 2, args=(world,)):
        assert "shut down" in text
        assert "on rank 0 and" in text


def _user_keys(rank, world_size, world):
    start(world)
    pair = dist.new_group([0, 1])
    stores = [group.get_group_store() for group in (dist.group.WORLD, pair)]
    for store in stores:
        store.set(f"mine/{rank}", "kept")
    for _ in range(2):
        reloadpg.offload()
        reloadpg.reload()
    summed(None, rank)
    return [g.get_group_store().get(f"mine/{1 - rank}") for g in (dist.group.WORLD, pair)]


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_a_users_keys_in_a_groups_store_are_kept(world):
    """The group keeps its store: only its communicator's own keys change names."""
    for values in run_ranks(_user_keys, 2, args=(world,)):
        assert values == [b"kept", b"kept"]


RANK = """
import os, sys, time, signal
from datetime import timedelta
import torch.distributed as dist
import reloadpg
rank = int(os.environ["RANK"])
reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=60))
dist.init_process_group("gloo")
reloadpg.offload()
print("offloaded", flush=True)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    reloadpg.reload()
except reloadpg.ReloadpgError as error:
    print("raised", type(error).__name__, error, flush=True)
    os._exit(1)  # at once: with rank 0 ends the store
"""


@pytest.mark.slow
def test_the_rank_that_hosts_the_store_leaves_last(tmp_path, free_port):
    """Plain processes, the store in rank 0's: rank 1 learns of rank 2's death too."""
    import subprocess

    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text in said[:2]:
        assert "raised PeerFailedError" in text
        assert "rank 2 died" in text
