"""The simulated accelerator: its rules, how it connects, and its faults."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import reloadpg
from reloadpg import c10d
from reloadpg.testing import RankOutcome, run_ranks, simulated
from reloadpg.testing.simulated import Fault, GroupInfo, InjectedFaultError, SimState

MIB = 1 << 20
CPU = torch.device("cpu")
LIMIT = 280.0  # seconds


def start() -> None:
    """A job on the simulated accelerator."""
    simulated.register()
    simulated.configure(bytes_per_communicator=MIB)
    dist.init_process_group("sim")


# ---------------------------------------------------------------------------------------------
# rules


def rules_rank(rank: int, size: int) -> dict[str, Any]:
    simulated.register()
    simulated.register()
    os.environ[simulated.BYTES_VARIABLE] = str(2 * MIB)
    dist.init_process_group("sim")
    seen: dict[str, Any] = {"listed": dist.Backend.backend_list.count("sim")}

    def refused(call: Callable[..., object], *args: Any) -> str:
        try:
            call(*args)
        except dist.DistBackendError as error:
            return str(error)
        return "not refused"

    # creation is local: the other rank creates this one only after we have used ours
    began = time.monotonic()
    alone = dist.new_group([rank], use_local_synchronization=True, group_desc="alone")
    seen["creation_s"] = time.monotonic() - began
    dist.all_reduce(torch.ones(1), group=alone)
    seen["environment"] = simulated.groups()[-1].held_bytes

    backend = alone._get_backend(CPU)
    alone.shutdown()
    alone.shutdown()
    alone.abort()
    seen["after_shutdown"] = [
        refused(alone.allreduce, [torch.ones(1)]),
        refused(dist.all_reduce, torch.ones(1), dist.ReduceOp.SUM, alone),
        refused(funcol.all_reduce, torch.ones(1), "sum", alone),
        refused(alone._get_backend, CPU),
        refused(backend.allreduce, [torch.ones(1)]),
        refused(backend.eager_connect_single_device, CPU),
    ]
    seen["released_once"] = simulated.stats().released
    dist.destroy_process_group(alone)
    seen["destroyed_released"] = simulated.stats().released
    del alone, backend

    never_used = dist.new_group([rank], use_local_synchronization=True)
    never_used.abort()
    seen["after_abort"] = refused(never_used.barrier)
    dist.destroy_process_group(never_used)
    del never_used

    forgotten = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=forgotten)
    held = simulated.stats().held_bytes
    c10d.evict(forgotten)  # what a program does that drops a group without destroying
    del forgotten
    gc.collect()
    stats = simulated.stats()
    seen["leaked"] = stats.leaked, held - stats.held_bytes, simulated.groups(ended=True)[-1].state

    held = simulated.stats().held_bytes
    before = simulated.groups()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        child_stats = simulated.stats()
        os.write(write, f"{child_stats.created} {len(simulated.groups())}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    seen["child"] = os.read(read, 100).decode()
    seen["parent_unchanged"] = simulated.groups() == before
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return run_ranks(rules_rank, 2, timeout=LIMIT)


def test_use_after_shutdown_is_refused_on_every_path(rules: list[dict[str, Any]]) -> None:
    """As with NCCL: by the group, through ``dist``, functional collectives, a kept backend."""
    for seen in rules:
        assert len(seen["after_shutdown"]) == 6
        for message in seen["after_shutdown"]:
            assert "its communicator was released" in message


def test_abort_of_an_unused_group_is_final(rules: list[dict[str, Any]]) -> None:
    """A group that never connected cannot be used after ``abort`` either."""
    assert all("was released" in seen["after_abort"] for seen in rules)


def test_shutdown_and_abort_are_idempotent(rules: list[dict[str, Any]]) -> None:
    """Two shutdowns, an abort and ``destroy_process_group`` are one release."""
    assert all(seen["released_once"] == seen["destroyed_released"] == 1 for seen in rules)


def test_a_group_that_is_dropped_without_release_counts_as_leaked(
    rules: list[dict[str, Any]],
) -> None:
    """It is counted apart from releases, and its memory is freed all the same."""
    assert all(seen["leaked"] == (1, 2 * MIB, SimState.LEAKED) for seen in rules)


def test_registering_twice_is_once(rules: list[dict[str, Any]]) -> None:
    """``register`` is idempotent."""
    assert all(seen["listed"] == 1 for seen in rules)


def test_bytes_come_from_the_environment(rules: list[dict[str, Any]]) -> None:
    """``RELOADPG_SIM_BYTES`` sets what a communicator holds."""
    assert all(seen["environment"] == 2 * MIB for seen in rules)


def test_a_forked_child_starts_with_fresh_counters(rules: list[dict[str, Any]]) -> None:
    """The child counts none of the parent's groups, and the parent still counts its own."""
    assert all(seen["child"] == "0 0" and seen["parent_unchanged"] for seen in rules)


