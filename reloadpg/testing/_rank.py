"""Processes of a run of ranks: one supervisor, and the ranks that it starts.

::

    calling process -> fork server of multiprocessing -> supervisor (one a run) -> ranks

The supervisor enforces the timeout and leaves no process. It is a child subreaper (``prctl(2)``):
a descendant whose parent has died becomes its child, in any session, and is killed. It ends the run
when the caller requests it, closes the connection or dies. The kernel kills the ranks if the
supervisor itself is killed.

Ranks write files in the directory of the run: ``N.out``, ``N.result``, ``N.error`` and
``N.stack``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

LOADING = "RELOADPG_RANK_LOADING"
"""Set in the environment of a rank while it imports the module of the function."""
GRACE = 1.0
"""Seconds after the first failure for the other ranks to fail by themselves."""
STACK_LIMIT = 2.0
"""Seconds for the Python stacks of ranks that hang, and for the exit of the others."""
KILL_LIMIT = 10.0
"""Seconds to wait for killed processes; only uninterruptible I/O takes that long."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class RunSpec:
    """The description of a run that is sent to its processes.

    Attributes:
        call: the pickled (function, args).
        modules: name and file of each module that the call refers to.
        environments: the whole environment of each rank.
        directory: directory of the ranks' files.
        caller: process id of the calling process.
        end_on_failure: whether the other ranks are ended after the first failure.
        program: file of this module, as the caller imported it.
    """

    call: bytes
    modules: Sequence[tuple[str, str]]
    preload: Sequence[str]
    environments: Sequence[dict[str, str]]
    directory: Path
    caller: int
    timeout: float
    end_on_failure: bool
    program: str
    standins: bool = False

    def result(self, rank: int) -> Path:
        """The file of the function's result, once it has returned."""
        return self.directory / f"{rank}.result"


# ---------------------------------------------------------------------------------------------
# the supervisor


