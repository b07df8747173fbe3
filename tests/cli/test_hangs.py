"""``status`` and ``doctor`` on real jobs that hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hanging_rank import hanging_rank

from reloadpg.cli import main, records
from reloadpg.cli.doctor import diagnose
from reloadpg.cli.job import WAITING_S, JobView
from reloadpg.cli.records import LATE_S, read_directory
from reloadpg.testing import RankOutcome, run_ranks

LIMIT_S = 180.0
SIZE = 3

pytestmark = pytest.mark.timeout(600)


def until(condition: Callable[[], object], job: Job | None = None) -> None:
    """Poll until the condition holds; the limit is for a test that fails."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold"
        assert job is None or not job.run.done(), job.run.result()
        time.sleep(0.05)


class Job:
    """Ranks that call the functions they are sent."""

    def __init__(self, directory: Path, size: int, run: Future[list[RankOutcome]]) -> None:
        self.directory = directory
        self.status = directory / "status"
        self.run = run
        self._calls = [0] * size

    def call(self, name: str, *ranks: int) -> None:
        """Let ranks call a function of reloadpg."""
        for rank in ranks:
            part = self.directory / f".call-{rank}"
            part.write_text(name)
            part.replace(self.directory / f"call-{rank}-{self._calls[rank]}")
            self._calls[rank] += 1

    def await_done(self, *ranks: int) -> None:
        """Wait until these ranks have returned from their last call."""
        for rank in ranks:
            until((self.directory / f"done-{rank}-{self._calls[rank] - 1}").exists)

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to ranks that have not ended."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(int((self.directory / f"pid-{rank}").read_text()), number)

    def view(self) -> JobView:
        return JobView(read_directory(self.status))

    def are_waiting(self, *ranks: int) -> bool:
        """Whether these ranks wait at a barrier for others that have not called."""
        running = self.view().in_progress
        return running is not None and running.stuck and [*running.waiting] == [*ranks]

    def is_healthy(self, state: str) -> bool:
        """Whether all ranks report this state, and none is in an operation."""
        view = self.view()
        return view.ok and {one.state for one in view.ranks} == {state}


@contextmanager
def started(directory: Path, size: int = SIZE) -> Iterator[Job]:
    env = {"RELOADPG_STATUS_DIR": str(directory / "status")}
    settings: Any = {"env": env, "timeout": 3 * LIMIT_S, "check": False}
    with ThreadPoolExecutor() as pool:
        run = pool.submit(run_ranks, hanging_rank, size, args=(directory,), **settings)
        job = Job(directory, size, run)
        try:
            until(lambda: len(job.view().ranks) == size, job)
            until(lambda: all(len(one.status.groups) == 2 for one in job.view().ranks), job)
            yield job
        finally:
            job.send(signal.SIGKILL, *range(size))


@dataclass
class Snapshot:
    """The output of the commands at one time."""

    code: int
    page: str
    data: dict
    problems: list[str]
    first: str

    @classmethod
    def of(cls, job: Job) -> Snapshot:
        with redirect_stdout(StringIO()) as shown:
            code = main(["status", str(job.status)])
        diagnosis = diagnose(status_dir=job.status)
        assert diagnosis.findings[0].check == "job", diagnosis
        first = diagnosis.findings[0].message
        problems = [one.message for one in diagnosis.at("problem") if one.check == "job"]
        return cls(code, shown.getvalue(), job.view().to_dict(), problems, first)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Snapshot]:
    """One job that hangs in its first offload, and then with a stopped, a killed, and no live rank.

    No rank counts as silent if a busy machine delays it for some seconds.
    """
    seen = {}
    patient = mock.patch.object(records, "SILENT_S", LIMIT_S)
    with patient, started(tmp_path_factory.mktemp("hanging")) as job:
        job.call("offload", 0, 2)
        until(lambda: job.are_waiting(0, 2) and job.view().ranks[1].collectives.stack)
        seen["first offload"] = Snapshot.of(job)
        job.call("offload", 1)
        job.await_done(0, 1, 2)
        until(lambda: job.is_healthy("offloaded"))
        seen["offloaded"] = Snapshot.of(job)
        job.send(signal.SIGSTOP, 1)
        job.call("reload", 0, 2)
        until(lambda: job.view().absent("stopped") and job.are_waiting(0, 2))
        seen["stopped"] = Snapshot.of(job)
        job.send(signal.SIGCONT, 1)
        job.call("reload", 1)
        job.await_done(0, 1, 2)
        until(lambda: job.is_healthy("live"))
        job.call("offload", 0, 2)
        until(lambda: job.are_waiting(0, 2))
        job.send(signal.SIGKILL, 1)
        until(lambda: job.view().absent("gone"))
        seen["killed"] = Snapshot.of(job)
        job.send(signal.SIGKILL, 0, 2)
        until(lambda: len(job.view().absent("gone")) == SIZE)
        seen["dead"] = Snapshot.of(job)
    return seen


