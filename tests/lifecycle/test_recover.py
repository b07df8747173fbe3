"""After a fault, ``recover()`` recreates all communicators behind the same objects."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import (
    Injected,
    Job,
)

import reloadpg

FAULTY = 1


@pytest.mark.ranks(4)
def test_rank_0_warns_of_a_recovery_and_only_reload_callbacks_are_called(rank: int) -> None:
    """The warning has the rank that requested the recovery, its reason, and the duration.

    Callbacks before a reload are called only if the job was offloaded.
    """
    job = Job("gloo")
    warnings: list[str] = []
    called: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg").addHandler(handler)
    reloadpg.on_offload(lambda: called.append("offload"))
    reloadpg.on_reload(lambda: called.append("reload"))
    reloadpg.on_reload(lambda: called.append("before"), before=True)
    reloadpg.recovery.recover("a link is down" if rank == FAULTY else None)
    assert called == ["reload"]
    assert job.sums()
    assert len(warnings) == (rank == 0), warnings
    for text in warnings:
        assert re.search(r"^recover: 4 groups in [\d.]+ ms, generation 1; rank 1: a link", text)
    reloadpg.offload()
    called.clear()
    reloadpg.recovery.recover()
    assert called == ["before", "reload"]
    job.assert_live()


# -- consecutive recoveries -----------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_fault_names_the_line_of_the_program_and_its_collective(rank: int) -> None:
    """Frames within torch are omitted, and so is the collective if the program itself raises."""
    Job("gloo", subgroups=())

    def step() -> None:
        if rank == FAULTY:
            raise Injected("of the program")
        dist.all_reduce(None)  # type: ignore[arg-type]

    try:
        step()
    except (Injected, TypeError):
        report = reloadpg.recovery.recover()
    first = step.__code__.co_firstlineno
    own, of_torch = (f"test_recover.py:{first + line} (step)" for line in (2, 3))
    assert [one.where for one in report.faults] == [f"all_reduce at {of_torch}", own]


# -- missing ranks, and jobs without groups -------------------------------------------------------


@pytest.mark.ranks(4)
def test_ranks_with_different_groups_cannot_recover(rank: int) -> None:
    """All ranks name the group, and no group is live."""
    job = Job("gloo")
    ring = job.groups.pop("g4")
    if rank == FAULTY:
        dist.destroy_process_group(ring)
    with pytest.raises(reloadpg.DisagreementError, match=r"group '5'.*without a communicator"):
        reloadpg.recovery.recover()
    assert job.states() == {"failed"}


@pytest.mark.ranks(1)
def test_recover_without_a_job_changes_nothing() -> None:
    reloadpg.install(backends={"gloo"})
    report = reloadpg.recovery.recover("nothing")
    assert not report.changed
    assert "not initialized" in report.note
    assert not reloadpg.recovery.recovery_requested()


@pytest.mark.parametrize("given", [0, -1.0, float("nan")])
def test_the_timeout_must_be_positive(given: float) -> None:
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="timeout="):
        reloadpg.recovery.recover(timeout=given)


def _second(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@pytest.mark.ranks(2)
def test_all_backends_of_a_mixed_group_are_recreated() -> None:
    """Any of them may be faulty. An offload keeps the backend that is not selected."""
    dist.Backend.register_backend("second", _second, devices=["meta"])
    reloadpg.install(backends={"gloo"})
    dist.init_process_group("cpu:gloo,meta:second")
    world: Any = dist.group.WORLD
    meta = torch.device("meta")
    kept = world._get_backend(meta)
    reloadpg.offload()
    assert world._get_backend(meta) is kept
    reloadpg.recovery.recover("test")
    assert world._get_backend(meta) is not kept
    tensors = [torch.ones(1), torch.ones(1)]
    dist.all_reduce(tensors[0])
    world._get_backend(meta).allreduce([tensors[1]]).wait()
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
