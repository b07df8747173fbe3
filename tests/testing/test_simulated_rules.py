"""The simulated accelerator: its rules, how it connects and suspends, and its faults."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
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
from reloadpg.lifecycle import memory
from reloadpg.testing import run_ranks, simulated
from reloadpg.testing.simulated import Fault, GroupInfo, InjectedFaultError, SimState

MIB = 1 << 20
HELD = 8 * MIB
CPU = torch.device("cpu")


def start(**configuration: Any) -> Any:
    """Begin a job on the simulated accelerator; return the backend of the default group."""
    simulated.register()
    simulated.configure(bytes_per_communicator=HELD, **configuration)
    dist.init_process_group("sim")
    world: Any = dist.group.WORLD
    return world._get_backend(CPU)


def alone(desc: str = "") -> Any:
    """A group of this rank; its creation is local."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc=desc)


def use(group: Any = None) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def drop(group: Any) -> None:
    """Forget a group without destroying it, as a program may; the caller's reference goes too."""
    c10d.evict(group)


def held() -> int:
    return simulated.stats().held_bytes


def refused(match: str) -> Any:
    return pytest.raises(dist.DistBackendError, match=match)


# ---------------------------------------------------------------------------------------------
# rules


@pytest.mark.ranks(1)
def test_a_released_group_is_refused_on_every_path_and_released_once() -> None:
    """By the group, ``torch.distributed``, functional collectives and a kept backend, as with NCCL.

    ``abort`` is final for a group that was never connected, too.
    """
    start()
    group = alone()
    use(group)
    backend = group._get_backend(CPU)
    group.shutdown()
    group.shutdown()
    group.abort()
    for call in (
        lambda: group.allreduce([torch.ones(1)]),
        lambda: use(group),
        lambda: funcol.all_reduce(torch.ones(1), "sum", group),
        lambda: group._get_backend(CPU),
        lambda: backend.allreduce([torch.ones(1)]),
        lambda: backend.eager_connect_single_device(CPU),
        backend.suspend,
        backend.resume,
    ):
        with refused("its communicator was released"):
            call()
    dist.destroy_process_group(group)
    assert simulated.stats().released == 1
    unused = alone()
    unused.abort()
    with refused("its communicator was released"):
        unused.barrier()


@pytest.mark.ranks(1, env={simulated.BYTES_VARIABLE: str(2 * MIB)})
def test_a_group_that_is_dropped_without_release_counts_as_leaked() -> None:
    """Leaks are counted separately from releases, and the memory is freed.

    ``RELOADPG_SIM_BYTES`` sets the size of a communicator. ``register`` is idempotent.
    """
    assert "sim" not in dist.Backend.backend_list  # importing it has registered nothing
    simulated.register()
    simulated.register()
    assert dist.Backend.backend_list.count("sim") == 1
    dist.init_process_group("sim")
    group = alone()
    use(group)
    assert held() == 2 * MIB
    drop(group)
    del group
    gc.collect()
    assert (simulated.stats().leaked, simulated.stats().released, held()) == (1, 0, 0)
    assert simulated.groups(ended=True)[-1].state is SimState.LEAKED