def test_a_missing_rank_is_named_with_its_line(snapshots: dict[str, Snapshot]) -> None:
    """At the top of the page; exit code 1."""
    snapshot = snapshots["first offload"]
    assert snapshot.code == 1
    lines = [" ".join(line.split()) for line in snapshot.page.splitlines()]
    assert "1 live" in snapshot.page.splitlines()[0]
    assert "2 in offload" in snapshot.page.splitlines()[0]
    assert lines[2].startswith("offload in progress on ranks 0, 2, since ")
    assert lines[2].endswith("before barrier 'enter'")
    assert lines[3].startswith("waiting ranks 0, 2, since ")
    assert lines[4] == "waits for rank 1: it has not called offload()"
    assert lines[5].startswith('-> rank 1 is at File "')
    assert "in next_call" in " ".join(lines[5:8])
    operation = snapshot.data["operation"]
    assert (operation["operation"], operation["phase"]) == ("offload", "enter")
    assert (operation["waiting"], operation["stuck"]) == ([0, 2], True)
    assert operation["waited_s"] >= WAITING_S
    assert operation["missing"] == {"it has not called offload()": [1]}
    assert "unknown" not in snapshot.page
    assert snapshot.data["generations"] == {"0": [0, 1, 2]}
    assert [len(one["status"]["groups"]) for one in snapshot.data["ranks"]] == [2, 2, 2]
    assert snapshot.first.startswith("offload: in progress on ranks 0, 2, since ")
    assert snapshot.problems == ["waits for: rank 1: it has not called offload()"]


class Case(NamedTuple):
    """What the commands show at one time."""

    name: str
    code: int
    headline: str
    missing: dict[str, list[int]] | None
    """The ranks that the operation in progress waits for, by the reason; None without one."""
    problem: str


CASES = (
    Case("offloaded", 0, "3 of 3 ranks: 3 offloaded", None, ""),
    Case(
        *("stopped", 1, "2 in reload, 1 stopped", {"stopped": [1]}),
        "waits for: rank 1: its process is stopped",
    ),
    Case(
        *("killed", 1, "2 in offload, 1 gone", {"gone": [1]}),
        "waits for: rank 1: its process is gone",
    ),
    Case("dead", 1, "3 of 3 ranks: 3 gone", None, "gone: ranks 0-2: "),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_that_cannot_continue_are_named(snapshots: dict[str, Snapshot], case: Case) -> None:
    """A stopped rank with a remedy, a killed one as gone. A job that continues has no problem."""
    snapshot = snapshots[case.name]
    operation = snapshot.data["operation"]
    assert (snapshot.code, operation and operation["missing"]) == (case.code, case.missing)
    assert case.headline in snapshot.page.splitlines()[0]
    assert bool(snapshot.problems) == bool(case.problem)
    assert not case.problem or any(one.startswith(case.problem) for one in snapshot.problems)
    rank = snapshot.data["ranks"][1]
    assert (f"kill -CONT {rank['pid']}" in snapshot.page) == (case.name == "stopped")
    assert snapshot.data["stopped"] == ([1] if case.name == "stopped" else [])
    assert (rank["age_s"] > LATE_S) or case.name != "killed"
