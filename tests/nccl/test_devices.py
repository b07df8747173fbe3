"""A rank's device is a fact of its job, not of the calling thread (failure 42).

Each job repeats the operations from the main thread, a new thread and a pool, where device 0 is
current, and from the main thread after something has made device 0 current.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.nccl_job import (
    CAN_SUSPEND,
    ENGINES,
    LIMIT,
    MIB,
    engine_variables,
    eventually,
    on_engines,
    on_ranks,
    summed,
)

import reloadpg
from reloadpg import environment
from reloadpg.c10d import devices
from reloadpg.integrations import colocated

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

CONTEXT_MIB = 300
"""Of a process on each device that it uses."""
BLOCKED_S = 1.0
"""Seconds after which a call that has not returned is blocked; it takes milliseconds."""


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(LIMIT.total_seconds())


class Job:
    """Two ranks on two devices, with WORLD and one more group."""

    def __init__(self, rank: int, *, bound: bool, swapped: bool, **options: Any) -> None:
        self.index = 1 - rank if swapped else rank
        self.rank = rank
        torch.cuda.set_device(self.index)
        os.environ["LOCAL_RANK"] = str(self.index)  # to which ProcessGroupNCCL2 is always bound
        reloadpg.install(timeout=LIMIT, **options)
        device = {"device_id": torch.device("cuda", self.index)} if bound else {}
        dist.init_process_group("nccl", timeout=LIMIT, **device)
        self.groups = [None, dist.new_group([0, 1])]
        self.pool = ThreadPoolExecutor(1)
        self.zero = False
        self.check_sums()
        self.live = self.used()

    def check_sums(self) -> None:
        with torch.cuda.device(self.index):
            assert [summed(group, self.rank) for group in self.groups] == [3.0, 3.0]

    def here(self) -> int:
        """MiB in use on this rank's device, by all processes."""
        with torch.cuda.device(self.index):
            free, total = torch.cuda.mem_get_info()
        return int(total - free) // MIB

    def used(self) -> int:
        """The same while no rank is in an operation."""
        environment.barrier("before")
        torch.cuda.empty_cache()
        environment.barrier("emptied")
        amount = self.here()
        environment.barrier("read")
        return amount

    @staticmethod
    def has_context(index: int) -> bool:
        return bool(torch._C._cuda_hasPrimaryContext(index))

    def check_report(self, report: reloadpg.Report) -> None:
        """Its memory is that of this rank's device."""
        assert report.changed, report
        assert report.memory["after"]["device"] // MIB == self.here()

    def check_live(self) -> None:
        """The communicators are those of before: no second set, and none on another device."""
        found = reloadpg.status()
        if CAN_SUSPEND:
            assert all(group.memory_bytes for group in found.groups)
        assert found.memory["device"] // MIB == self.here()
        self.check_sums()
        assert self.used() == self.live
        assert self.zero or not self.has_context(1 - self.index)

    def cycle(self, connect: Any, *, wait: bool = True) -> None:
        offload: Any = reloadpg.offload(wait=wait)
        self.check_report(offload if wait else offload.result())
        environment.barrier("released")
        reload: Any = reloadpg.reload(connect=connect, wait=wait)
        self.check_report(reload if wait else reload.result())

    def eager(self) -> None:
        self.cycle("eager")

    def canary(self) -> None:
        self.cycle("canary")

    def without_waiting(self) -> None:
        self.cycle("canary", wait=False)

    def recover(self) -> None:
        self.check_report(reloadpg.recovery.recover("a test"))

    def rollout(self) -> None:
        block = colocated(connect="canary")
        with block:
            environment.barrier("rollout")
        assert block.offload_report is not None
        self.check_report(block.reload_report)  # type: ignore[arg-type]

    def from_everywhere(self, operations: list[Callable[[], None]]) -> None:
        """Perform these operations from each kind of thread; its current device does not change."""
        ways = [self._in_new_thread, self._in_pool, self._here, self._on_device_0]
        for way in ways:
            for operation in operations:
                way(operation)
                self.check_live()

    def _in_new_thread(self, call: Callable[[], None]) -> None:
        in_thread(lambda: self._keeps_device(call, 0))

    def _in_pool(self, call: Callable[[], None]) -> None:
        self.pool.submit(self._keeps_device, call, 0).result(LIMIT.total_seconds())

    def _here(self, call: Callable[[], None]) -> None:
        self._keeps_device(call, self.index)

    def _on_device_0(self, call: Callable[[], None]) -> None:
        if not self.zero:
            self.zero = True
            torch.cuda.set_device(0)
            self.live = self.used()
        self._keeps_device(call, 0)

    @staticmethod
    def _keeps_device(call: Callable[[], None], index: int) -> None:
        assert torch.cuda.current_device() == index
        call()
        assert torch.cuda.current_device() == index