@pytest.mark.ranks(1)
def test_a_forked_child_starts_with_new_counters() -> None:
    """The child counts no groups of the parent, and the parent's counters are unchanged."""
    start()
    before = simulated.groups()
    child = os.fork()
    if child == 0:
        os._exit(simulated.stats().created + len(simulated.groups()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert simulated.groups() == before != ()


@pytest.mark.ranks(1)
def test_a_signal_handler_can_read_the_accelerator_at_any_step() -> None:
    """``stats``, ``groups`` and ``inject`` work at each bytecode of the accelerator's own code.

    They neither wait for the thread that was interrupted nor find a half-changed record.
    """
    start()
    classes = (simulated.SimulatedProcessGroup, simulated.Stats)
    own = {simulated.__file__, *(sys.modules[c.__module__].__file__ for c in classes)}
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
    group = alone()
    use(group)
    backend = group._get_backend(CPU)
    backend.suspend()
    backend.resume()
    with simulated.inject(Fault("release", times=1)), suppress(InjectedFaultError):
        group.shutdown()
    dist.destroy_process_group(group)
    dropped = alone()
    use(dropped)
    drop(dropped)
    del dropped
    gc.collect()
    sys.settrace(None)
    assert steps > 1000


# ---------------------------------------------------------------------------------------------
# connecting: lazy, eager, and its timeouts


def meet(name: str) -> None:
    """Wait for all ranks, through the store."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(name, 1) == dist.get_world_size():
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"], timedelta(seconds=120))


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_a_collective_honours_a_timeout_changed_before_the_first_use(rank: int) -> None:
    """With an absent peer it raises long before the timeout of creation, on the same backend.

    ``abort`` does not wait for a pending collective either.
    """
    start()
    group: Any = dist.new_group(timeout=timedelta(seconds=300))
    pending: Any = dist.new_group(timeout=timedelta(seconds=300))
    dist.barrier(group=pending)
    if rank == 0:
        begun = time.monotonic()
        backend = group._get_backend(CPU)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
        assert backend.options._timeout == timedelta(seconds=1)
        assert held() == HELD  # of the other group alone
        with pytest.raises((RuntimeError, dist.DistStoreError)):
            use(group)
        assert time.monotonic() - begun >= 0.9
        assert group._get_backend(CPU) is backend
        assert backend.options._timeout == timedelta(seconds=1)
        group.abort()
        work = dist.all_reduce(torch.ones(1), group=pending, async_op=True)
        pending.abort()
        del work
        assert time.monotonic() - begun < 200
    meet("end")


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_a_collective_that_waits_for_its_peer_does_not_block_the_store(rank: int) -> None:
    """The other ranks can use the store of the job while the first collective is pending."""
    start()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        begun = time.monotonic()
        while time.monotonic() < begun + 1:  # the transport waits for rank 1 now
            store.add("asked", 1)
        store.set("rank 1 may join", "")
        work.wait()
    else:
        store.wait(["rank 1 may join"], timedelta(seconds=120))
        use()


@pytest.mark.ranks(2)
def test_an_eager_group_connects_in_its_creation_and_leaves_nothing_without_its_peer(
    rank: int,
) -> None:
    """It then holds its memory. A lazy group can be connected by its backend, as NCCL's can.

    With an absent peer, creation raises at its timeout, with no group live or leaked.
    """
    start()
    lazy: Any = dist.new_group()
    lazy._get_backend(CPU).eager_connect_single_device(CPU)
    assert simulated.groups()[-1].state is SimState.CONNECTED
    simulated.configure(eager=True)
    eager = dist.new_group()
    info = simulated.groups()[-1]
    assert (info.state, info.held_bytes, info.collectives) == (SimState.CONNECTED, HELD, 0)
    dist.barrier(group=eager)
    if rank == 0:
        before = simulated.stats()
        with pytest.raises((RuntimeError, dist.DistStoreError)):
            dist.new_group([0, 1], timedelta(seconds=1), use_local_synchronization=True)
        after = simulated.stats()
        assert (after.live, after.leaked, after.held_bytes) == (before.live, 0, before.held_bytes)
    meet("end")


# ---------------------------------------------------------------------------------------------
# suspending


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_a_suspended_communicator_keeps_an_eighth_of_its_memory_until_it_is_resumed() -> None:
    """The account has NCCL's names; a call in the wrong state is an error, as with NCCL."""
    backend = start()
    for name in ("suspend", "resume", "memory_stats"):
        with refused("not initialized"):
            getattr(backend, name)()
    use()
    live = {"suspend": 7 * MIB, "suspended": 0, "persist": MIB, "total": HELD}
    assert backend.memory_stats() == live
    with refused("invalid usage: resume"):
        backend.resume()
    backend.suspend()
    assert backend.memory_stats() == {**live, "suspended": 1, "total": MIB}
    assert held() == memory.in_use()["simulated"] == MIB
    with refused("invalid usage: suspend"):
        backend.suspend()
    with refused("illegal memory access"):
        use()
    backend.resume()
    assert backend.memory_stats() == live
    assert use() == 2
    backend.suspend()
    dist.destroy_process_group()
    assert (held(), simulated.stats().released) == (0, 1)


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_the_peers_of_a_member_whose_suspend_fails_hang_until_they_abort(rank: int) -> None:
    """The call has no timeout."""
    backend = start()
    use()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        with simulated.inject(Fault("suspend")), pytest.raises(InjectedFaultError):
            backend.suspend()
        store.set("failed", "1")
        return
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(backend.suspend)
        store.wait(["failed"])
        assert not waiting.done()
        assert backend.memory_stats()["suspended"] == 0
        backend.abort()
        with refused("was released"):
            waiting.result()


@pytest.mark.matrix
@pytest.mark.ranks(1)
def test_a_resume_and_a_first_use_run_out_of_memory_without_taking_any() -> None:
    """Only what ``capacity_bytes`` leaves free can be taken."""
    backend = start(capacity_bytes=HELD)
    use()
    backend.suspend()
    assert memory.free_bytes() == (7 * MIB, "simulated")
    simulated.configure(capacity_bytes=2 * MIB)
    for call in (backend.resume, lambda: use(alone())):
        with refused("out of memory"):
            call()
        assert held() == MIB


@pytest.mark.matrix
@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["variable", "setting"])
def test_a_suspend_without_cumem_succeeds_and_releases_nothing(how: str) -> None:
    """As NCCL's does with NCCL_CUMEM_ENABLE=0."""
    if how == "variable":
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
    backend = start(suspend_works=how == "variable")
    use()
    backend.suspend()
    assert held() == HELD
    backend.resume()
    assert (held(), use()) == (HELD, 2)


# ---------------------------------------------------------------------------------------------
# faults


@pytest.mark.ranks(1)
def test_a_fault_at_creation_connection_or_release_leaves_what_a_retry_needs() -> None:
    """A failed creation leaves no group, a failed connection no memory; a failed release both.

    A group that is dropped after a failed release is freed, and not counted as leaked.
    """
    start()
    with simulated.inject(Fault("create", nth=2)) as fault:
        group = alone()
        created, known = simulated.stats().created, len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(InjectedFaultError):
            alone()
        assert (fault.seen, fault.fired) == (2, 1)
        assert simulated.stats().created == created
        assert len(dist.distributed_c10d._world.pg_map) == known
        alone()
    with simulated.inject(Fault("connect", message="no route")) as fault:
        with pytest.raises(InjectedFaultError, match="no route"):
            use(group)
        assert held() == 0
        use(group)
        assert (held(), fault.seen, fault.fired) == (HELD, 2, 1)
    with simulated.inject(Fault("release")) as fault:
        with pytest.raises(InjectedFaultError):
            group.shutdown()
        assert held() == HELD
        use(group)
        group.shutdown()
        assert (held(), fault.fired) == (0, 1)
    dropped = alone()
    use(dropped)
    with simulated.inject(Fault("release")), pytest.raises(InjectedFaultError):
        dropped.shutdown()
    drop(dropped)
    del dropped
    gc.collect()
    assert (held(), simulated.stats().leaked) == (0, 0)


@pytest.mark.ranks(1)
def test_a_fault_strikes_the_chosen_operations_of_the_chosen_groups(rank: int) -> None:
    """By operation, by number of the event, and by name or description of the group."""
    start()
    first, other = alone(), alone("other")

    def failed(operation: Any, group: Any) -> bool:
        try:
            operation(group)
        except InjectedFaultError:
            return True
        return False

    def broadcast(group: Any) -> None:
        dist.broadcast(torch.ones(1), rank, group)

    with simulated.inject(Fault("collective", operation="broadcast", nth=2, times=2)) as fault:
        assert [failed(broadcast, first) for _ in range(5)] == [False, True, True, False, False]
        assert not failed(use, first)
        assert fault.seen == 5
    with simulated.inject(Fault("collective", group="oth*", times=None)):
        assert [failed(use, g) for g in (first, other) * 2] == [False, True] * 2
    with simulated.inject(Fault("collective", group=first.group_name)):
        assert [failed(use, g) for g in (other, first)] == [False, True]


@pytest.mark.ranks(1)
def test_a_stall_holds_its_thread_until_it_is_cleared_or_its_time_is_over() -> None:
    """It is cleared by its handle or by ``clear_faults``. An abort ends a stalled connection."""
    start()
    group = alone()
    with ThreadPoolExecutor(1) as pool:
        for by_handle in (True, False):
            fault = simulated.inject(Fault("collective", "stall"))
            using = pool.submit(use, group)
            assert fault.wait_fired(200)
            assert not using.done()
            fault.clear() if by_handle else simulated.clear_faults()
            assert using.result(200) == use(group) == 1
        begun = time.monotonic()
        with simulated.inject(Fault("create", "stall", seconds=0.3)):
            fresh = alone("fresh")
        assert 0.3 <= time.monotonic() - begun < 200
        before = held()
        fault = simulated.inject(Fault("connect", "stall", group="fresh"))
        using = pool.submit(use, fresh)
        assert fault.wait_fired(200)
        fresh.abort()
        fault.clear()
        with refused("was released"):
            using.result(200)
        assert held() == before


@pytest.mark.ranks(1)
def test_a_fault_can_call_a_function_at_every_later_generation_of_a_group() -> None:
    """The pattern ``1@*`` matches every later generation of group ``1`` alone.

    A cleared fault calls nothing. An exception of the function is raised by the step.
    """
    reloadpg.install(min_size=1, timeout=timedelta(seconds=20))
    start()
    group, _ = alone(), alone()
    names: list[str] = []
    later = f"{group.group_name}@*"
    handle = simulated.inject(
        Fault("create", "call", group=later, times=None, call=lambda g: names.append(g.name))
    )
    for _ in range(3):
        reloadpg.offload()
        reloadpg.reload()
        handle.clear()
    (name,) = names
    assert name.startswith(f"{group.group_name}@")
    assert handle.seen == 1
    reloadpg.uninstall()  # what follows is created by torch alone
    sizes: list[int] = []
    for moment in ("before", "after"):
        simulated.inject(
            Fault("connect", "call", moment=moment, call=lambda g: sizes.append(g.held_bytes))
        )
    third = alone()
    use(third)
    assert sizes == [0, HELD]

    def interrupt(group: GroupInfo) -> None:
        raise KeyboardInterrupt

    fault = Fault("release", "call", call=interrupt)
    with simulated.inject(fault), pytest.raises(KeyboardInterrupt):
        third.abort()
    assert simulated.groups()[-1].state is SimState.CONNECTED


@pytest.mark.ranks(2)
def test_a_fault_can_be_of_one_rank_and_can_come_after_the_step(rank: int) -> None:
    """Then the step is done: a created group is released again, other groups keep their state."""
    start()
    with simulated.inject(Fault("create", rank=1, times=None)):
        if rank == 0:
            alone()
        else:
            with pytest.raises(InjectedFaultError):
                alone()
    before = simulated.stats()
    with simulated.inject(Fault("create", moment="after")), pytest.raises(InjectedFaultError):
        alone()
    assert simulated.stats().created == before.created + 1
    assert simulated.stats().live == before.live
    group = alone()
    use(group)
    backend = group._get_backend(CPU)
    states = [SimState.CONNECTED, SimState.SUSPENDED]
    for at in ("suspend", "resume"):
        for moment, state in zip(("before", "after"), states, strict=True):
            with simulated.inject(Fault(at, moment=moment)), pytest.raises(InjectedFaultError):
                getattr(backend, at)()
            assert simulated.groups()[-1].state is state
        states.reverse()
    with (
        simulated.inject(Fault("release", moment="after", operation="abort")),
        pytest.raises(InjectedFaultError),
    ):
        group.abort()
    assert simulated.groups(ended=True)[-1].state is SimState.RELEASED


@pytest.mark.ranks(1)
def test_creations_and_releases_take_the_configured_time_in_parallel() -> None:
    """Until the end of the block; no thread waits for another one."""
    start()
    with simulated.configured(creation_seconds=0.5, release_seconds=0.5):
        begun = time.monotonic()
        slow = [alone() for _ in range(2)]
        assert time.monotonic() - begun >= 1
    with simulated.configured(creation_seconds=60, release_seconds=60):
        pass
    sleep, together = time.sleep, threading.Barrier(2)

    def sleep_together(seconds: float) -> None:
        if seconds == 0.5:  # a release waits here until the other one has come, too
            together.wait(200)
        sleep(seconds)

    begun = time.monotonic()
    with mock.patch.object(time, "sleep", sleep_together), ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(group.shutdown) for group in slow]:
            done.result()
    assert time.monotonic() - begun >= 0.5
    begun = time.monotonic()
    alone().shutdown()
    assert time.monotonic() - begun < 60


