"""One job of two ranks: its log, its status files and its reports.

It offloads and reloads twice, and then fails an offload on all ranks and reloads.
"""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg import observability


@dataclass
class Job:
    """One rank of the job, and what it has written."""

    rank: int
    directory: Path
    log: io.StringIO
    reports: list[reloadpg.Report]
    error: str
    """The error of the offload that failed."""


def run(rank: int, directory: Path) -> Job:
    """Enable everything and run the operations."""
    text = io.StringIO()
    printer = logging.StreamHandler(text)
    printer.setFormatter(logging.Formatter("rank %(rank)s %(name)s %(levelname)s"))
    logging.getLogger().addHandler(printer)
    logging.getLogger("reloadpg").setLevel(logging.INFO)

    reloadpg.install(backends={"gloo"})
    observability.name_rank_in_records()
    end_publishing = observability.publish_status(directory)
    reports: list[reloadpg.Report] = []
    reloadpg.on_report(reports.append)

    worlds.init("gloo")
    dist.new_group([0, 1], group_desc="pair")
    for _ in range(2):
        with reloadpg.offloaded():
            pass
    remove = reloadpg.on_offload(lambda: 1 / 0)
    with pytest.raises(reloadpg.ReloadpgError) as failed:
        reloadpg.offload()
    remove()
    reloadpg.offload()
    logging.getLogger("reloadpg.environment.somewhere").warning("a child's record")
    end_publishing()
    for thread in _status_threads():
        thread.join(60)
    assert _status_threads() == []
    return Job(rank, directory, text, reports, type(failed.value).__name__)


def _status_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "reloadpg-status"]


# ---------------------------------------------------------------------------------------------


def check_log(job: Job) -> None:
    """Each record has the rank, also of child loggers of ``reloadpg`` at the root's handler."""
    lines = job.log.getvalue().splitlines()
    assert f"rank {job.rank} reloadpg INFO" in lines
    assert f"rank {job.rank} reloadpg.environment.somewhere WARNING" in lines
    assert all(line.startswith(f"rank {job.rank} ") for line in lines)


def check_status_file(job: Job) -> None:
    """It has the last state and report."""
    record = json.loads((job.directory / f"rank-{job.rank}.json").read_text())
    assert set(record) == {
        *(
            "version",
            "pid",
            "started",
            "process_table",
            "rank",
            "world_size",
            "host",
            "time",
            "exited",
            "installed",
        ),
        *("status", "last_report", "last_ms", "running", "collectives"),
    }
    assert (record["version"], record["rank"], record["world_size"]) == (1, job.rank, 2)
    assert (record["pid"], record["installed"]) == (os.getpid(), True)
    assert record["status"]["state"] == "offloaded"
    assert [group["desc"] for group in record["status"]["groups"]] == ["default_pg", "pair"]
    last = json.loads(job.reports[-1].to_json())
    assert record["last_report"] == last
    assert record["last_ms"] == {one.operation: one.total_ms for one in job.reports}
    assert record["time"] >= last["started_at"] + last["total_ms"] / 1e3 - 0.01


def check_reports(job: Job) -> None:
    """Each operation has one, also the one that failed."""
    made = [(one.operation, bool(one.error)) for one in job.reports]
    cycle = [("offload", False), ("reload", False)]
    assert made == [*cycle, *cycle, ("offload", True), ("offload", False)]
    assert job.error in job.reports[4].error  # the error that the call raised
    assert {(one.rank, one.world_size) for one in job.reports} == {(job.rank, 2)}


@pytest.mark.ranks(2, timeout=120)
def test_a_job_is_observed_on_each_rank(rank: int, tmp_path: Path) -> None:
    job = run(rank, tmp_path)
    for check in (check_log, check_status_file, check_reports):
        check(job)
    reloadpg.environment.barrier("all have written")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]