def in_worlds(*more: Any) -> Any:
    """Each engine, bound or not, with rank 0 on device 0 or on device 1."""
    return pytest.mark.parametrize(
        ("bound", "swapped", "engine"),
        [
            pytest.param(
                bound,
                swapped,
                engine,
                marks=on_ranks(
                    2, RELOADPG_STANDIN_CONTEXT_MIB=str(CONTEXT_MIB), **engine_variables(engine)
                ),
                id=f"{engine}-{'bound' if bound else 'unbound'}-{'swapped' if swapped else 'same'}",
            )
            for engine in ENGINES
            for bound in (True, False)
            for swapped in (False, True)
        ],
    )


@in_worlds()
def test_each_operation_uses_the_rank_s_device(
    bound: bool, swapped: bool, engine: str, rank: int
) -> None:
    """Whichever device is current in the calling thread."""
    job = Job(rank, bound=bound, swapped=swapped)
    job.from_everywhere([job.recover, job.eager, job.canary, job.without_waiting, job.rollout])


@pytest.mark.skipif(not CAN_SUSPEND, reason="torch 2.12 and later can suspend")
@in_worlds()
def test_communicators_are_suspended_on_the_rank_s_device(
    bound: bool, swapped: bool, engine: str, rank: int
) -> None:
    job = Job(rank, bound=bound, swapped=swapped, strategy="suspend")
    job.from_everywhere([job.eager, job.without_waiting])


@on_engines(2)
def test_the_wait_before_a_release_is_for_the_rank_s_device(engine: str, rank: int) -> None:
    """Also in a thread on another device: a collective that still runs is not destroyed."""
    job = Job(rank, bound=False, swapped=True)
    started = threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), devices.synchronize()), daemon=True)
    if rank == 0:
        dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
        thread.start()
        assert started.wait(LIMIT.total_seconds())
        thread.join(BLOCKED_S)
        assert thread.is_alive()
    environment.barrier("seen")
    if rank == 1:
        dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
    elif rank == 0:
        assert eventually(lambda: not thread.is_alive())
    job.check_sums()


@on_ranks(2, **engine_variables("legacy"))
def test_the_device_is_chosen_after_the_group_was_created(rank: int) -> None:
    """Nothing is recorded then: the device with a context counts, and of two that with memory."""
    reloadpg.install(timeout=LIMIT)
    dist.init_process_group("nccl", timeout=LIMIT)
    assert devices.of_rank() == ()
    torch.cuda.set_device(1 - rank)
    kept = torch.ones(1 << 20, device="cuda")
    assert in_thread(devices.of_rank) == (1 - rank,)
    torch.cuda.set_device(rank)
    assert devices.of_rank() == (1 - rank,)
    torch.cuda.set_device(1 - rank)
    assert summed(None, rank) == 3.0
    del kept


@on_ranks(1, **engine_variables("legacy"))
def test_communicators_on_two_devices(rank: int) -> None:
    """Both are waited for, and the report has the sum of their memory."""
    torch.cuda.set_device(0)
    reloadpg.install(min_size=1, timeout=LIMIT)
    dist.init_process_group("nccl", timeout=LIMIT)
    other = dist.new_group([0])
    assert summed(None, 0) == 1.0
    with torch.cuda.device(1):
        assert summed(other, 0) == 1.0
    reloadpg.offload()
    assert devices.of_rank() == (0, 1)
    reloadpg.reload(connect="canary")
    free = [torch.cuda.mem_get_info(index) for index in (0, 1)]
    assert reloadpg.status().memory["device"] == sum(total - left for left, total in free)
    assert devices.index_for(other) == 1  # type: ignore[arg-type]
    with torch.cuda.device(1):
        assert summed(other, 0) == 1.0
    assert summed(None, 0) == 1.0


@on_engines(2)
def test_a_difference_is_said_once(engine: str, rank: int) -> None:
    """In the report, and in one line of the log."""
    job = Job(rank, bound=False, swapped=True)
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg").addHandler(handler)
    text = "the current device of the calling thread is cuda:0"
    reports = [in_thread(reloadpg.offload), in_thread(reloadpg.reload)]
    says = [any(text in warning for warning in report.warnings) for report in reports]
    assert says == [job.index != 0] * 2
    assert sum(text in line for line in told) == (job.index != 0)
    with reloadpg.offloaded():
        pass
    assert not any(text in warning for warning in reloadpg.offload().warnings)