def read_at_every_step(rank: int, size: int) -> int:
    """Do at each bytecode of the accelerator's own code what a signal handler may do there."""
    start()
    own = {simulated.__file__, *(sys.modules[c.__module__].__file__ for c in CLASSES)}
    steps = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        if frame.f_code.co_filename not in own:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            simulated.stats()
            simulated.groups(ended=True)
            simulated.inject(Fault("create", group="none of these")).clear()
        return trace

    sys.settrace(trace)
    group = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=group)
    backend = group._get_backend(CPU)
    backend.suspend()
    backend.resume()
    with simulated.inject(Fault("release", times=1)), suppress(InjectedFaultError):
        group.shutdown()
    dist.destroy_process_group(group)
    dropped = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=dropped)
    c10d.evict(dropped)
    del dropped
    gc.collect()
    sys.settrace(None)
    return steps


CLASSES = (simulated.SimulatedProcessGroup, simulated.Stats)


def test_a_signal_handler_can_read_the_accelerator_at_any_step() -> None:
    """``stats``, ``groups`` and ``inject`` neither wait for the thread that was interrupted nor
    find something half done."""
    assert run_ranks(read_at_every_step, 1, timeout=LIMIT)[0] > 1000


# ---------------------------------------------------------------------------------------------
# connecting: lazy, eager, and its timeouts


def connect_rank(rank: int, size: int) -> dict[str, Any]:
    start()
    store = dist.distributed_c10d._get_default_store()
    seen: dict[str, Any] = {}

    def timed(call: Callable[[], object]) -> tuple[str, float]:
        began = time.monotonic()
        try:
            call()
        except (RuntimeError, dist.DistStoreError) as error:
            return type(error).__name__, time.monotonic() - began
        return "", time.monotonic() - began

    def turn(name: str) -> None:
        """All ranks get here, through the store."""
        if store.add(name, 1) == size:
            store.set(f"{name}/all", "")
        store.wait([f"{name}/all"], timedelta(seconds=120))

    shortened = dist.new_group(timeout=timedelta(seconds=300))
    backend = shortened._get_backend(CPU)
    if rank == 0:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), shortened)
        seen["timeout"] = backend.options._timeout.total_seconds()
        seen["unused_bytes"] = simulated.stats().held_bytes
        seen["absent_peer"] = timed(lambda: dist.all_reduce(torch.ones(1), group=shortened))
        seen["same_backend"] = shortened._get_backend(CPU) is backend
        seen["after"] = backend.options._timeout.total_seconds()
        began = time.monotonic()
        shortened.abort()
        seen["abort_s"] = time.monotonic() - began
    turn("shortened")

    pending = dist.new_group(timeout=timedelta(seconds=100))
    dist.barrier(group=pending)
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=pending, async_op=True)
        began = time.monotonic()
        pending.abort()
        seen["abort_pending_s"] = time.monotonic() - began
        del work
    turn("pending")

    waiting = dist.new_group(timeout=timedelta(seconds=100))
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=waiting, async_op=True)
        began = time.monotonic()
        slowest = 0.0
        while time.monotonic() < began + 1:  # the transport is waiting for rank 1 meanwhile
            asked = time.monotonic()
            store.add("asked", 1)
            slowest = max(slowest, time.monotonic() - asked)
        store.set("rank 1 may join", "")
        seen["store_s"] = slowest
        work.wait()
    else:
        store.wait(["rank 1 may join"], timedelta(seconds=120))
        dist.all_reduce(torch.ones(1), group=waiting)

    simulated.configure(eager=True)
    eager = dist.new_group()
    seen["eager"] = simulated.groups()[-1]
    simulated.configure(eager=False)
    dist.barrier(group=eager)
    late = dist.new_group()
    late._get_backend(CPU).eager_connect_single_device(CPU)
    seen["late"] = simulated.groups()[-1].state
    if rank == 0:
        simulated.configure(eager=True)
        before = simulated.stats()
        seen["eager_absent"] = timed(
            lambda: dist.new_group([0, 1], timedelta(seconds=1), use_local_synchronization=True)
        )
        after = simulated.stats()
        seen["eager_failed"] = after.live - before.live, after.leaked, after.held_bytes
        seen["held_before"] = before.held_bytes
    turn("end")
    return seen