def dying_rank(rank: int, size: int) -> None:
    start()
    ends: Any = [{"action": "exit", "exit_code": 7}, {"action": "kill"}]
    simulated.inject(Fault("collective", nth=2, **ends[rank]))
    use()
    use()


def test_a_fault_can_end_its_process() -> None:
    """With an exit code, without an exception, or by SIGKILL; here at the second collective."""
    exited, killed = run_ranks(dying_rank, 2, timeout=280, check=False)
    assert (exited.exitcode, exited.exception is not None) == (7, True)
    assert killed.signal == signal.SIGKILL


# ---------------------------------------------------------------------------------------------
# bad input


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
    """Unknown points and actions, and counts below one, are errors when the fault is created."""
    with pytest.raises(ValueError):
        Fault(**arguments)


@pytest.mark.parametrize(
    "setting",
    [
        {"bytes_per_communicator": -1},
        {"persistent_share": 1.5},
        {"persistent_share": -1},
        {"capacity_bytes": -1},
    ],
)
def test_an_impossible_setting_is_refused(setting: dict[str, Any]) -> None:
    """The settings are unchanged."""
    with pytest.raises(ValueError, match="nothing was changed"):
        simulated.configure(**setting)


def test_bytes_in_the_environment_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable and the remedy."""
    monkeypatch.setenv(simulated.BYTES_VARIABLE, "much")
    with pytest.raises(ValueError, match=r"RELOADPG_SIM_BYTES='much'.*unset"):
        simulated._bytes()
