"""Recovery over torch's ProcessGroupNCCL, on stand-ins for CUDA and NCCL."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import Injected
from helpers.nccl_job import on_engines
from helpers.repeating import repeat

import reloadpg
from reloadpg.cli.status import JobView
from reloadpg.observability.record import read_directory

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

LIMIT, SHORT = timedelta(seconds=60), timedelta(seconds=3)


def summed(group: Any) -> float:
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@on_engines(2, TORCH_NCCL_TRACE_BUFFER_SIZE="200")  # torch 2.8 records nothing by default
def test_a_hang_shows_what_the_flight_recorder_has(engine: str, rank: int, tmp_path: Path) -> None:
    """The collective that the other rank has started, and its state on the device.

    Rank 1 delays a collective until the status of the job names it, and where rank 0 waits for it;
    a record that was written before has another position.
    """
    waiting = "rank 0 is in synchronize (torch/cuda/__init__.py:"
    unfinished = "; not completed: all_reduce [3], number 2 of group '0', scheduled"
    torch.cuda.set_device(rank)
    os.environ["RELOADPG_STATUS_DIR"] = str(tmp_path)
    reloadpg.install()
    dist.init_process_group("nccl")
    reloadpg.offload()
    reloadpg.reload()  # the recorder has the generation in the group's name
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor)
    remedy = ""
    while rank == 1 and (waiting not in remedy or unfinished not in remedy):
        found = JobView(read_directory(tmp_path)).findings
        remedy = "".join(one.remedy for one in found if one.check == "collective")
        time.sleep(0.2)  # between two looks
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    assert rank == 0 or unfinished in remedy.partition(waiting)[2]


@on_engines(2, TORCH_NCCL_TRACE_BUFFER_SIZE="200")
def test_a_receive_that_waits_for_its_send_is_shown(engine: str, rank: int, tmp_path: Path) -> None:
    """All ranks have begun as many collectives. The position of the other rank is shown, too.

    A record that was written while rank 0 read the files has a position in the reading.
    """
    torch.cuda.set_device(rank)
    os.environ["RELOADPG_STATUS_DIR"] = str(tmp_path)
    reloadpg.install()
    dist.init_process_group("nccl")
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor)
    for one in range(2):  # the first one connects
        if rank == 1:
            dist.irecv(tensor, 0)
        elif one == 0:
            dist.send(tensor, 1)
    found: list[str] = []
    while rank == 0 and "test_a_receive_that_waits" not in "".join(found):
        findings = JobView(read_directory(tmp_path)).findings
        found = [f"{one.message} {one.remedy}" for one in findings if one.check == "collective"]
        time.sleep(0.2)  # between two looks
    if rank == 0:
        dist.send(tensor, 1)
    torch.cuda.synchronize()
    if rank == 0:
        head = "rank 1 in a collective, send or receive that has not completed; "
        assert found[0].startswith(head)
        waiting, _, other = found[0].partition("\nrank 0 is in ")
        assert "; not completed: recv 1<-0" in waiting
        assert ", number 2 of group '0', scheduled" in waiting
        assert "test_a_receive_that_waits" in other


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

    def step(number: int, attempt: int) -> float:
        fails = (number, attempt) == (1, 1)
        reloadpg.offload()
        reloadpg.reload()
        if fails and rank == victim:
            raise Injected
        # The rank whose peer does not come: a wait for the device lasts until this timeout.
        dist.distributed_c10d._set_pg_timeout(SHORT if fails else LIMIT, group)
        return summed(group)

    assert repeat(step, 2) == [(1, 2.0), (2, 2.0)]


@on_engines(2)
@pytest.mark.parametrize("recoverable", [True, False])
def test_a_reload_warns_of_groups_that_cannot_be_ended_while_they_connect(
    engine: str, recoverable: bool, rank: int
) -> None:
    """In a recoverable job, with ``connect="none"``."""
    torch.cuda.set_device(rank)
    reloadpg.install(recoverable=recoverable, timeout=60)
    dist.init_process_group("nccl")

    def warned(**options: Any) -> bool:
        reloadpg.offload()
        report = reloadpg.reload(**options)
        summed(None)
        return "past every timeout" in "".join(report.warnings)

    summed(None)
    assert warned(connect="none") == recoverable
    assert not warned()
    assert not warned(connect="eager")