@pytest.fixture(scope="module")
def connected() -> list[dict[str, Any]]:
    return run_ranks(connect_rank, 2, timeout=200)


@pytest.mark.matrix
def test_a_timeout_changed_before_the_first_use_is_honoured(
    connected: list[dict[str, Any]],
) -> None:
    """Set to 1 s of 300 s, the first collective with an absent peer ends with an error in time."""
    seen = connected[0]
    assert seen["timeout"] == seen["after"] == 1.0
    error, seconds = seen["absent_peer"]
    assert error in ("RuntimeError", "DistStoreError", "DistBackendError")
    assert 0.9 < seconds < 100


@pytest.mark.matrix
def test_the_backend_object_is_the_same_before_and_after_connecting(
    connected: list[dict[str, Any]],
) -> None:
    """A backend taken out of an unused group is the one that is used later."""
    assert connected[0]["same_backend"]
    assert connected[0]["unused_bytes"] == 0


@pytest.mark.matrix
def test_abort_does_not_wait_for_pending_operations(connected: list[dict[str, Any]]) -> None:
    """With a collective in flight that no peer answers, abort returns long before its timeout."""
    assert connected[0]["abort_s"] < 60
    assert connected[0]["abort_pending_s"] < 60


@pytest.mark.matrix
def test_a_collective_that_waits_for_its_peer_does_not_block_the_store(
    connected: list[dict[str, Any]],
) -> None:
    """A first collective in flight leaves the job's store free for others to use."""
    assert connected[0]["store_s"] < 60


def test_eager_creation_connects(connected: list[dict[str, Any]]) -> None:
    """With ``configure(eager=True)`` a created group is connected and holds its memory."""
    for seen in connected:
        assert (seen["eager"].state, seen["eager"].held_bytes) == (SimState.CONNECTED, MIB)
        assert seen["eager"].collectives == 0


def test_a_lazy_group_can_be_connected_by_its_backend(connected: list[dict[str, Any]]) -> None:
    """``eager_connect_single_device`` connects without an operation, as NCCL's does."""
    assert all(seen["late"] is SimState.CONNECTED for seen in connected)


def test_eager_creation_without_its_peer_fails_and_leaves_nothing(
    connected: list[dict[str, Any]],
) -> None:
    """It ends with an error at its timeout; no group is live or leaked, no memory is held."""
    seen = connected[0]
    assert seen["eager_absent"][0]
    assert seen["eager_absent"][1] < 100  # and not at the group's default, which is 30 minutes
    assert seen["eager_failed"] == (0, 0, seen["held_before"])


# ---------------------------------------------------------------------------------------------
# faults


