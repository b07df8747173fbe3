"""``offload(wait=False)`` and ``reload(wait=False)``: the handle, and calls that raise."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from concurrent import futures
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import Job, join_operations, signalling
from helpers.worlds import summed

import reloadpg
from reloadpg.groups.offloaded import UnderWay
from reloadpg.testing import faults, simulated
from reloadpg.threads import Task

HANG_S = 120.0


def _start(**options: Any) -> Job:
    return Job("sim", subgroups=[range(int(os.environ["WORLD_SIZE"]))] * 3, used=False, **options)


def _stalled(at: str, group: Any) -> Any:
    """Make a step of one group wait until the fault is cleared."""
    name = f"{group.group_name}@*" if at == "create" else group.group_desc
    return faults.inject(faults.Fault(at, "stall", group=name, seconds=HANG_S))  # type: ignore[arg-type]


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_a_running_operation_refuses_collectives_and_other_operations(rank) -> None:
    """Each operation is held at its last group while its caller continues.

    Collectives raise on all groups until it has ended, also on groups that are still or already
    live; queries return. Callbacks run in its thread and can use the groups.
    """
    job = _start(parallelism=1)
    groups = [*job.groups.values()]
    first, last = groups[1], groups[-1]
    threads: list[threading.Thread] = []
    used: list[float] = []
    reloadpg.on_offload(lambda: used.append(summed(first, rank)))
    reloadpg.on_reload(lambda: used.append(summed(last, rank)))
    reloadpg.on_report(lambda report: threads.append(threading.current_thread()))
    # Groups are released in reverse order; the first group after WORLD is the last one.
    for operation, at, held in (("offload", "release", first), ("reload", "create", last)):
        fault = _stalled(at, held)
        pending = getattr(reloadpg, operation)(wait=False)
        assert fault.wait_fired(HANG_S)
        assert (pending.done(), pending.running(), pending.operation) == (False, True, operation)
        assert not pending.cancel()
        for group in groups:
            with pytest.raises(reloadpg.GroupOffloadedError, match=f"{operation} is running"):
                summed(group, rank)
        for name in ("offload", "reload"):
            with pytest.raises(
                reloadpg.ReloadpgError, match=f"{name} was called while {operation}"
            ):
                getattr(reloadpg, name)()
        with pytest.raises(reloadpg.errors.PendingError, match=r"\(wait=False\) is still running"):
            pending.result(timeout=0)
        assert (dist.get_rank(first), dist.get_world_size(first)) == (rank, 2)
        assert {group._managed.is_live for group in groups} == {True, False}
        fault.clear()
        report = pending.result()
        assert (report.operation, report.changed, len(report.groups)) == (operation, True, 4)
        assert pending.result(timeout=0) is report
    job.assert_live(1)
    assert used == [3.0, 3.0]
    assert threading.main_thread() not in threads


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_groups_can_be_created_and_destroyed_while_a_reload_runs(rank) -> None:
    """A new group is not part of the operation; destroying the job waits for the operation."""
    job = _start(parallelism=1)
    reloadpg.offload()
    fault = _stalled("create", job.ring)
    pending = reloadpg.reload(wait=False)
    assert fault.wait_fired(HANG_S)
    new = dist.new_group([0, 1])
    assert summed(new, rank) == 3.0
    fault.clear()
    pending.result()
    job.assert_live()
    assert summed(new, rank) == 3.0
    reloadpg.offload()
    fault = _stalled("create", job.ring)
    pending = reloadpg.reload(wait=False)
    assert fault.wait_fired(HANG_S)
    destroys = threading.Thread(target=dist.destroy_process_group)
    destroys.start()
    destroys.join(0.5)
    assert destroys.is_alive()
    fault.clear()
    destroys.join(HANG_S)
    pending.result()
    assert not dist.is_initialized()
    assert simulated.stats().live == 0


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_the_cpu_backend_of_a_mixed_group_works_while_an_operation_runs(rank) -> None:
    """The other backend raises, also while it is live."""

    def create(store: Any, place: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, place, size, timeout)

    dist.Backend.register_backend("second", create, devices=["meta"])
    reloadpg.install(backends={"second"}, timeout=timedelta(seconds=HANG_S))
    dist.init_process_group("cpu:gloo,meta:second")
    pair: Any = dist.new_group([0, 1], backend="cpu:gloo,meta:second")
    for operation in ("offload", "reload"):
        begun, go = threading.Event(), threading.Event()

        def hold(begun: Any = begun, go: Any = go) -> None:
            begun.set()
            go.wait(HANG_S)

        remove = getattr(reloadpg, f"on_{operation}")(hold)
        pending = getattr(reloadpg, operation)(wait=False)
        assert begun.wait(HANG_S)
        assert summed(pair, rank) == 3.0
        with pytest.raises(reloadpg.GroupOffloadedError, match=f"an? {operation} is running"):
            pair._get_backend(torch.device("meta")).name()
        go.set()
        pending.result()
        remove()
        assert summed(pair, rank) == 3.0


@pytest.mark.ranks(1)
def test_the_error_of_an_operation_without_a_handle_is_logged(rank) -> None:
    """The groups say it, too: they have failed."""
    job = _start(min_size=1)
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg").addHandler(handler)
    with faults.inject(faults.Fault("release", group="g1")):
        reloadpg.offload(wait=False)
        join_operations()
    (line,) = (line for line in lines if "wait=False" in line)
    assert line.startswith("offload(wait=False) has failed: ReleaseError")
    assert job.groups["g1"].state == "failed"


class _Interrupt(BaseException):
    """Raised by a signal handler, as KeyboardInterrupt is."""


@pytest.mark.ranks(2)
def test_a_signal_ends_result_and_not_the_operation(rank) -> None:
    """``result()`` can be called again."""
    job = _start()
    signalling(signal.SIGUSR1, _Interrupt())
    reloadpg.offload()
    fault = _stalled("create", job.groups["g0"])
    pending = reloadpg.reload(wait=False)
    assert fault.wait_fired(HANG_S)
    with pytest.raises(_Interrupt):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        pending.result()
    assert not pending.done()
    fault.clear()
    assert pending.result().operation == "reload"
    job.assert_live()


@pytest.mark.ranks(2)
def test_the_backend_that_an_abort_holds_while_it_waits_is_not_the_communicator() -> None:
    """Torch's abort, at the end of a scope, gets the backend, and waits for the offload."""
    job, held = Job("gloo", subgroups=[(0, 1)]), threading.Event()
    reloadpg.on_offload(lambda: held.wait(HANG_S))
    pending = reloadpg.offload(wait=False)
    backend = job.ring._get_backend(torch.device("cuda"))
    held.set()
    assert pending.result().warnings == ()
    del backend
    reloadpg.reload()
    job.assert_live()