def supervise(caller: Connection, job: RunSpec) -> None:
    """Run a job.

    Sends (``time.monotonic()`` of the start, process ids) to the caller and at the end ([(exit
    code, time, killed) of each rank], whether the time limit was reached, ids of processes that
    SIGKILL did not end). Exit codes are as in ``multiprocessing.Process``: negative for a
    signal.
    """
    if not os.path.samefile(job.program, __file__):
        raise ImportError(
            f"multiprocessing's fork server searches the working directory first and found "
            f"{__file__}, but the caller uses {job.program}. Set PYTHONSAFEPATH=1, or start in "
            "another directory."
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Ranks ignore it until they can dump their stacks: the default action would kill them.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    preload = importlib.import_module("reloadpg.testing._preload")  # if the server could not
    preload.import_all(job.preload)
    if job.standins:
        from .standins import activate

        activate()  # a spawned process has the caller's path, on which torch finds no entry point
    gc.freeze()  # collections in the ranks skip what is loaded now: they copy few of its pages
    _Supervisor(caller, job).run()


class _CallerLeftError(Exception):
    """The caller requested the end of the run, or has ended."""


class _StartedRank:
    def __init__(self, process: BaseProcess, result: Path) -> None:
        self.process = process
        self.result = result
        self.returned = False
        self.exitcode: int | None = None
        self.ended_at = 0.0

    @property
    def running(self) -> bool:
        return self.exitcode is None

    @property
    def failed(self) -> bool:
        return not self.running and not (self.exitcode == 0 and self.returned)

    def look(self) -> None:
        """Check whether the function has returned, and whether the process has ended."""
        if not self.running:
            return
        self.exitcode = self.process.exitcode
        if not self.running:
            self.ended_at = time.monotonic()
        self.returned = self.result.exists()


class _Supervisor:
    def __init__(self, caller: Connection, job: RunSpec) -> None:
        self._caller = caller
        self._job = job
        self._ranks: list[_StartedRank] = []
        self._started = 0.0
        # Ranks whose function has returned read this until its other end is closed.
        self._stay, self._release = multiprocessing.Pipe(duplex=False)
        self._sources: list[Connection | int] = [caller]
        # A process that the caller forks holds a copy of the connection and delays its end of
        # file. Linux before 5.3 and some builds of Python have no pidfd.
        with contextlib.suppress(AttributeError, OSError):
            self._sources.append(os.pidfd_open(job.caller))
        # A byte for each rank that has ended, or whose function has returned. Not the sentinels of
        # the processes: a forked child of a rank holds a copy of it.
        self._changed, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def run(self) -> None:
        with contextlib.suppress(_CallerLeftError):
            try:
                self._start()
                timed_out = self._supervise()
            finally:
                killed = [rank.running for rank in self._ranks]
                left = self._kill()
            ends = [(r.exitcode, r.ended_at, k) for r, k in zip(self._ranks, killed, strict=True)]
            self._tell((ends, timed_out, left))
            while True:  # until the caller has read the files
                self._wait(None)
        shutil.rmtree(self._job.directory, ignore_errors=True)

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("fork")
        if self._caller.poll():
            raise _CallerLeftError
        begun = time.monotonic()  # a rank can fail before the last one is started
        try:
            for rank, environment in enumerate(self._job.environments):
                os.environ.clear()
                os.environ.update(environment)
                _redirect_output(self._job.directory / f"{rank}.out")
                process = context.Process(
                    target=_run_rank,
                    args=(self._job, rank, os.getpid(), self._wakeup, self._stay),
                    kwargs={"inherited": (self._caller, self._release)},
                )
                process.start()
                self._ranks.append(_StartedRank(process, self._job.result(rank)))
        finally:
            _redirect_output(self._job.directory / "supervisor.out")
        self._started = time.monotonic()
        self._tell((begun, [rank.process.pid for rank in self._ranks]))

    def _tell(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the caller has ended; the next wait notices
            self._caller.send(message)

    def _supervise(self) -> bool:
        """Wait for all ranks; return whether the time limit was reached first."""
        limit = deadline = self._started + self._job.timeout
        while any(rank.running for rank in self._ranks):
            if all(rank.returned for rank in self._ranks if rank.running):
                self._release.close()
            if time.monotonic() >= deadline:
                self._stop_hanging()
                return deadline == limit
            if self._job.end_on_failure and any(rank.failed for rank in self._ranks):
                deadline = min(deadline, time.monotonic() + GRACE)
            self._wait(deadline)
        return False

    def _wait(self, deadline: float | None) -> None:
        """Wait for a change of the ranks; raise ``_CallerLeftError`` if the caller ends the run."""
        timeout = None if deadline is None else max(deadline - time.monotonic(), 0)
        ready = wait([*self._sources, self._changed], timeout)
        if any(source in ready for source in self._sources):
            raise _CallerLeftError
        self._look()

    def _look(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._changed, 1 << 16)
        for rank in self._ranks:
            rank.look()

    def _stop_hanging(self) -> None:
        """Stop the ranks that still run, with their Python stacks; then let the others exit.

        In this order: a rank waiting for one that has returned would see the end of its process and
        blame that.
        """
        running = [rank for rank in self._ranks if rank.running]
        for rank in running:
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
        files = [self._job.directory / f"{self._ranks.index(rank)}.stack" for rank in running]
        before: list[int] = []

        def written() -> bool:  # a dump has no end mark; it is complete when it no longer grows
            nonlocal before
            last, before = before, [file.stat().st_size if file.exists() else 0 for file in files]
            return all(before) and before == last

        self._wait_until(written)
        for rank in running:
            if rank.running and not rank.returned:
                os.kill(rank.process.pid or 0, signal.SIGSTOP)
        self._release.close()
        self._wait_until(lambda: not any(rank.running and rank.returned for rank in self._ranks))

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, at most ``STACK_LIMIT``."""
        deadline = time.monotonic() + STACK_LIMIT
        while not condition() and time.monotonic() < deadline:
            self._wait(time.monotonic() + 0.05)

    def _kill(self) -> list[int]:
        """Kill all descendants; return the ids of remaining children."""
        deadline = time.monotonic() + KILL_LIMIT
        while True:
            self._look()
            if not any(rank.running for rank in self._ranks):
                try:  # orphans of the ranks are children of this process
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                except ChildProcessError:
                    return []
            children = _children()
            if time.monotonic() > deadline:
                return children
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            wait([self._changed], 0.02)


def _children() -> list[int]:
    """Process ids of the children of this process, including zombies."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_bytes()
                if int(stat[stat.rindex(b")") + 2 :].split()[1]) == os.getpid():
                    found.append(int(entry))
    return found


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


# ---------------------------------------------------------------------------------------------
# a rank


def _run_rank(
    job: RunSpec,
    rank: int,
    supervisor: int,
    wakeup: int,
    stay: Connection,
    *,
    inherited: Sequence[Connection],
) -> None:
    """Run the function as one rank, write the result, and wait for the other ranks."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)  # it was killed before the call took effect
    for one in inherited:
        one.close()
    try:
        _prepare(job, rank)
        _write(job.result(rank), _call(job, rank))
        with contextlib.suppress(BlockingIOError):  # it is full of bytes that wake the supervisor
            os.write(wakeup, b"\0")
        # A peer may still be connecting to this rank, or reading the last bytes of a collective.
        # Gloo fails there if the sockets close ("connection closed by peer").
        with contextlib.suppress(EOFError):
            stay.recv()
        code = 0
    except BaseException as error:
        error.__traceback__ = _own_frames_skipped(error.__traceback__)
        reason = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        text = "".join(traceback.format_exception(error))
        report = time.monotonic(), reason, text
        _write(job.directory / f"{rank}.error", pickle.dumps(report))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a failed rank must not wait for threads that wait for the other ranks


def _prepare(job: RunSpec, rank: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, number in (("stdout", 1), ("stderr", 2)):  # line by line, for a rank that is killed
        setattr(sys, name, os.fdopen(number, "w", 1, errors="backslashreplace", closefd=False))
    faulthandler.enable()
    # Stays open for the life of the process, since the dump can come at any time.
    stack = os.open(job.directory / f"{rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    tempfile.tempdir = None  # read TMPDIR again
    if "torch" in sys.modules and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        from ..settings import autoinstall_requested, refuse_unknown_variables

        refuse_unknown_variables(os.environ, "autoinstall")
        if autoinstall_requested(os.environ):  # as torch does at its import
            from .. import install

            install()


def _call(job: RunSpec, rank: int) -> bytes:
    os.environ[LOADING] = "1"
    try:
        for name, file in job.modules:
            _load_module(name, file)
        fn, args = pickle.loads(job.call)
    except AttributeError as error:
        raise TypeError(
            f"{error}. Ranks import the module of the function, without the part under "
            "`if __name__ == '__main__'`: define the function and its arguments' classes above it"
        ) from error
    finally:
        del os.environ[LOADING]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdecimal():
        sys.modules["torch"].set_num_threads(int(threads))
    result = fn(rank, len(job.environments), *args)
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"rank {rank} finished, but its result of type {type(result).__qualname__} cannot be "
            "pickled; return plain values or CPU tensors"
        ) from error


def _load_module(name: str, file: str) -> None:
    """Import `name`; if that fails or finds another file, load `file` under that name.

    pytest's import modes use names for test modules that a plain import does not find, or finds
    elsewhere (two `test_ranks.py`, another package called `tests`).
    """
    with contextlib.suppress(ImportError):
        if is_from(importlib.import_module(name), file):
            return
    execute_file(name, file)


def is_from(module: ModuleType | None, file: str) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and os.path.realpath(found) == os.path.realpath(file)


def execute_file(name: str, file: str, code: CodeType | None = None) -> ModuleType:
    """Execute a file, or its compiled code, as the module of this name."""
    # As in multiprocessing: `if __name__ == "__main__"` must be false in a rank.
    spec_name = "__mp_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(spec_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {file}")
    module = sys.modules[spec_name] = sys.modules[name] = importlib.util.module_from_spec(spec)
    if code is None:
        spec.loader.exec_module(module)
    else:
        exec(code, vars(module))
    return module


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, even if this process is killed."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _own_frames_skipped(trace: TracebackType | None) -> TracebackType | None:
    own = os.path.dirname(__file__)
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == own:
        if trace.tb_next is None:
            break
        trace = trace.tb_next
    return trace