def fault_rank(rank: int, size: int) -> dict[str, Any]:
    start()
    seen: dict[str, Any] = {}

    def alone(desc: str = "") -> Any:
        return dist.new_group([rank], use_local_synchronization=True, group_desc=desc)

    def failed(call: Callable[..., object], *args: Any) -> bool:
        try:
            call(*args)
        except InjectedFaultError:
            return True
        return False

    def reduce(group: Any) -> None:
        dist.all_reduce(torch.ones(1), group=group)

    with simulated.inject(Fault("create", nth=2)) as fault:
        first = alone()
        before = simulated.stats().created
        known = len(dist.distributed_c10d._world.pg_map)
        seen["create"] = failed(alone), fault.seen, fault.fired
        seen["create_left"] = (
            simulated.stats().created - before,
            len(dist.distributed_c10d._world.pg_map) - known,
        )
        alone()

    with simulated.inject(Fault("connect", message="no route")) as fault:
        seen["connect"] = failed(reduce, first), simulated.stats().held_bytes
        reduce(first)
        seen["connect_retry"] = simulated.stats().held_bytes, fault.seen, fault.fired

    with simulated.inject(Fault("collective", operation="broadcast", nth=2, times=2)) as fault:
        outcomes = [failed(lambda: dist.broadcast(torch.ones(1), rank, first)) for _ in range(5)]
        seen["collective"] = outcomes, failed(reduce, first), fault.seen

    other = alone("other")
    with simulated.inject(Fault("collective", group="oth*", times=None)):
        outcomes = [failed(reduce, g) for g in (first, other, first, other)]
        seen["by_description"] = outcomes
    with simulated.inject(Fault("collective", group=first.group_name)):
        seen["by_name"] = [failed(reduce, g) for g in (other, first)]

    with simulated.inject(Fault("release")) as fault:
        held = simulated.stats().held_bytes
        seen["release"] = failed(other.shutdown), simulated.stats().held_bytes == held
        reduce(other)
        other.shutdown()
        seen["release_retry"] = simulated.stats().held_bytes - held, fault.fired

    held = simulated.stats().held_bytes
    with simulated.inject(Fault("release")):
        third = alone()
        reduce(third)
        failed(third.shutdown)
        c10d.evict(third)
        del third
        gc.collect()
        stats = simulated.stats()
        seen["release_failed"] = stats.held_bytes - held, stats.leaked

    # stalls: in a thread each, held until cleared or for their time
    stalled = []
    for end in ("handle", "all"):
        fault = simulated.inject(Fault("collective", "stall"))
        thread = threading.Thread(target=reduce, args=(first,))
        thread.start()
        holds = fault.wait_fired(20), thread.is_alive()
        fault.clear() if end == "handle" else simulated.clear_faults()
        thread.join(20)
        stalled.append((*holds, thread.is_alive(), failed(reduce, first)))
    seen["stall"] = stalled
    with simulated.inject(Fault("create", "stall", seconds=0.3)):
        began = time.monotonic()
        alone()
        seen["stall_s"] = time.monotonic() - began

    fourth = alone("fourth")
    fault = simulated.inject(Fault("connect", "stall", group="fourth"))
    errors: list[BaseException] = []

    def use() -> None:
        try:
            fourth.allreduce([torch.ones(1)])
        except dist.DistBackendError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    fault.wait_fired(20)
    fourth.abort()
    fault.clear()
    thread.join(20)
    seen["aborted_while_connecting"] = len(errors), simulated.stats().held_bytes - held

    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def faults() -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(fault_rank, 1, timeout=LIMIT)[0]
    return result


def test_fault_at_creation_raises_and_leaves_no_group(faults: dict[str, Any]) -> None:
    """The second creation fails: nothing is counted as created, torch knows no new group."""
    assert faults["create"] == (True, 2, 1)
    assert faults["create_left"] == (0, 0)


def test_fault_at_connect_raises_and_a_retry_succeeds(faults: dict[str, Any]) -> None:
    """No memory is held after the failure; the next use connects."""
    assert faults["connect"] == (True, 0)
    assert faults["connect_retry"] == (MIB, 2, 1)


def test_fault_at_a_collective_strikes_the_chosen_events(faults: dict[str, Any]) -> None:
    """The second and third broadcast fail, no other one, and no all-reduce."""
    assert faults["collective"] == ([False, True, True, False, False], False, 5)


def test_faults_choose_groups_by_description_and_by_name(faults: dict[str, Any]) -> None:
    """Only matching groups are struck; ``times=None`` strikes each time."""
    assert faults["by_description"] == [False, True, False, True]
    assert faults["by_name"] == [False, True]