@pytest.mark.ranks(2)
def test_groups_being_rebuilt_do_not_change_the_names_of_new_groups() -> None:
    """Torch hashes the number of groups, so it must be the same on all ranks."""
    job = Job("gloo", subgroups=[(0, 1)] * 8, parallelism=4)
    world: Any = dist.distributed_c10d._world  # type: ignore[attr-defined]
    before = len(world.pg_map)
    sys.setswitchinterval(1e-6)
    for cycle in range(3):
        reloadpg.offload()
        pending = reloadpg.reload(wait=False)
        while not pending.done():
            assert len(world.pg_names) == before + cycle
        pending.result()
        del pending
        pending = reloadpg.offload(wait=False)
        pending.result()
        pending = reloadpg.reload(wait=False)
        made: Any = dist.new_group([0, 1], use_local_synchronization=True)
        job.agree(f"{cycle}", made.group_name)
        pending.result()
        job.assert_live()
        assert worlds.sums_right(made)


@pytest.mark.ranks(2)
def test_uninstall_and_a_forked_child_raise_while_an_operation_runs(rank) -> None:
    """The operation does not run in the child, so ``result()`` raises."""
    job = _start(parallelism=1)
    reloadpg.offload()
    fault = _stalled("create", job.ring)
    pending = reloadpg.reload(wait=False)
    assert fault.wait_fired(HANG_S)
    with pytest.raises(reloadpg.errors.PatchConflictError, match="uninstall: an operation is run"):
        reloadpg.uninstall()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pending.result()
        except reloadpg.errors.PendingError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(writing)
    assert os.read(reading, 1000).startswith(b"reload(wait=False): result() was called in")
    fault.clear()
    pending.result()
    job.assert_live()


def test_an_operations_own_thread_does_not_wait_for_its_end() -> None:
    """The thread may wait, for example, in a callback that destroys a group."""
    operation = UnderWay("offload")

    def callback() -> None:
        operation.enter()
        operation.wait()

    assert Task(callback, "offload").wait(HANG_S)


@pytest.mark.ranks(2)
def test_the_handle_is_a_future_and_can_be_awaited(rank) -> None:
    """A callback is called although the program keeps no handle."""
    job = _start()
    called: list[Any] = []
    reloadpg.offload(wait=False).add_done_callback(
        lambda handle: called.append(handle.result().operation)
    )
    join_operations()

    async def wait() -> str:
        return (await reloadpg.reload(wait=False)).operation

    assert asyncio.run(wait()) == "reload"
    (ended,) = futures.wait([reloadpg.reload(wait=False)], HANG_S).done
    assert ended.result().note == "nothing is offloaded"
    assert called == ["offload"]
    job.assert_live()
