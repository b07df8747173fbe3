"""Recovery over torch's ProcessGroupNCCL, on stand-ins for CUDA and NCCL."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.nccl_job import on_engines
from helpers.replacing import RANKS, VICTIM, die, incarnation, run_replaced

import reloadpg
from reloadpg.cli.job import JobView
from reloadpg.cli.records import read_directory
from reloadpg.observability import publish_status
from reloadpg.testing import standins
from reloadpg.testing.standins import Fault

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]


@on_engines(2, TORCH_NCCL_TRACE_BUFFER_SIZE="200")  # torch 2.8 records nothing by default
def test_a_hang_shows_what_the_flight_recorder_has(engine: str, rank: int, tmp_path: Path) -> None:
    """The collective that the other rank has started, and its state on the device.

    Rank 1 delays a collective until the status of the job names it, and where rank 0 waits for it;
    a record that was written before has another position.
    """
    waiting = "rank 0 is in synchronize (torch/cuda/__init__.py:"
    unfinished = "; not completed: all_reduce [3], number 2 of group '0', scheduled"
    torch.cuda.set_device(rank)
    reloadpg.install()
    end = publish_status(tmp_path)
    dist.init_process_group("nccl")
    reloadpg.offload()
    reloadpg.reload()  # the recorder has the generation in the group's name
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor)
    remedy = ""
    while rank == 1 and (waiting not in remedy or unfinished not in remedy):
        found = JobView(read_directory(tmp_path)).lasting_findings()
        remedy = "".join(one.remedy for one in found if one.check == "collective")
        time.sleep(0.2)  # between two looks
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    end()
    assert rank == 0 or unfinished in remedy.partition(waiting)[2]


@on_engines(2, TORCH_NCCL_TRACE_BUFFER_SIZE="200")
def test_a_receive_that_waits_for_its_send_is_shown(engine: str, rank: int, tmp_path: Path) -> None:
    """All ranks have begun as many collectives. The position of the other rank is shown, too."""
    torch.cuda.set_device(rank)
    reloadpg.install()
    end = publish_status(tmp_path)
    dist.init_process_group("nccl")
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor)
    for one in range(2):  # the first one connects
        if rank == 1:
            dist.irecv(tensor, 0)
        elif one == 0:
            dist.send(tensor, 1)
    found: list[str] = []
    while rank == 0 and not found:
        findings = JobView(read_directory(tmp_path)).lasting_findings()
        found = [f"{one.message} {one.remedy}" for one in findings if one.check == "collective"]
        time.sleep(0.2)  # between two looks
    if rank == 0:
        dist.send(tensor, 1)
    torch.cuda.synchronize()
    end()
    if rank == 0:
        head = "rank 1 in a collective, send or receive that has not completed; "
        assert found[0].startswith(head)
        waiting, _, other = found[0].partition("\nrank 0 is in ")
        assert "; not completed: recv 1<-0" in waiting
        assert ", number 2 of group '0', scheduled" in waiting
        assert "test_a_receive_that_waits" in other


class Injected(Exception):
    """The injected error."""


@pytest.mark.ranks(2, standins=True, timeout=240)
def test_a_wait_for_the_device_ends_when_a_peer_requests_a_recovery(rank: int) -> None:
    """Before the timeout of the collective that the peer does not join.

    The recovery does not abort a communicator again while NCCL aborts it, which takes long.
    """
    torch.cuda.set_device(rank)
    standins.inject(Fault("delay", "abort", seconds=1.0))
    reloadpg.install(recoverable=True, timeout=600)
    dist.init_process_group("nccl", timeout=timedelta(seconds=600))
    dist.all_reduce(torch.ones(1, device="cuda"))  # connected: an abort cannot end NCCL's init
    seen = []
    for step in reloadpg.recovery.retrying(range(2), on=Injected):
        with step:
            if (rank, step.number, step.attempt) == (1, 0, 1):
                raise Injected
            tensor = torch.ones(1, device="cuda")
            dist.all_reduce(tensor)
            total = tensor.item()  # waits for the device, and cannot be interrupted
        if step.complete:
            seen.append((step.number, step.attempt, total))
    assert seen == [(0, 2, 2.0), (1, 1, 2.0)]


class Counter:
    """An object with a state on the device."""

    def __init__(self) -> None:
        self.count = torch.zeros(1, device="cuda")

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.count = state["count"]


def replaced(rank: int, size: int) -> list[Any]:
    """Rank 2 dies in its second step."""
    torch.cuda.set_device(rank)
    reloadpg.install(recoverable=True, timeout=120)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120))
    reloadpg.recovery.rejoin()
    seen, counter = {"sum": torch.zeros(1, device="cuda"), "shape": (1, 2)}, Counter()
    for step in reloadpg.recovery.retrying(range(3), state=(seen, counter), replicas=range(size)):
        with step as number:
            if (rank, number, incarnation()) == (VICTIM, 1, 0):
                die()
            tensor = torch.ones(1, device="cuda")
            dist.all_reduce(tensor)
            seen["sum"] += tensor
            counter.count += 1
    tensors = [(one.item(), one.device.type) for one in (seen["sum"], counter.count)]
    return [*tensors, seen["shape"]]


def test_a_new_process_gets_values_of_the_same_kind() -> None:
    """Tensors on the device, and tuples."""
    results = run_replaced(replaced, standins=True)
    assert [one for one in results if one] == [[(12.0, "cuda"), (3.0, "cuda"), (1, 2)]] * RANKS


@on_engines(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_fault_before_the_first_collective_of_a_rebuilt_group_is_recovered(
    engine: str, victim: int, rank: int
) -> None:
    """The other rank is in that collective, in a default group that is bound to no device.

    A recoverable job connects its groups in the reload: torch could not end their connection.
    """
    torch.cuda.set_device(rank)
    reloadpg.install(recoverable=True, timeout=60)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    group: Any = dist.new_group([0, 1])
    seen = []
    for step in reloadpg.recovery.retrying(range(2), on=Injected):
        with step:
            reloadpg.offload()
            reloadpg.reload()
            if (rank, step.number, step.attempt) == (victim, 1, 1):
                raise Injected
            tensor = torch.ones(1, device="cuda")
            dist.all_reduce(tensor, group=group)
            total = tensor.item()
        if step.complete:
            seen.append((step.attempt, total))
    assert seen == [(1, 2.0), (2, 2.0)]


@on_engines(2)
@pytest.mark.parametrize("how", ["new", "used", "bound", "reloaded"])
def test_a_loop_warns_of_groups_that_cannot_be_ended_while_they_connect(
    engine: str, how: str, rank: int
) -> None:
    """As long as they have had no collective, whatever has created their communicators.

    Torch's first engine connects all of a bound default group, and splits it, in one call.
    """
    torch.cuda.set_device(rank)
    reloadpg.install(recoverable=True, timeout=60)
    device = {"device_id": torch.device("cuda", rank)} if how == "bound" else {}
    dist.init_process_group("nccl", **device)
    group = dist.new_group([0, 1])
    if how == "used":
        for one in (None, group):
            dist.all_reduce(torch.ones(1, device="cuda"), group=one)
    elif how == "reloaded":
        reloadpg.offload()
        reloadpg.reload()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in reloadpg.recovery.retrying(range(1)):
            with step:
                pass
    texts = [str(one.message) for one in seen if "past every timeout" in str(one.message)]
    assert len(texts) == (how == "new" or (how == "bound" and engine == "nccl2"))
    assert all(text.startswith("retrying(): 2 groups ") for text in texts)
    # The first send to a peer, whatever a group has done before.
    texts = [str(one.message) for one in seen if "no recovery completes" in str(one.message)]
    assert len(texts) == (rank == 0 and engine == "nccl2")
    assert all(text.startswith("retrying(): 2 groups ") for text in texts)


@on_engines(2)
@pytest.mark.parametrize("recoverable", [True, False])
def test_a_reload_warns_of_groups_that_cannot_be_ended_while_they_connect(
    engine: str, recoverable: bool, rank: int
) -> None:
    """In a loop, or in a recoverable job, with ``connect="none"``."""
    torch.cuda.set_device(rank)
    reloadpg.install(recoverable=recoverable, timeout=60)
    dist.init_process_group("nccl")

    def warned(**options: Any) -> bool:
        reloadpg.offload()
        report = reloadpg.reload(**options)
        dist.all_reduce(torch.ones(1, device="cuda"))
        return "past every timeout" in "".join(report.warnings)

    dist.all_reduce(torch.ones(1, device="cuda"))
    assert warned(connect="none") == recoverable
    for step in reloadpg.recovery.retrying(range(1)):
        with step:
            assert warned(connect="none")
            assert warned() == (not recoverable)
            assert not warned(connect="eager")