def test_fault_at_release_keeps_the_group_and_a_retry_frees_it(faults: dict[str, Any]) -> None:
    """After a failed shutdown the memory is still held and the group works; then it is freed."""
    assert faults["release"] == (True, True)
    assert faults["release_retry"] == (-MIB, 1)


def test_a_failed_release_is_no_leak(faults: dict[str, Any]) -> None:
    """A group dropped after a failed shutdown is freed, and not counted as forgotten."""
    assert faults["release_failed"] == (0, 0)


def test_stall_holds_until_it_is_cleared(faults: dict[str, Any]) -> None:
    """By its handle, or by ``clear_faults``: the thread goes on, and the fault is gone."""
    assert faults["stall"] == [(True, True, False, False)] * 2


def test_stall_ends_after_its_time(faults: dict[str, Any]) -> None:
    """``seconds`` bounds it."""
    assert 0.3 <= faults["stall_s"] < 60


def test_abort_while_connecting_holds_nothing(faults: dict[str, Any]) -> None:
    """The thread that was connecting gets an error; no memory stays."""
    assert faults["aborted_while_connecting"] == (1, 0)


def precise_rank(rank: int, size: int) -> dict[str, Any]:
    """Faults that call a function, that strike one rank, and that strike after the step."""
    reloadpg.install(min_size=1, timeout=timedelta(seconds=20))
    start()
    seen: dict[str, Any] = {}
    group = dist.new_group([rank], use_local_synchronization=True)
    dist.new_group([rank], use_local_synchronization=True)
    names: list[str] = []
    later = f"{group.group_name}@*"
    watch = Fault("create", "call", group=later, times=None, call=lambda g: names.append(g.name))
    handle = simulated.inject(watch)
    for _ in range(3):
        reloadpg.offload()
        reloadpg.reload()
        handle.clear()
    seen["names"] = group.group_name, names, handle.seen
    reloadpg.uninstall()  # what follows is made by torch alone

    def alone() -> Any:
        return dist.new_group([rank], use_local_synchronization=True)

    def kind(call: Callable[..., object], *args: Any) -> str:
        try:
            call(*args)
        except BaseException as error:
            return type(error).__name__
        return ""

    with simulated.inject(Fault("create", rank=1, times=None)):
        seen["rank"] = kind(alone)
    with simulated.inject(Fault("create", moment="after")):
        before = simulated.stats()
        seen["after create"] = kind(alone)
        after = simulated.stats()
        seen["after create, groups"] = after.created - before.created, after.live - before.live
    third = alone()
    held: list[int] = []
    for moment in ("before", "after"):
        fault = Fault("connect", "call", moment=moment, call=lambda g: held.append(g.held_bytes))
        simulated.inject(fault)
    dist.all_reduce(torch.ones(1), group=third)
    seen["held"] = held
    backend = third._get_backend(CPU)
    for at in ("suspend", "resume"):
        with simulated.inject(Fault(at, moment="after")):
            seen[f"after {at}"] = kind(getattr(backend, at)), simulated.groups()[-1].state

    def interrupt(group: GroupInfo) -> None:
        raise KeyboardInterrupt

    with simulated.inject(Fault("release", "call", call=interrupt)):
        seen["interrupted"] = kind(third.abort), simulated.groups()[-1].state
    with simulated.inject(Fault("release", moment="after", operation="abort")):
        seen["after abort"] = kind(third.abort), simulated.groups(ended=True)[-1].state

    with simulated.configured(creation_seconds=0.5, release_seconds=0.5):
        begun = time.monotonic()
        slow = [alone() for _ in range(2)]
        creation = time.monotonic() - begun
        slow += [alone() for _ in range(6)]
    sleep, together = time.sleep, threading.Barrier(8)

    def sleep_together(seconds: float) -> None:
        if seconds == 0.5:  # a release, which begins to take its time where all have come to that
            together.wait(60)
        sleep(seconds)

    begun = time.monotonic()
    with mock.patch.object(time, "sleep", sleep_together), ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(group.shutdown) for group in slow]:
            done.result()
    seen["seconds"] = creation, time.monotonic() - begun
    with simulated.configured(creation_seconds=60, release_seconds=60):
        pass
    begun = time.monotonic()
    alone().shutdown()
    seen["seconds"] += (time.monotonic() - begun,)
    return seen


