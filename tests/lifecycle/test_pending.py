"""An offload or reload that goes on beside its caller: its handle, and what is refused then."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from worlds import summed

import reloadpg
from reloadpg.testing import run_ranks, simulated

HANG_S = 120.0


def _start(bound: float = HANG_S, groups: int = 3, **options: Any) -> list[Any]:
    simulated.register()
    simulated.configure(bytes_per_communicator=1 << 16)
    reloadpg.install(timeout=timedelta(seconds=bound), **options)
    worlds.init("sim")
    made = [dist.new_group(range(dist.get_world_size()), group_desc=f"g{k}") for k in range(groups)]
    return [dist.group.WORLD, *made]


def _raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _stalled(at: str, group: Any) -> Any:
    """A step of one group that waits until it is told to go on."""
    name = f"{group.group_name}@*" if at == "create" else group.group_desc
    return simulated.inject(simulated.Fault(at, "stall", group=name, seconds=HANG_S))  # type: ignore[arg-type]


def _cycle(rank: int, world_size: int) -> dict[str, Any]:
    """Offload and reload, each held at its last group while its caller does other things."""
    groups = _start(parallelism=1)
    first, last = groups[1], groups[-1]
    for group in groups:
        summed(group, rank)
    facts: dict[str, Any] = {}
    threads: list[threading.Thread] = []
    used: list[float] = []
    reloadpg.on_offload(lambda: used.append(summed(first, rank)))
    reloadpg.on_reload(lambda: used.append(summed(last, rank)))
    reloadpg.on_report(lambda report: threads.append(threading.current_thread()))
    # Groups are released in reverse order: the first but WORLD, which goes alone, is the last one.
    for operation, at, held in (("offload", "release", first), ("reload", "create", last)):
        fault = _stalled(at, held)
        pending = getattr(reloadpg, operation)(wait=False)
        assert fault.wait_fired(HANG_S)
        facts[operation] = {
            "done": pending.done(),
            "shown": repr(pending),
            "refused": [_raised(lambda g=g: summed(g, rank)) for g in groups],  # type: ignore[misc]
            "others": [_raised(call) for call in (reloadpg.offload, reloadpg.reload)],
            "early": _raised(lambda: pending.result(timeout=0)),  # noqa: B023
            "queries": [dist.get_rank(first), dist.get_world_size(first)],
            "live": [group.is_live for group in groups],
        }
        fault.clear()
        report = pending.result()
        facts[operation]["report"] = (report.operation, report.changed, len(report.groups))
        facts[operation]["again"] = pending.result(timeout=timedelta(0)) is report
        facts[operation]["ended"] = pending.done(), repr(pending)
        facts[operation]["after"] = _raised(lambda: summed(last, rank))
    facts["callbacks"] = used
    facts["thread"] = threading.main_thread() in threads
    facts["sums"] = [summed(group, rank) for group in groups]
    facts["generation"] = reloadpg.status().generation
    return facts


@pytest.mark.matrix
def test_an_operation_that_is_held_in_the_middle() -> None:
    """Its caller continues: the handle says so, queries answer, and other operations raise.

    Groups refuse collectives until it has ended, those too that are not released yet, or are built
    already. Callbacks run in its thread and use the groups. The result is the report, as often as
    it is asked for.
    """
    for rank, facts in enumerate(run_ranks(_cycle, 2, timeout=240)):
        for operation in ("offload", "reload"):
            seen = facts[operation]
            assert (seen["done"], seen["shown"]) == (False, f"<Pending {operation}, running>")
            assert seen["queries"] == [rank, 2]
            assert "(wait=False) is still running" in seen["early"]
            assert {*seen["live"]} == {True, False}
            for text in seen["refused"]:
                assert text.startswith("GroupOffloadedError: allreduce on ")
                assert f"{operation} is running" in text
                assert "Call result()" in text
            for called, text in zip(("offload", "reload"), seen["others"], strict=True):
                assert f"{called} was called while {operation} is running" in text
            assert seen["report"] == (operation, True, 4)
            assert seen["again"]
            assert seen["ended"] == (True, f"<Pending {operation}, ended>")
        assert "reloadpg.reload()" in facts["offload"]["after"]
        assert facts["reload"]["after"] == ""
        assert facts["sums"] == [3.0] * 4
        assert facts["generation"] == 1
        assert facts["callbacks"] == [3.0, 3.0]
        assert not facts["thread"]


def _failure(rank: int, world_size: int, operation: str) -> tuple[Any, ...]:
    groups = _start()
    at = "release"
    if operation == "reload":
        reloadpg.offload()
        at = "create"
    name = f"{groups[2].group_name}@*" if at == "create" else groups[2].group_desc
    with simulated.inject(simulated.Fault(at, group=name, rank=1)):  # type: ignore[arg-type]
        pending = getattr(reloadpg, operation)(wait=False)
        first, second = _raised(pending.result), _raised(pending.result)
    states = {str(group.state) for group in groups}
    used = _raised(lambda: summed(groups[1], rank))
    reloadpg.reload(wait=rank == 0)  # how a rank waits is its own business
    _join()
    return first, second, states, used, [summed(group, rank) for group in groups]


def _join() -> None:
    """Wait until all operations of this process have ended, whoever has their handles."""
    for thread in threading.enumerate():
        if thread.name.startswith("reloadpg-") and not thread.daemon:
            thread.join(HANG_S)


@pytest.mark.filterwarnings("ignore:the handle of reload")
@pytest.mark.parametrize("operation", ["offload", "reload"])
def test_errors_come_out_of_result(operation: str) -> None:
    """On all ranks alike, as often as it is asked for; the groups are as the error says."""
    for rank, facts in enumerate(run_ranks(_failure, 2, args=(operation,))):
        own = "ReleaseError" if operation == "offload" else "RebuildError"
        first, second, states, used, sums = facts
        assert first == second
        assert first.startswith(own if rank == 1 else "PeerFailedError")
        assert "(g1)" in first
        assert states == {"failed"}
        assert "did not finish" in used
        assert sums == [3.0] * 4


def _untouched(rank: int, world_size: int) -> tuple[str, str, list[float]]:
    groups = _start()
    collect = reloadpg.on_offload(lambda: 1 / 0) if rank == 1 else lambda: None
    failed = _raised(reloadpg.offload(wait=False).result)
    collect()
    live = [summed(group, rank) for group in groups]
    reloadpg.offload(wait=False).result()
    connect: Any = ("eager", "none")[rank]
    return failed, _raised(reloadpg.reload(connect=connect, wait=False).result), live


def test_what_changed_nothing_gives_the_groups_back() -> None:
    """An error before anything is touched, and a disagreement."""
    for rank, (failed, disagreed, live) in enumerate(run_ranks(_untouched, 2)):
        assert failed.startswith(("PeerFailedError", "ReloadpgError")[rank])
        assert disagreed.startswith("DisagreementError: ")
        assert live == [3.0] * 4


def _beside(rank: int, world_size: int) -> tuple[list[float], bool, str, bool, int]:
    """A new group, and the end of the job, while a reload is held at its last group."""
    groups = _start(parallelism=1)
    last = groups[-1]
    reloadpg.offload()
    fault = _stalled("create", last)
    pending = reloadpg.reload(wait=False)
    assert fault.wait_fired(HANG_S)
    new = dist.new_group([0, 1])
    sums = [summed(new, rank)]
    fault.clear()
    pending.result()
    sums += [summed(group, rank) for group in (*groups, new)]
    reloadpg.offload()
    fault = _stalled("create", last)
    pending = reloadpg.reload(wait=False)
    assert fault.wait_fired(HANG_S)
    destroys = threading.Thread(target=dist.destroy_process_group)
    destroys.start()
    destroys.join(0.5)
    waits = destroys.is_alive()
    fault.clear()
    destroys.join(HANG_S)
    return sums, waits, _raised(pending.result), dist.is_initialized(), simulated.stats().live


@pytest.mark.matrix
def test_groups_can_be_created_and_destroyed_meanwhile() -> None:
    """A new group is none of the operation's; the end of the job waits for the operation."""
    for seen in run_ranks(_beside, 2):
        assert seen == ([3.0] * 6, True, "", False, 0)


