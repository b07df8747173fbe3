"""Run a function as the ranks of a small job: real processes, one machine, nothing left behind.

Do not assume more than this: ranks are processes on 127.0.0.1 under Linux. With the start method
`forkserver` they are forked from a process that has imported torch, `torch.distributed` and
`reloadpg` and nothing else, so environment variables that torch reads while it is imported
(`TORCH_LOGS`, ...) have no effect, and exit handlers do not run; `spawn` has neither limit.
`SIGUSR1` of a rank belongs to the runner.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal as signals
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ReloadpgError
from ._rank_job import (
    ResultUnpickler,
    environments,
    job_dir,
    pickle_call,
    store_port,
    tail,
)
from ._rank_pool import POOL
from ._rank_process import LOADING, OVER

__all__ = ["RankOutcome", "RanksFailedError", "run_ranks"]

_GRACE = 1.0
"""Seconds that the other ranks get to fail by themselves after the first failure."""
_LEAVE_LIMIT = 2.0
"""Seconds that ranks get to end that had returned and waited for the others."""
_STACK_LIMIT = 2.0
"""Seconds to wait for the Python stacks of ranks that hang."""
_END_LIMIT = 20.0
"""Seconds to wait until the supervisor has killed everything; it gives up after 10 s itself."""
_OUTPUT_LIMIT = 1 << 16
_OUTPUT_LINES = 40
_MESSAGE_LIMIT = 1 << 16


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended. Exactly one of `exitcode` and `signal` is set, unless it was lost."""

    rank: int
    result: Any
    """What the function returned; None also where it did not return."""
    exception: str | None
    """The traceback as text, or a sentence that says why there is no result; None if `ok`."""
    exitcode: int | None
    signal: int | None
    timed_out: bool
    """Still running at the time limit, and killed by the runner."""
    ended: bool
    """Still running a moment after another rank's failure, and killed by the runner."""
    stack: str | None
    """The Python stacks of all threads of a rank that the runner killed."""
    output: str
    """The last 64 KiB of stdout and stderr."""
    seconds: float | None
    """Time from the start of the ranks to the exception, or else to the end of the process."""
    pid: int | None

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process then ended normally."""
        return self.exception is None


class RanksFailedError(ReloadpgError):
    """At least one rank failed or hung. No process of the run is left. `outcomes` has them all."""

    def __init__(self, message: str, outcomes: Sequence[RankOutcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    start_method: Literal["forkserver", "spawn"] | None = None,
    store: Literal["parent", "rank0"] = "parent",
    check: bool = True,
) -> list[Any]:
    """Run `fn(rank, world_size, *args, **kwargs)` in `world_size` processes; return the results.

    Each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
    MASTER_PORT, so `torch.distributed.init_process_group("gloo")` works as it is; gloo uses the
    loopback device only, and each rank computes on one thread. A rank whose function has returned
    stays until all have, or one has failed: no peer loses a connection that it still needs.
    Blocks until every rank has ended.
    Thread-safe. All processes of the run are gone when the call returns or raises, and when the
    calling process dies by whatever means: ranks, their children, and what those moved to other
    sessions. A directory in `tempfile.gettempdir()` is used and removed.

    Args:
        fn: A module-level function; pickled by name and imported in the ranks.
        world_size: Number of ranks, at least 1.
        args: Further positional arguments, picklable.
        kwargs: Keyword arguments, picklable.
        timeout: Seconds from the start of the ranks until those still running count as failed.
        env: Variables set in the ranks on top of the caller's environment and the above; None
            removes one.
        start_method: `forkserver` (the default) forks ranks from a process that has torch
            imported; `spawn` starts fresh interpreters, which import torch themselves.
        store: Who hosts the TCPStore. `parent`: this process, on a port that it holds; ranks
            connect to it as to torchelastic's agent. It outlives any rank, and also
            `destroy_process_group`: a second gloo `init_process_group` in one run reads the
            first one's addresses and fails (seen on torch 2.13 and 2.15). `rank0`: rank 0,
            inside `init_process_group`, as torch does without torchelastic; the store ends with
            rank 0's group or process, and groups can be initialised again once that has ended.
        check: Raise if a rank fails. If False, return one `RankOutcome` a rank instead, and let
            the other ranks run on after a failure.

    Returns:
        The results in rank order; with `check=False` a `RankOutcome` for each rank.

    Raises:
        RanksFailedError: A rank raised, called `sys.exit` or `os._exit`, was killed by a signal,
            returned what cannot be pickled, or was running at the time limit. The message has
            every failed rank's traceback, exit code or signal, output, and for hung ranks the
            Python stacks. After the first failure the others get one second to fail as well.
        ValueError: An argument is out of range; nothing was started.
        TypeError: `fn` or the arguments cannot be pickled; nothing was started.
    """
    if os.environ.get(LOADING):
        raise RuntimeError(
            "run_ranks was called while a rank imports the module of its function; nothing was "
            'started. Put the call under `if __name__ == "__main__":`.'
        )
    if sys.platform != "linux":
        raise NotImplementedError(
            "run_ranks needs Linux (prctl, pidfd, /proc); nothing was started"
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}; nothing was started")
    if not timeout > 0:
        raise ValueError(f"timeout must be positive seconds, got {timeout}; nothing was started")
    if start_method not in (None, "forkserver", "spawn"):
        raise ValueError(f"start_method must be forkserver or spawn, got {start_method!r}")
    if store not in ("parent", "rank0"):
        raise ValueError(f"store must be parent or rank0, got {store!r}")
    call, modules = pickle_call(fn, tuple(args), dict(kwargs or {}))
    with store_port(store) as port, job_dir() as directory:
        job = {
            "world_size": world_size,
            "modules": modules,
            "sys_path": [os.getcwd() if path == "" else path for path in sys.path],
            "argv": sys.argv,
            "cwd": os.getcwd(),
            **environments(world_size, port, store, env or {}),
        }
        (directory / "call.pickle").write_bytes(call)
        (directory / "job.json").write_text(json.dumps(job))
        with POOL.open_job(directory, start_method or "forkserver") as control:
            run = _Run(control, directory, world_size, timeout, end_on_failure=check)
            outcomes = run.wait()
    if run.left or (check and not all(outcome.ok for outcome in outcomes)):
        raise RanksFailedError(_describe(outcomes, run.left), outcomes)
    if not check:
        return outcomes
    return [outcome.result for outcome in outcomes]


class _Run:
    """One run as seen from here: what the supervisor reports, and when to end it."""

    def __init__(
        self,
        control: socket.socket,
        job_dir: Path,
        world_size: int,
        timeout: float,
        *,
        end_on_failure: bool,
    ) -> None:
        self._control = control
        self._job_dir = job_dir
        self._world_size = world_size
        self._timeout = timeout
        self._end_on_failure = end_on_failure
        self._started = time.monotonic()
        self._pids: dict[int, int] = {}
        self._ended: dict[int, tuple[int, float]] = {}
        self._hung: frozenset[int] = frozenset()
        self._timed_out = False
        self._over = False
        self.left: list[int] = []
        """Processes that did not die of SIGKILL."""

    def wait(self) -> list[RankOutcome]:
        try:
            self._wait_for_ranks()
        finally:
            self._end()
        return [self._outcome(rank) for rank in range(self._world_size)]

    def _wait_for_ranks(self) -> None:
        # The supervisor forks at once; until then only this process's own bound applies.
        while not self._pids and not self._over:
            self._receive(self._started + self._timeout + _END_LIMIT)
        self._started = time.monotonic()
        limit = self._started + self._timeout
        deadline = limit
        while len(self._ended) < self._world_size and not self._over:
            rank = self._receive(deadline)
            if rank is not None and not self._returned(rank):
                (self._job_dir / OVER).touch()
            if time.monotonic() >= deadline and len(self._ended) < self._world_size:
                self._release_those_that_stay()
                self._hung = frozenset(range(self._world_size)) - frozenset(self._ended)
                self._timed_out = deadline == limit
                self._read_stacks()
                return
            if rank is not None and self._end_on_failure and not self._returned(rank):
                deadline = min(deadline, time.monotonic() + _GRACE)

    def _release_those_that_stay(self) -> None:
        """Let ranks end that only wait for the others; who is left then, hangs."""
        (self._job_dir / OVER).touch()
        deadline = time.monotonic() + _LEAVE_LIMIT
        staying = {r for r in range(self._world_size) if (self._job_dir / f"{r}.result").exists()}
        while staying - set(self._ended) and time.monotonic() < deadline and not self._over:
            self._receive(deadline)

    def _receive(self, deadline: float) -> int | None:
        """Take one message; return the rank that it says has ended, if any."""
        self._control.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            data = self._control.recv(_MESSAGE_LIMIT)
        except TimeoutError:
            return None
        except ConnectionError:
            data = b""
        if not data:
            self._over = True  # the supervisor was killed; its ranks die with it
            return None
        message = json.loads(data)
        if "pids" in message:
            self._pids = {int(rank): pid for rank, pid in message["pids"].items()}
        elif "left" in message:
            self.left = message["left"]
            self._over = True
        else:
            self._ended[message["rank"]] = message["status"], message["at"]
            return int(message["rank"])
        return None

    def _returned(self, rank: int) -> bool:
        return self._ended[rank][0] == 0 and (self._job_dir / f"{rank}.result").exists()

    def _read_stacks(self) -> None:
        """Ask the hung ranks for their stacks, and wait until these have been written."""
        with contextlib.suppress(OSError):
            self._control.send(b"stacks")
        files = [self._job_dir / f"{rank}.stack" for rank in self._hung]
        deadline = time.monotonic() + _STACK_LIMIT
        before: list[int] = []
        while time.monotonic() < deadline:
            time.sleep(0.05)  # the dumper has no end mark: complete when nothing is added
            sizes = [file.stat().st_size if file.exists() else 0 for file in files]
            if all(sizes) and sizes == before:
                return
            before = sizes

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send(b"end")
        deadline = time.monotonic() + _END_LIMIT
        while not self._over and time.monotonic() < deadline:
            self._receive(deadline)

    def _outcome(self, rank: int) -> RankOutcome:
        status, at = self._ended.get(rank, (None, None))
        signal = exitcode = None
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            exitcode = code if code >= 0 else None
            signal = -code if code < 0 else None
        result, exception = None, None
        hung = rank in self._hung
        error_file = self._job_dir / f"{rank}.error"
        result_file = self._job_dir / f"{rank}.result"
        if error_file.exists():
            report = json.loads(error_file.read_text())
            exception, at = report["exception"], report["at"]
        elif hung:
            returned = "the function had returned, but the process was " * result_file.exists()
            limit = f"at the time limit of {self._timeout:g} s"
            grace = f"{_GRACE:g} s after the first failure"
            exception = f"{returned}still running {limit if self._timed_out else grace}"
        elif status is None:
            why = self._text("supervisor.error") or "it was killed"
            exception = f"lost: the process that supervises the ranks ended early: {why}"
        elif signal is not None:
            exception = f"killed by {_signal_name(signal)}"
        elif exitcode != 0 or not result_file.exists():
            exception = f"exited with code {exitcode} before the function returned"
            if result_file.exists():
                exception = f"exited with code {exitcode} after the function had returned"
        else:
            try:
                result = ResultUnpickler(io.BytesIO(result_file.read_bytes())).load()
            except Exception as error:
                exception = f"the result cannot be unpickled here: {error!r}"
        return RankOutcome(
            rank=rank,
            result=result,
            exception=exception,
            exitcode=exitcode,
            signal=signal,
            timed_out=hung and self._timed_out,
            ended=hung and not self._timed_out,
            stack=(_own_frames_skipped(self._text(f"{rank}.stack")) or None) if hung else None,
            output=self._text(f"{rank}.out"),
            seconds=None if at is None else at - self._started,
            pid=self._pids.get(rank),
        )

    def _text(self, name: str) -> str:
        return tail(self._job_dir / name, _OUTPUT_LIMIT)


def _own_frames_skipped(stacks: str) -> str:
    """Cut each thread's stack, innermost frame first, where the runner called the function."""
    kept = []
    inside = True
    for line in stacks.splitlines():
        if not line.startswith("  "):
            inside = True
        elif "_rank_process.py" in line and line.endswith(" in _call"):
            inside = False
        if inside:
            kept.append(line)
    return "\n".join(kept)


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _describe(outcomes: Sequence[RankOutcome], left: Sequence[int]) -> str:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    failed.sort(key=lambda o: (o.timed_out or o.ended, o.seconds or 0.0))
    state = f"processes that could not be killed: {list(left)}" if left else "no process is left"
    lines = [
        f"{len(failed)} of {len(outcomes)} ranks failed ({state}). To get the outcomes instead of "
        "this error, call run_ranks with check=False."
    ]
    for index, outcome in enumerate(failed):
        notes = []
        if index == 0 and not outcome.timed_out:
            notes.append(f"first failure, after {outcome.seconds or 0.0:.2f} s")
        if outcome.timed_out or outcome.ended:
            notes.append("killed by the runner")
        elif outcome.signal is not None:
            notes.append(f"signal {_signal_name(outcome.signal)}")
        elif outcome.exitcode is not None:
            notes.append(f"exit code {outcome.exitcode}")
        lines.append(f"\n===== rank {outcome.rank}: {', '.join(notes)} =====")
        lines.append((outcome.exception or "").rstrip())
        if outcome.timed_out or outcome.ended:
            lines.append(f"--- Python stacks ---\n{(outcome.stack or '(none given)').rstrip()}")
        output = outcome.output.rstrip().splitlines()
        if output:
            lines.append(f"--- output, last {min(len(output), _OUTPUT_LINES)} lines ---")
            lines.extend(output[-_OUTPUT_LINES:])
    return "\n".join(lines)
