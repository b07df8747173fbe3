"""``status`` on real jobs that hang."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg import processes
from reloadpg.cli import main, status
from reloadpg.cli.status import JobView, state_of
from reloadpg.observability import record as records
from reloadpg.observability.record import read_directory
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


def next_call(directory: str, rank: int, number: int) -> str:
    """Wait for the name of the next function to call."""
    path = Path(directory, f"call-{rank}-{number}")
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


def hanging_rank(rank: int, size: int, directory: str) -> None:
    """Call the functions of reloadpg that the files ``call-RANK-NUMBER`` name, until killed."""
    # Ranks do not detect dead processes, as if they were on other hosts.
    processes.Peers.meet = lambda *_: None  # type: ignore[method-assign]
    Path(directory, f"pid-{rank}").write_text(str(os.getpid()))
    reloadpg.install(backends={worlds.BACKEND}, timeout=300.0)
    worlds.init(store=dist.FileStore(f"{directory}/store", size), rank=rank, world_size=size)
    dist.new_group(list(range(size)), group_desc="all of them")
    for number in itertools.count():
        getattr(reloadpg, next_call(directory, rank, number))()
        Path(directory, f"done-{rank}-{number}").touch()


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
        return view.ok and {state_of(one) for one in view.ranks} == {state}


@contextmanager
def started(directory: Path, size: int = SIZE) -> Iterator[Job]:
    env = {"RELOADPG_STATUS_DIR": str(directory / "status")}
    settings: Any = {"env": env, "timeout": 3 * LIMIT_S, "check": False}
    with ThreadPoolExecutor() as pool:
        run = pool.submit(run_ranks, hanging_rank, size, args=(directory,), **settings)
        job = Job(directory, size, run)
        try:
            until(lambda: len(job.view().ranks) == size, job)
            until(lambda: all(one.groups == 2 for one in job.view().ranks), job)
            yield job
        finally:
            job.send(signal.SIGKILL, *range(size))


@dataclass(frozen=True)
class Shown:
    """What the command shows of a job now."""

    code: int
    page: str
    problems: list[str]
    """The problems that it names."""
    job: JobView

    @classmethod
    def of(cls, job: Job) -> Shown:
        with redirect_stdout(StringIO()) as page:
            code = main(["status", str(job.status)])
        view = job.view()
        found = [one for one in view.findings if one.level == "problem"]
        return cls(code, page.getvalue(), [f"{one.check}: {one.message}" for one in found], view)

    def check_problem(self, headline: str, problem: str) -> None:
        """The page begins with the headline, and reports the problem."""
        assert self.code == 1
        assert headline in self.page.splitlines()[0]
        assert any(one.startswith(problem) for one in self.problems), self.problems

    @property
    def missing(self) -> Any:
        """The ranks that the operation in progress waits for, by the reason."""
        return self.job.in_progress.missing


@pytest.mark.slow
def test_ranks_for_which_an_operation_waits_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one job that hangs in its first offload, and then with a stopped, a killed and no live
    rank. A job that continues has no problem.
    """
    monkeypatch.setattr(records, "SILENT_S", LIMIT_S)  # a rank that is held up is not silent
    monkeypatch.setattr(status, "WAITING_S", 3.0)
    with started(tmp_path) as job:
        job.call("offload", 0, 2)
        until(lambda: job.are_waiting(0, 2))
        check_first_offload(Shown.of(job))
        job.call("offload", 1)
        job.await_done(0, 1, 2)
        until(lambda: job.is_healthy("offloaded"))
        healthy = Shown.of(job)
        assert (healthy.code, healthy.problems) == (0, [])
        assert "3 of 3 ranks: 3 offloaded" in healthy.page.splitlines()[0]
        job.send(signal.SIGSTOP, 1)
        job.call("reload", 0, 2)
        until(lambda: job.view().absent("stopped") and job.are_waiting(0, 2))
        stopped = Shown.of(job)
        stopped.check_problem("2 in reload, 1 stopped", "waits for: rank 1: process stopped")
        assert stopped.missing == {"stopped": [1]}
        assert f"kill -CONT {stopped.job.ranks[1].pid}" in stopped.page
        job.send(signal.SIGCONT, 1)
        job.call("reload", 1)
        job.await_done(0, 1, 2)
        until(lambda: job.is_healthy("live"))
        job.call("offload", 0, 2)
        until(lambda: job.are_waiting(0, 2))
        job.send(signal.SIGKILL, 1)
        until(lambda: job.view().absent("gone"))
        killed = Shown.of(job)
        killed.check_problem("2 in offload, 1 gone", "waits for: rank 1: process gone")
        assert killed.missing == {"gone": [1]}
        assert "kill -CONT" not in killed.page
        job.send(signal.SIGKILL, 0, 2)
        until(lambda: len(job.view().absent("gone")) == SIZE)
        Shown.of(job).check_problem("3 of 3 ranks: 3 gone", "gone: ranks 0-2: ")


def check_first_offload(shown: Shown) -> None:
    """The missing rank is named with its line, at the top of the page."""
    shown.check_problem("2 in offload", "waits for: rank 1: offload() not called yet")
    assert len(shown.problems) == 1
    lines = [" ".join(line.split()) for line in shown.page.splitlines()]
    assert "1 live" in lines[0]
    assert lines[2].startswith("offload in progress on ranks 0, 2, since ")
    assert lines[2].endswith("before barrier 'enter'")
    assert lines[3].startswith("waiting ranks 0, 2, since ")
    assert lines[4] == "waits for rank 1: offload() not called yet"
    rank = shown.job.ranks[1]
    stack = f"py-spy dump --pid {rank.pid} on {rank.host}"
    assert lines[5] == f"-> get the stack of rank 1: {stack}"
    assert "unknown" not in shown.page
    operation = shown.job.in_progress
    assert operation is not None
    assert operation.progress.phase == "enter"
    assert (operation.waiting, operation.stuck) == ([0, 2], True)
    assert operation.missing == {"offload() not called yet": [1]}
