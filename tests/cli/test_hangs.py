"""``status`` on a real job that hangs."""

from __future__ import annotations

import os
import signal
import threading
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
from reloadpg.cli.status import JobView
from reloadpg.observability import record as records
from reloadpg.observability.record import read_directory
from reloadpg.testing import RankOutcome, run_ranks

LIMIT_S = 180.0
SIZE, LATE = 3, 1

pytestmark = pytest.mark.timeout(600)


def until(condition: Callable[[], object], run: Future[list[RankOutcome]] | None = None) -> None:
    """Poll until the condition holds; the limit is for a test that fails."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold"
        assert run is None or not run.done(), run.result()
        time.sleep(0.05)


def hanging_rank(rank: int, size: int, directory: str) -> None:
    """All ranks but one call ``offload``, and hang until they are killed."""
    # Ranks do not detect dead processes, as if they were on other hosts.
    processes.Peers.meet = lambda *_: None  # type: ignore[method-assign]
    Path(directory, f"pid-{rank}").write_text(str(os.getpid()))
    reloadpg.install(backends={worlds.BACKEND}, timeout=3 * LIMIT_S)
    worlds.init(store=dist.FileStore(f"{directory}/store", size), rank=rank, world_size=size)
    dist.new_group(list(range(size)), group_desc="all of them")
    while not Path(directory, "seen").exists():  # the status is not read during an operation
        time.sleep(0.05)
    if rank != LATE:
        reloadpg.offload()
    threading.Event().wait()


@dataclass(frozen=True)
class Job:
    directory: Path
    run: Future[list[RankOutcome]]

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to ranks that have not ended."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(int((self.directory / f"pid-{rank}").read_text()), number)

    def view(self) -> JobView:
        return JobView(read_directory(self.directory / "status"))

    def await_absence(self, why: str, *ranks: int) -> None:
        until(lambda: [one.rank for one in self.view().absent(why)] == [*ranks])

    def are_waiting(self) -> bool:
        """Whether the ranks that have called wait at a barrier for the other one."""
        running = self.view().in_progress
        return running is not None and running.stuck and [*running.waiting] == [0, 2]

    def check_problem(self, headline: str, problem: str) -> str:
        """The page begins with the headline and reports the problem; return the page."""
        with redirect_stdout(StringIO()) as page:
            code = main(["status", str(self.directory / "status")])
        found = [one for one in self.view().findings if one.level == "problem"]
        assert code == 1
        assert headline in page.getvalue().splitlines()[0]
        assert any(f"{one.check}: {one.message}".startswith(problem) for one in found), found
        return page.getvalue()


@contextmanager
def started(directory: Path) -> Iterator[Job]:
    env = {"RELOADPG_STATUS_DIR": str(directory / "status")}
    settings: Any = {"args": (directory,), "env": env, "timeout": 3 * LIMIT_S, "check": False}
    with ThreadPoolExecutor() as pool:
        job = Job(directory, pool.submit(run_ranks, hanging_rank, SIZE, **settings))
        try:
            until(lambda: len(job.view().ranks) == SIZE, job.run)
            until(lambda: all(one.groups == 2 for one in job.view().ranks), job.run)
            (directory / "seen").touch()
            yield job
        finally:
            job.send(signal.SIGKILL, *range(SIZE))


@pytest.mark.slow
def test_a_rank_for_which_an_operation_waits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it has not called, is stopped, and was killed."""
    monkeypatch.setattr(records, "SILENT_S", LIMIT_S)  # a rank that is held up is not silent
    monkeypatch.setattr(status, "WAITING_S", 3.0)
    with started(tmp_path) as job:
        until(job.are_waiting, job.run)
        page = job.check_problem("2 in offload", "waits for: rank 1: offload() not called yet")
        lines = [" ".join(line.split()) for line in page.splitlines()]
        assert "1 live" in lines[0]
        assert lines[2].startswith("offload in progress on ranks 0, 2, since ")
        assert lines[2].endswith("before barrier 'enter'")
        assert lines[3].startswith("waiting ranks 0, 2, since ")
        assert lines[4] == "waits for rank 1: offload() not called yet"
        late = job.view().ranks[LATE]
        stack = f"py-spy dump --pid {late.pid} on {late.host}"
        assert lines[5] == f"-> get the stack of rank 1: {stack}"
        job.send(signal.SIGSTOP, LATE)
        job.await_absence("stopped", LATE)
        page = job.check_problem("2 in offload, 1 stopped", "waits for: rank 1: process stopped")
        assert f"kill -CONT {late.pid}" in page
        job.send(signal.SIGKILL, LATE)
        job.await_absence("gone", LATE)
        page = job.check_problem("2 in offload, 1 gone", "waits for: rank 1: process gone")
        assert "kill -CONT" not in page
        job.send(signal.SIGKILL, 0, 2)
        job.await_absence("gone", *range(SIZE))
        job.check_problem("3 of 3 ranks: 3 gone", "gone: ranks 0-2: ")