def _mixed(rank: int, world_size: int) -> tuple[list[float], str, str]:
    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("second", create, devices=["meta"])
    reloadpg.install(backends={"second"}, timeout=timedelta(seconds=HANG_S))
    dist.init_process_group("cpu:gloo,meta:second")
    pair = dist.new_group([0, 1], backend="cpu:gloo,meta:second")
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(HANG_S)

    sums, refused = [], []
    for operation in ("offload", "reload"):
        begun.clear()
        go.clear()
        getattr(reloadpg, f"on_{operation}")(hold)
        pending = getattr(reloadpg, operation)(wait=False)
        assert begun.wait(HANG_S)
        sums.append(summed(pair, rank))
        refused.append(_raised(lambda: pair._get_backend(torch.device("meta")).name()))
        go.set()
        pending.result()
        sums.append(summed(pair, rank))
    return sums, *refused  # type: ignore[return-value]


@pytest.mark.matrix
def test_the_cpu_side_of_mixed_groups_goes_on_working() -> None:
    """The other side refuses, also where it is live."""
    for sums, offloading, reloading in run_ranks(_mixed, 2):
        assert sums == [3.0] * 4
        assert "an offload is running" in offloading
        assert "a reload is running" in reloading


def _dropped(rank: int, world_size: int) -> tuple[list[str], float]:
    groups = _start(min_size=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fault = _stalled("release", groups[1])
        reloadpg.offload(wait=False)
        fault.clear()
        _join()
        pending = reloadpg.reload(wait=False)
        _join()
        del pending
        with simulated.inject(simulated.Fault("release", group="g1")):
            pending = reloadpg.offload(wait=False)
            _join()
        del pending
        reloadpg.reload(wait=False).result()
        gc.collect()
    return [str(one.message) for one in seen if one.category is RuntimeWarning], summed(None, rank)


def test_a_handle_that_is_dropped_is_reported() -> None:
    """With what became of the operation; not once ``result()`` has said it."""
    (((under_way, completed, failed), total),) = run_ranks(_dropped, 1)
    assert "offload(wait=False) was deleted" in under_way
    assert "the operation is still running" in under_way
    assert "reload(wait=False) was deleted" in completed
    assert "it completed" in completed
    assert "it raised ReleaseError" in failed
    assert total == 1.0


class _Interrupt(BaseException):
    """What a signal handler raises, as Ctrl-C does."""


def _interrupted_result(rank: int, world_size: int) -> tuple[bool, bool, str, float]:
    groups = _start()

    def interrupt(*_: Any) -> None:
        raise _Interrupt

    signal.signal(signal.SIGUSR1, interrupt)
    reloadpg.offload()
    fault = _stalled("create", groups[1])
    pending = reloadpg.reload(wait=False)
    assert fault.wait_fired(HANG_S)
    interrupted = False
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        pending.result()
    except _Interrupt:
        interrupted = True
    done = pending.done()
    fault.clear()
    return interrupted, done, pending.result().operation, summed(None, rank)


def test_a_signal_ends_the_wait_and_not_the_operation() -> None:
    """``result()`` can be called again."""
    assert run_ranks(_interrupted_result, 2) == [(True, False, "reload", 3.0)] * 2


def _interrupted_at_each_call(rank: int, world_size: int) -> tuple[int, str, float]:
    """An interrupt at every point of the library's own code, in the thread that calls."""
    _start(groups=1, min_size=1)
    interrupted = 0
    for count in range(1, 200, 3):
        left = [count]

        def trace(frame: Any, event: str, argument: Any, left: list[int] = left) -> None:
            if "/reloadpg/" in frame.f_code.co_filename:
                left[0] -= 1
                if left[0] == 0:
                    raise _Interrupt

        sys.settrace(trace)
        try:
            reloadpg.offload(wait=False).result()
            reloadpg.reload(wait=False).result()
        except _Interrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        _join()
        reloadpg.reload()  # never "offload is running in this process"
    return interrupted, reloadpg.status().state, summed(None, rank)


@pytest.mark.filterwarnings("ignore:the handle of")
def test_an_interrupt_of_the_call_leaves_nothing_behind() -> None:
    """The operation did not begin, or it goes on to its end without a handle."""
    ((interrupted, state, total),) = run_ranks(_interrupted_at_each_call, 1, timeout=240)
    assert interrupted > 20
    assert (state, total) == ("live", 1.0)


def _names(rank: int, world_size: int) -> dict[str, Any]:
    """Create groups with hashed names while a reload rebuilds others, each at its own pace."""
    reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=HANG_S), parallelism=4)
    worlds.init("gloo")
    every = range(world_size)
    groups = [dist.new_group(every) for _ in range(8)]
    before = len(dist.distributed_c10d._world.pg_map)
    names, counts = [], set()
    sys.setswitchinterval(1e-6)
    for cycle in range(3):
        reloadpg.offload()
        pending = reloadpg.reload(wait=False)
        while not pending.done():
            counts.add(len(dist.distributed_c10d._world.pg_names) - len(names))
        pending.result()
        del pending
        pending = reloadpg.offload(wait=False)
        pending.result()
        pending = reloadpg.reload(wait=False)
        made: Any = dist.new_group(every, use_local_synchronization=True)
        names.append(made.group_name)
        pending.result()
        assert summed(made, rank) == summed(groups[cycle], rank)
    return {"names": names, "counts": counts, "before": before}