@pytest.fixture(scope="module")
def precise() -> list[dict[str, Any]]:
    return run_ranks(precise_rank, 2, timeout=LIMIT)


def test_a_fault_can_call_a_function(precise: list[dict[str, Any]]) -> None:
    """It is given the group as it is then, and what it raises, the step raises; a cleared fault
    calls nothing more. The pattern ``1@*`` is every later generation of group ``1`` alone."""
    for seen in precise:
        name, (later,), count = seen["names"]
        assert later.startswith(f"{name}@")
        assert count == 1
        assert seen["held"] == [0, MIB]
        assert seen["interrupted"] == ("KeyboardInterrupt", SimState.CONNECTED)


def test_a_fault_can_be_one_ranks(precise: list[dict[str, Any]]) -> None:
    """Injected on all ranks, it strikes in the process of the global rank that it names."""
    assert [seen["rank"] for seen in precise] == ["", "InjectedFaultError"]


def test_a_fault_can_come_after_the_step(precise: list[dict[str, Any]]) -> None:
    """The step is done then: a created group is released again, the others stay as they are."""
    for seen in precise:
        error = "InjectedFaultError"
        assert seen["after create"] == error
        assert seen["after create, groups"] == (1, 0)
        assert seen["after suspend"] == (error, SimState.SUSPENDED)
        assert seen["after resume"] == (error, SimState.CONNECTED)
        assert seen["after abort"] == (error, SimState.RELEASED)


def test_creations_and_releases_can_take_time(precise: list[dict[str, Any]]) -> None:
    """As long as configured, side by side in several threads; as before after the block."""
    for seen in precise:
        creation, release, neither = seen["seconds"]
        assert creation >= 1
        assert release >= 0.5
        assert neither < 60


def dying_rank(rank: int, size: int) -> None:
    start()
    if rank == 0:
        simulated.inject(Fault("collective", "exit", exit_code=7, nth=2))
    else:
        simulated.inject(Fault("collective", "kill", nth=2))
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))


@pytest.fixture(scope="module")
def deaths() -> list[RankOutcome]:
    return run_ranks(dying_rank, 2, timeout=LIMIT, check=False)


def test_exit_ends_the_process_with_its_code(deaths: list[RankOutcome]) -> None:
    """At the second collective, with no exception."""
    assert deaths[0].exitcode == 7


def test_kill_ends_the_process_by_sigkill(deaths: list[RankOutcome]) -> None:
    """At the second collective."""
    assert deaths[1].signal == signal.SIGKILL


# ---------------------------------------------------------------------------------------------
# bad input, and what needs no process group


@pytest.mark.parametrize(
    "arguments",
    [
        {"at": "destroy"},
        {"at": "create", "action": "explode"},
        {"at": "create", "nth": 0},
        {"at": "create", "times": 0},
        {"at": "create", "action": "call"},
        {"at": "create", "call": print},
        {"at": "collective", "moment": "after"},
    ],
)
def test_an_impossible_fault_is_refused(arguments: dict[str, Any]) -> None:
    """Unknown points and actions, and counts below one, are errors when the fault is made."""
    with pytest.raises(ValueError):
        Fault(**arguments)


def test_negative_bytes_are_refused() -> None:
    """``configure`` changes nothing then."""
    with pytest.raises(ValueError, match="nothing was changed"):
        simulated.configure(bytes_per_communicator=-1)


def test_bytes_in_the_environment_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable and the remedy."""
    monkeypatch.setenv(simulated.BYTES_VARIABLE, "much")
    with pytest.raises(ValueError, match=r"RELOADPG_SIM_BYTES='much'.*unset"):
        simulated._bytes()


def importing_rank(rank: int, size: int) -> list[bool]:
    seen = ["sim" in dist.Backend.backend_list]
    simulated.register()
    return [*seen, "sim" in dist.Backend.backend_list]


def test_importing_registers_nothing() -> None:
    """The backend is unknown to torch until ``register`` is called."""
    assert run_ranks(importing_rank, 1, timeout=LIMIT) == [[False, True]]
