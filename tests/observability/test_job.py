"""One job of two ranks: its log, its status files and its reports.

It offloads and reloads twice, and then fails an offload on all ranks and reloads.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg.observability import publish
from reloadpg.observability.record import decoded


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

    os.environ["RELOADPG_STATUS_DIR"] = str(directory)
    reloadpg.install(backends={"gloo"})
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
    publish._publishers[os.getpid()].stop()
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
    record = decoded((job.directory / f"rank-{job.rank}.json").read_text())
    assert (record.rank, record.world_size, record.pid) == (job.rank, 2, os.getpid())
    assert (record.state, record.groups, record.generation) == ("offloaded", 2, 2)
    assert record.error == ""  # the last operation raised none
    assert record.last_ms == {one.operation: one.total_ms for one in job.reports}
    last = job.reports[-1]
    assert record.time >= last.started_at + last.total_ms / 1e3 - 0.01


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


@pytest.mark.ranks(1)
@pytest.mark.parametrize("level", ["", "DEBUG", "ERROR"])
def test_records_are_printed_until_the_program_configures_logging(level: str) -> None:
    """From warnings on, or from the level of the logger ``reloadpg``."""
    if level:
        logging.getLogger("reloadpg").setLevel(level)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        reloadpg.install()
        logging.getLogger("reloadpg.part").debug("a detail")
        logging.getLogger("reloadpg").warning("a problem")
        logging.getLogger("reloadpg").error("an error")
        logging.getLogger().addHandler(logging.StreamHandler(io.StringIO()))
        logging.getLogger("reloadpg").error("printed by the program")
    lines = ["DEBUG reloadpg.part [rank 0]: a detail", "WARNING reloadpg [rank 0]: a problem"]
    least = {"": 1, "DEBUG": 0, "ERROR": 2}[level]
    assert printed.getvalue().splitlines() == [
        *lines[least:],
        "ERROR reloadpg [rank 0]: an error",
    ]