def test_a_rebuild_is_in_no_table_that_names_are_made_of() -> None:
    """Torch hashes the number of groups; ranks that saw different ones made different names."""
    first, second = run_ranks(_names, 2, timeout=240)
    assert first["names"] == second["names"]
    assert first["counts"] == second["counts"] == {first["before"]}


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    """What is refused while a reload is held."""
    last = _start(parallelism=1)[-1]
    reloadpg.offload()
    fault = _stalled("create", last)
    pending = reloadpg.reload(wait=False)
    assert fault.wait_fired(HANG_S)
    found = {"uninstall": _raised(reloadpg.uninstall)}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, _raised(pending.result).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found["child"] = os.read(reading, 1000).decode()
    fault.clear()
    pending.result()
    assert summed(last, rank) == 3.0
    return found


def test_what_is_refused_while_it_runs() -> None:
    """The end of the installation, and a wait in a forked child, where nothing runs."""
    for found in run_ranks(_refusals, 2, timeout=240):
        assert found["uninstall"].startswith("PatchConflictError: uninstall: an operation is run")
        assert found["child"].startswith("PendingError: reload(wait=False): result() was called in")


def _as_a_future(rank: int, world_size: int) -> dict[str, Any]:
    """One cycle that succeeds and one that fails on rank 1, each read in every way of a future."""
    groups = _start()
    called: list[Any] = []
    pending = reloadpg.offload(wait=False)
    pending.add_done_callback(lambda handle: called.append((handle, handle.result().operation)))

    async def wait() -> str:
        return (await reloadpg.reload(wait=False)).operation

    offloaded = pending.exception(HANG_S)
    found = {
        "error": offloaded,
        "flags": (pending.done(), pending.running(), pending.cancel(), pending.cancelled()),
        "awaited": asyncio.run(wait()),
        "called": [(handle is pending, name) for handle, name in called],
        "sum": summed(groups[1], rank),
    }
    reloadpg.offload()
    if rank == 1:
        simulated.inject(simulated.Fault("create", "raise"))
    failed = reloadpg.reload(wait=False)
    found["failed"] = type(failed.exception(HANG_S)).__name__
    found["raised"] = [type(_caught(failed.result)).__name__, type(_caught(failed.result)).__name__]
    return found


def _caught(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_the_handle_has_the_methods_of_a_future() -> None:
    """It cannot be cancelled, and its error can be read more than once."""
    names = ["PeerFailedError", "RebuildError"]
    for rank, found in enumerate(run_ranks(_as_a_future, 2, timeout=120)):
        assert found["error"] is None
        assert found["flags"] == (True, False, False, False)
        assert (found["awaited"], found["called"]) == ("reload", [(True, "offload")])
        assert found["sum"] == 3.0
        assert found["failed"] == names[rank]
        assert found["raised"] == [names[rank]] * 2
