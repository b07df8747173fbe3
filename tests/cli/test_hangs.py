"""``status`` and ``doctor`` on jobs that hang: real ranks that wait for others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from cli_process import environment

from reloadpg.cli import main, records
from reloadpg.cli.doctor import diagnose
from reloadpg.cli.job import WAITING_S, JobView
from reloadpg.cli.records import LATE_S, read_directory

LIMIT_S = 180.0
SIZE = 3
RANK = Path(__file__).parents[1] / "helpers" / "hanging_rank.py"

pytestmark = pytest.mark.timeout(600)


def until(condition: Callable[[], object], job: Job | None = None) -> None:
    """Ask again until it holds; the bound is for a test that would fail."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        assert job is None or all(one.poll() is None for one in job.ranks), "a rank has ended"
        time.sleep(0.05)


class Job:
    """Ranks in processes of their own, that do what they are told."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.status = directory / "status"
        env = environment(RELOADPG_STATUS_DIR=str(self.status))
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK), str(directory), str(rank), str(size)], env=env
            )
            for rank in range(size)
        ]
        self._calls = [0] * size

    def call(self, name: str, *ranks: int) -> None:
        """Let ranks call a function of reloadpg, or ``end``."""
        for rank in ranks:
            part = self.directory / f".call-{rank}"
            part.write_text(name)
            part.replace(self.directory / f"call-{rank}-{self._calls[rank]}")
            self._calls[rank] += 1

    def await_done(self, *ranks: int) -> None:
        """Wait until these ranks have returned from what they were last told to call."""
        for rank in ranks:
            until((self.directory / f"done-{rank}-{self._calls[rank] - 1}").exists)

    def view(self) -> JobView:
        return JobView(read_directory(self.status))

    def are_stuck(self, *ranks: int) -> bool:
        """Whether these ranks wait at a barrier, for others that are not on their way."""
        running = self.view().in_progress
        return running is not None and running.stuck and [*running.waiting] == [*ranks]

    def is_well(self, state: str) -> bool:
        """Whether all ranks say that they are in this state, and none is in an operation."""
        view = self.view()
        return view.ok and {one.state for one in view.ranks} == {state}


@contextmanager
def started(directory: Path, size: int = SIZE) -> Iterator[Job]:
    job = Job(directory, size)
    try:
        until(lambda: len(job.view().ranks) == size, job)
        until(lambda: all(len(one.status.groups) == 2 for one in job.view().ranks), job)
        yield job
    finally:
        for process in job.ranks:
            process.kill()
            process.wait()


@dataclass
class Moment:
    """What the commands say at one moment of a job."""

    code: int
    page: str
    data: dict
    problems: list[str]
    first: str

    @classmethod
    def of(cls, job: Job) -> Moment:
        with redirect_stdout(StringIO()) as shown:
            code = main(["status", str(job.status)])
        diagnosis = diagnose(status_dir=job.status)
        assert diagnosis.findings[0].check == "job", diagnosis
        first = diagnosis.findings[0].message
        problems = [one.message for one in diagnosis.at("problem") if one.check == "job"]
        return cls(code, shown.getvalue(), job.view().to_dict(), problems, first)


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Moment]:
    """One job in all its hangs: its first offload, then stopped, killed and dead ranks.

    No rank is called silent that a busy machine holds up for some seconds.
    """
    seen = {}
    patient = mock.patch.object(records, "SILENT_S", LIMIT_S)
    with patient, started(tmp_path_factory.mktemp("hanging")) as job:
        job.call("offload", 0, 2)
        until(lambda: job.are_stuck(0, 2) and job.view().ranks[1].collectives.stack)
        seen["first offload"] = Moment.of(job)
        job.call("offload", 1)
        job.await_done(0, 1, 2)
        until(lambda: job.is_well("offloaded"))
        seen["offloaded"] = Moment.of(job)
        job.ranks[1].send_signal(signal.SIGSTOP)
        job.call("reload", 0, 2)
        until(lambda: job.view().absent("stopped") and job.are_stuck(0, 2))
        seen["stopped"] = Moment.of(job)
        job.ranks[1].send_signal(signal.SIGCONT)
        job.call("reload", 1)
        job.await_done(0, 1, 2)
        until(lambda: job.is_well("live"))
        job.call("offload", 0, 2)
        until(lambda: job.are_stuck(0, 2))
        job.ranks[1].kill()
        job.ranks[1].wait()
        until(lambda: job.view().absent("gone"))
        seen["killed"] = Moment.of(job)
        for rank in (0, 2):
            job.ranks[rank].kill()
        until(lambda: len(job.view().absent("gone")) == SIZE)
        seen["dead"] = Moment.of(job)
    return seen


def test_a_missing_rank_in_the_first_offload(moments: dict[str, Moment]) -> None:
    """What waits, where, since when, for whom, and what to do: first on the page, and code 1."""
    moment = moments["first offload"]
    assert moment.code == 1
    lines = [" ".join(line.split()) for line in moment.page.splitlines()]
    assert "1 live" in moment.page.splitlines()[0]
    assert "2 in offload" in moment.page.splitlines()[0]
    assert lines[2].startswith("offload in progress on ranks 0, 2, since ")
    assert lines[2].endswith("before barrier 'enter'")
    assert lines[3].startswith("waiting ranks 0, 2, since ")
    assert lines[4] == "waits for rank 1: it has not called offload()"
    assert lines[5].startswith('-> rank 1 is at File "')
    assert "in next_call" in " ".join(lines[5:8])
    operation = moment.data["operation"]
    assert (operation["operation"], operation["phase"]) == ("offload", "enter")
    assert (operation["waiting"], operation["stuck"]) == ([0, 2], True)
    assert operation["waited_s"] >= WAITING_S
    assert operation["missing"] == {"it has not called offload()": [1]}
    assert "unknown" not in moment.page
    assert moment.data["generations"] == {"0": [0, 1, 2]}
    assert [len(one["status"]["groups"]) for one in moment.data["ranks"]] == [2, 2, 2]
    assert moment.first.startswith("offload: in progress on ranks 0, 2, since ")
    assert moment.problems == ["waits for: rank 1: it has not called offload()"]


def test_a_job_that_goes_on_is_well(moments: dict[str, Moment]) -> None:
    """All came in the end: nothing is in progress, no problem, exit code 0."""
    moment = moments["offloaded"]
    assert (moment.code, moment.data["operation"], moment.problems) == (0, None, [])
    assert "3 of 3 ranks: 3 offloaded" in moment.page


def test_a_stopped_rank_is_marked(moments: dict[str, Moment]) -> None:
    """It cannot say where it is; this host can say that it is stopped."""
    moment = moments["stopped"]
    assert moment.code == 1
    assert "2 in reload, 1 stopped" in moment.page.splitlines()[0]
    assert moment.data["operation"]["missing"] == {"stopped": [1]}
    assert moment.data["stopped"] == [1]
    assert "waits for: rank 1: its process is stopped" in moment.problems
    pid = moment.data["ranks"][1]["pid"]
    assert f"kill -CONT {pid}" in moment.page


def test_a_killed_rank_is_gone(moments: dict[str, Moment]) -> None:
    """It is not called live any more, and those that wait for it are told so."""
    moment = moments["killed"]
    assert moment.code == 1
    assert "2 in offload, 1 gone" in moment.page.splitlines()[0]
    assert moment.data["operation"]["missing"] == {"gone": [1]}
    assert "waits for: rank 1: its process is gone" in moment.problems
    assert moment.data["ranks"][1]["age_s"] > LATE_S


def test_a_dead_job_has_no_live_rank(moments: dict[str, Moment]) -> None:
    """Its files are still there; nothing in them is said to be in progress."""
    moment = moments["dead"]
    assert moment.code == 1
    assert moment.page.splitlines()[0].endswith("3 of 3 ranks: 3 gone")
    assert moment.data["operation"] is None
    assert any(problem.startswith("gone: ranks 0-2: ") for problem in moment.problems)


@pytest.mark.slow
def test_a_job_that_has_ended_has_exited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An orderly end is no problem; but nothing runs there any more: exit code 1."""
    with started(tmp_path, 2) as job:
        job.call("end", 0, 1)
        assert [rank.wait(LIMIT_S) for rank in job.ranks] == [0, 0]
        assert main(["status", str(job.status)]) == 1
        written = capsys.readouterr().out
        assert written.splitlines()[0].endswith("2 of 2 ranks: 2 exited")
        assert "the job has ended" in written
        diagnosis = diagnose(status_dir=job.status)
    assert not [one for one in diagnosis.at("problem") if one.check == "job"]
    assert [one for one in diagnosis.at("warning") if "the job has ended" in one.message]
