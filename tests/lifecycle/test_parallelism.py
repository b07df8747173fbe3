"""Groups released, created and connected in parallel: order, faults, agreement."""

from __future__ import annotations

import threading
import time
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from helpers.fault_job import FAR, Job, base_store, eventually, meet
from helpers.sampling import sampled

import reloadpg
from reloadpg.testing import faults, simulated

RANKS = 4
GRID = [  # pp 2 x tp 2 of a job of four ranks, with the groups that Megatron creates
    *([0, 1], [2, 3]),  # tensor parallel
    *([0, 2], [1, 3]),  # pipeline parallel
    *([0, 3], [1, 2]),
    [0, 1, 2, 3],
    *([0, 2], [1, 3]),  # embeddings
]
RINGS = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]


def _random(seed: int) -> list[list[int]]:
    draw = Random(seed)
    return [sorted(draw.sample(range(RANKS), draw.randint(2, RANKS))) for _ in range(16)]


TOPOLOGIES = {"grid": GRID, "rings": RINGS, "random 1": _random(1), "random 2": _random(2)}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("topology", sampled(TOPOLOGIES, "grid"))
def test_no_topology_deadlocks(rank: int, topology: str) -> None:
    """All groups are released and rebuilt with random delays and parallelism 1 to 8."""
    job = Job("sim", subgroups=TOPOLOGIES[topology], used=False)
    # As with NCCL, a connection waits for all members, and so would a release out of order.
    simulated.configure(bytes_per_communicator=1 << 16)
    draw = Random(rank)
    for at in ("create", "connect", "release"):
        pause = lambda _: time.sleep(draw.random() / 50)  # noqa: E731
        faults.inject(faults.Fault(at, "call", times=None, call=pause))  # type: ignore[arg-type]
    for parallelism in range(1, 9):
        reloadpg.uninstall()
        reloadpg.install(timeout=FAR, parallelism=parallelism)
        # With even values a creation waits for all members, as with gloo and with bound NCCL.
        simulated.configure(eager=parallelism % 2 == 0)
        reloadpg.offload()
        assert simulated.stats().held_bytes == 0
        reloadpg.reload(connect="eager")
        assert all(one.state == "connected" for one in simulated.groups())
        job.assert_live()


@pytest.mark.matrix
@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallelism", [1, 4])
def test_parallelism_is_the_number_of_groups_at_a_time(parallelism: int) -> None:
    """This number of groups is released, created, or connected concurrently."""
    Job("sim", subgroups=[(0, 1)] * 2 * parallelism, parallelism=parallelism)
    steps = {"release": "g*", "create": "[1-9]*@*", "connect": "g*"}
    lock, now, most = threading.Lock(), dict.fromkeys(steps, 0), dict.fromkeys(steps, 0)
    full = {at: threading.Event() for at in now}

    def step(at: str) -> Any:
        def begin(_: Any) -> None:
            with lock:
                now[at] += 1
                most[at] = max(most[at], now[at])
                if most[at] >= parallelism:
                    full[at].set()
            if parallelism > 1:
                full[at].wait(60)  # until this number of groups is in progress
            with lock:
                now[at] -= 1

        return begin

    for at, group in steps.items():  # without the default group, which is processed alone
        fault = faults.Fault(at, "call", group=group, times=None, call=step(at))  # type: ignore[arg-type]
        faults.inject(fault)
    reloadpg.offload()
    reloadpg.reload(connect="eager")
    assert most == dict.fromkeys(steps, parallelism)


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_if_groups_share_an_options_object_all_are_created_one_after_the_other() -> None:
    """Torch writes a group's name and ranks into the caller's object."""
    Job("sim", subgroups=(), parallelism=4)
    options = SimpleNamespace()
    for index in range(8):  # every second one has separate options
        dist.new_group([0, 1], pg_options=options if index % 2 else SimpleNamespace())
    order: list[str] = []
    lock, now, most = threading.Lock(), [0], [0]

    def begin(group: Any) -> None:
        with lock:
            now[0] += 1
            most.append(now[0])
            order.append(group.name.partition("@")[0])

    def end(group: Any) -> None:
        with lock:
            now[0] -= 1

    reloadpg.offload()
    for moment, call in (("before", begin), ("after", end)):
        faults.inject(
            faults.Fault("create", "call", times=None, moment=moment, call=call)  # type: ignore[arg-type]
        )
    reloadpg.reload()
    assert (max(most), order) == (1, [str(number) for number in range(9)])
    assert len([one for one in simulated.groups() if one.pg_options is options]) == 4


@pytest.mark.ranks(2)
def test_each_abandoned_creation_is_named_once(rank: int) -> None:
    """The creation that failed last may not have ended yet."""
    job = Job("sim", subgroups=[(0, 1)] * 4, parallelism=8)
    reloadpg.offload()
    held = [faults.inject(faults.Fault("create", "stall", group=f"{k}@*")) for k in (1, 2, 3)]
    store = base_store().clone()

    def fail(_: Any) -> None:
        assert all(one.wait_fired(60) for one in held)
        store.set(f"test/{rank}", "the others have begun")
        store.wait(["test/0", "test/1"])  # a rank that knows of a failure starts no creation
        raise RuntimeError("after the others have begun")

    faults.inject(faults.Fault("create", "call", group="4@*", call=fail))
    with pytest.raises(reloadpg.ReloadpgError):
        reloadpg.reload()
    unfinished = sorted(reloadpg.status().unfinished)
    faults.clear_faults()
    reloadpg.reload()
    job.assert_live()
    named = [text for text in unfinished if "<ReloadableProcessGroup '4'" not in text]
    assert len(named) == 3
    for k, text in enumerate(named):
        assert f"<ReloadableProcessGroup '{k + 1}'" in text
        assert text.count("ReloadableProcessGroup") == 1


@pytest.mark.ranks(2)
def test_a_thread_that_cannot_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reload has raised: a group that is created later is dropped."""
    job = Job("sim", subgroups=[(0, 1)] * 2, parallelism=2)
    reloadpg.offload()
    first = faults.inject(faults.Fault("create", "stall", group="1@*"))
    start, begun, store = threading.Thread.start, list[str](), base_store().clone()

    def limited(thread: threading.Thread) -> None:
        begun.append(thread.name)
        if begun.count("reloadpg-reload") == 4:  # the operation, WORLD, and two groups
            assert first.wait_fired(60)
            meet("both start it", 2, store=store)  # a rank that knows of a failure starts no thread
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(reloadpg.ReloadpgError, match="start a thread"):
        reloadpg.reload()
    faults.clear_faults()
    assert eventually(lambda: reloadpg.status().unfinished == ())
    assert {group.state for group in reloadpg.status().groups} == {"failed"}
    reloadpg.reload()
    job.assert_live()


@pytest.mark.ranks(2)
def test_by_default_groups_of_an_unknown_backend_take_turns(rank: int) -> None:
    """Nothing is known about its locks, so no thread waits for peers while another one does."""
    job = Job("sim", subgroups=[(0, 1)] * 2)
    inside: set[int] = set()
    together: list[int] = []
    second = threading.Event()

    def work(_: Any) -> None:
        inside.add(threading.get_ident())
        together.append(len(inside))
        if len(inside) > 1:
            second.set()
        second.wait(0.3)  # for another thread, if there is one
        inside.discard(threading.get_ident())

    for event in ("release", "create"):
        faults.inject(faults.Fault(event, "call", call=work, times=None))
    reloadpg.offload()
    reloadpg.reload()
    assert together == [1] * 6
    job.assert_live()
