"""Run a function as the ranks of a small job: real processes on one machine, none left at the end.

Ranks are processes of :mod:`multiprocessing` on 127.0.0.1, under Linux. They are forked from a
process that has imported torch, ``torch.distributed`` and ``reloadpg``:

- environment variables that torch reads while it is imported (``TORCH_LOGS``, ...) have no effect,
  and exit handlers do not run.
- as always in multiprocessing, the caller's main module is imported again, before the ranks have
  their environment, so it must call ``run_ranks`` under ``if __name__ == "__main__":``.
- the calling process has one fork server: other processes that it starts with the server also
  have torch imported and compute on one thread.

The runner uses ``SIGUSR1`` of the ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import multiprocessing
import multiprocessing.util
import os
import pickle
import shutil
import signal as signals
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from ..environment.identity import (
    AGENT_STORE,
    LOOPBACK,
    DistributedEnvironment,
    host_store,
    write_variables,
)
from ..errors import ReloadpgError
from ..settings import as_integer, as_timedelta
from ..texts import counted
from . import _rank
from . import standins as standin_libraries
from ._rank import RunSpec

_START_LIMIT = 180.0
"""Seconds for the supervisor to import the main module, and torch where the server could not."""
_END_LIMIT = 20.0
"""Seconds for the supervisor to read stacks and kill everything, after the time limit."""
_OUTPUT_LIMIT = 1 << 16
_OUTPUT_LINES = 60
_PRELOAD = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"),
    *("pytest", "reloadpg.testing._body"),
)
"""Modules that the fork server imports as well if the caller has."""
_OF_A_LAUNCHER = ("TORCHELASTIC_", "ROLE_", "GROUP_WORLD_SIZE")
"""Beginnings of variables of the calling process that would be wrong in the ranks."""
_STANDINS = "standins"
"""The folder of a run's own job of the stand-ins."""
_STARTING = threading.Lock()
"""Held while the environment of this process is changed for one that it starts."""


@dataclass(frozen=True)
class RankOutcome:
    """The end of one rank. Exactly one of `exitcode` and `signal` is set, unless it was lost."""

    rank: int
    result: Any
    """Return value of the function; None if it did not return."""
    exception: str | None
    """The traceback as text, or the reason for the missing result; None if `ok`."""
    exitcode: int | None
    signal: int | None
    killed: bool
    """Whether the runner killed it: at the timeout, or shortly after another rank's failure. Then
    `exception` has the Python stacks of its threads."""
    output: str
    """The last 64 KiB of stdout and stderr."""
    reason: str | None
    """The exception in one line; None if `ok`."""
    seconds: float
    """Time from the start of the ranks to the exception, or else to the end of the process."""

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
    timeout: timedelta | float = 60.0,
    env: Mapping[str, str | None] | None = None,
    preload: Sequence[str] = (),
    store: Literal["parent", "rank0"] = "parent",
    standins: bool | None = None,
    check: bool = True,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` processes; return the results.

    Each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
    MASTER_PORT, so `torch.distributed.init_process_group("gloo")` works without arguments; gloo
    uses the loopback device only, and each rank computes on one thread. A rank whose function has
    returned stays until the others have ended, so that no peer loses a connection.
    Blocks until every rank has ended. Thread-safe.
    No process of the run remains when the call returns or raises, or when the calling process dies:
    ranks, their children, and descendants in other sessions. If the supervisor of the run is killed
    (for example by the OOM killer), the ranks and their process groups end with it, but descendants
    in other sessions remain.
    A directory in `tempfile.gettempdir()` is used and removed; TMPDIR of the ranks is in it, and
    so is the cache of torch's compiler, unless TORCHINDUCTOR_CACHE_DIR is set.

    Args:
        fn: A module-level function; pickled by name and imported in the ranks. For keyword
            arguments, a `functools.partial` of one.
        world_size: Number of ranks, at least 1.
        args: Further positional arguments, picklable.
        timeout: Time from the start of the ranks until those still running count as failed; a
            timedelta, or seconds.
        env: Variables set in the ranks on top of the caller's environment and the above; None
            removes one.
        preload: Modules that this run imports once, before the ranks are forked, since each would
            import them. They must not start threads or depend on the rank's environment.
        store: Who hosts the TCPStore. `parent`: this process, on a port that it holds; ranks
            connect to it as to torchelastic's agent. It outlives any rank, and also
            `destroy_process_group`: a second gloo `init_process_group` in one run reads the
            first one's addresses and fails (seen on torch 2.13 and 2.15). `rank0`: rank 0,
            inside `init_process_group`, as torch does without torchelastic; the store ends with
            rank 0's group or process, and groups can be initialised again once that has ended.
        standins: Run on stand-ins for CUDA and NCCL, without a GPU: backend `nccl` is torch's own
            ProcessGroupNCCL (`reloadpg.testing.standins`). Each run is a separate job. None: as
            the calling process does. The supervisor of the run imports torch again if the calling
            process does not use them. A use of a communicator after its release fails the run,
            with the caller's stack.
        check: Raise if a rank fails. If False, return one `RankOutcome` per rank instead, and let
            the other ranks continue after a failure.

    Returns:
        The results in rank order; with `check=False` a `RankOutcome` for each rank.

    Raises:
        RanksFailedError: A rank raised, called `sys.exit` or `os._exit`, was killed by a signal,
            returned a value that cannot be pickled, or was running at the timeout. The message has
            every failed rank's traceback, exit code or signal, output, and for hung ranks the
            Python stacks. After the first failure the others get one second to fail as well.
        ValueError: An argument is out of range, or a module of `preload` is not found; nothing was
            started.
        TypeError: `fn` or the arguments cannot be pickled, or `preload` is one string; nothing was
            started.
        StandinsError: The stand-ins cannot be built; nothing was started.
    """
    __tracebackhide__ = True  # for pytest: the error has all information
    if os.environ.get(_rank.LOADING):
        raise RuntimeError(
            "run_ranks was called while a rank imports the module of its function; nothing was "
            'started. Put the call under `if __name__ == "__main__":`.'
        )
    if sys.platform != "linux":
        raise NotImplementedError("run_ranks needs Linux (prctl, /proc); nothing was started")
    number = as_integer(world_size)
    if number is None or number < 1:
        raise ValueError(
            f"world_size must be a number of at least 1, got {world_size!r}; nothing was started"
        )
    seconds = as_timedelta(timeout, "timeout").total_seconds()
    if isinstance(preload, str):
        raise TypeError(f"preload={preload!r} is not a list of modules; nothing was started")
    if absent := [name for name in preload if not _is_found(name)]:
        raise ValueError(f"preload: no module named {', '.join(absent)}; nothing was started")
    if store not in ("parent", "rank0"):
        raise ValueError(f"store must be parent or rank0, got {store!r}")
    call, modules = _pickled(fn, tuple(args))
    if standins is None:
        standins = standin_libraries.enabled()
    if standins:
        standin_libraries.load()  # before the store imports torch
    with (
        _store_port(store) as port,
        _run_directory() as directory,
        _standins(standins, directory) as common,
    ):
        variables = {**common, **(env or {})}
        job = RunSpec(
            call=call,
            modules=modules,
            preload=tuple(preload),
            environments=_environments(number, port, store, directory, variables),
            directory=directory,
            caller=os.getpid(),
            timeout=seconds,
            end_on_failure=check,
            program=_rank.__file__,
            standins=standins,
        )
        outcomes, left, uses = _run(job)
    failed = left or (check and not all(outcome.ok for outcome in outcomes))
    if failed or (check and uses):
        text = _message(outcomes, left) if failed else ""
        if uses:
            head = f"{counted(len(uses), 'use')} of a communicator after its release (stand-ins)"
            text = "\n\n".join(filter(None, [head, *uses, text]))
        raise RanksFailedError(text, outcomes)
    return [outcome.result for outcome in outcomes] if check else outcomes


# ---------------------------------------------------------------------------------------------
# the input of ranks


def _is_found(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return module in sys.modules or importlib.util.find_spec(module) is not None
    return False  # a package of it is not found


class _CallPickler(pickle.Pickler):
    """Records the modules that the receiver must import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any, /) -> Any:
        named = obj if isinstance(getattr(obj, "__qualname__", None), str) else type(obj)
        name = getattr(named, "__module__", None)
        if isinstance(name, str):
            self.modules[name] = None
        return NotImplemented


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, list[tuple[str, str]]]:
    """Return the pickled call, and the (name, file) of each module that it refers to."""
    __tracebackhide__ = True
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}; nothing was started")
    buffer = io.BytesIO()
    pickler = _CallPickler(buffer)
    try:
        pickler.dump((fn, args))
    except Exception as error:
        raise TypeError(
            f"fn or args cannot be pickled ({error}); nothing was started. Define the function at "
            "the top level of a module, which each rank imports, and pass plain values or CPU "
            "tensors."
        ) from None
    modules = []
    for name in pickler.modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            modules.append((name, os.path.abspath(file)))
        elif name == "__main__":
            raise TypeError(
                "fn or an argument is defined in an interactive __main__, which ranks cannot "
                "import; nothing was started; put it in a file"
            )
    return buffer.getvalue(), modules


def _environments(
    world_size: int, port: int, store: str, directory: Path, env: Mapping[str, str | None]
) -> list[dict[str, str]]:
    temporary = directory / "tmp"
    temporary.mkdir()
    common: dict[str, str | None] = {
        # If DNS drops a query for 127.0.0.1, each store connection takes 5 s by default.
        "RES_OPTIONS": "timeout:1 attempts:1",
        **os.environ,
        **{name: None for name in os.environ if name.startswith(_OF_A_LAUNCHER)},
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TMPDIR": str(temporary),
    }
    if store == "parent":
        common |= AGENT_STORE
    environments = []
    for rank in range(world_size):
        place = (rank, rank, world_size, world_size, 0, None, LOOPBACK, port)
        variables = {**common, **DistributedEnvironment("run_ranks", *place).variables(), **env}
        environments.append({k: v for k, v in variables.items() if v is not None})
    return environments


@contextlib.contextmanager
def _standins(wanted: bool, directory: Path) -> Iterator[dict[str, str | None]]:
    """Yield the changes of the environment for ranks that use the stand-ins, or do not."""
    if wanted:
        with standin_libraries.job(directory / _STANDINS) as job:
            # Settings of visible devices do not apply to the stand-ins.
            yield {**job.environment, "CUDA_VISIBLE_DEVICES": None}
    else:
        yield {standin_libraries.JOB: None}


@contextlib.contextmanager
def _store_port(store: str) -> Iterator[int]:
    """Yield the port of the run's TCPStore, and reserve it during the run.

    For `rank0` the port is bound here without listening, with SO_REUSEADDR like the store's socket.
    Linux then lets rank 0 bind and listen, and gives the port to no process that requests a free
    one.
    """
    if store == "rank0":
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))
            yield reserved.getsockname()[1]
        return
    server = [host_store(LOOPBACK)]
    try:
        yield server[0].port
    finally:
        server.clear()  # a stored traceback must not keep the server alive


@contextlib.contextmanager
def _run_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ranks-", dir=multiprocessing.util.get_temp_dir()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# a run


def _run(job: RunSpec) -> tuple[list[RankOutcome], list[int], list[str]]:
    """Return the `RankOutcome` of each rank, and the ids of processes that could not be killed."""
    begun, timed_out, lost = 0.0, False, True
    pids: list[int] = []
    left: list[int] = []
    ends: list[tuple[int | None, float, bool]] = [(None, 0.0, False)] * len(job.environments)
    connection, theirs = multiprocessing.Pipe()
    with connection:
        with theirs:
            supervisor = _start(theirs, job)
        try:
            try:
                if connection.poll(_START_LIMIT):
                    begun, pids = connection.recv()
                    if connection.poll(job.timeout + _END_LIMIT):
                        ends, timed_out, left = connection.recv()
                        lost = False
            except (EOFError, ConnectionError):
                for pid in pids:  # the kernel kills the ranks; each leads a process group
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signals.SIGKILL)
            outcomes = [
                _outcome(job, rank, *end, begun=begun, timed_out=timed_out, lost=lost)
                for rank, end in enumerate(ends)
            ]
            uses = standin_libraries.Job(job.directory / _STANDINS, {}).uses_after_release()
        finally:
            with contextlib.suppress(OSError):
                connection.send("end")
            if not wait([supervisor.sentinel], _END_LIMIT):
                supervisor.kill()
            supervisor.join(1)
    return outcomes, left, uses


def _start(connection: Connection, job: RunSpec) -> BaseProcess:
    loaded = [name for name in _PRELOAD if name in sys.modules]
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["reloadpg.testing._preload", *loaded]
    )

    def started(method: str) -> BaseProcess:
        context: Any = multiprocessing.get_context(method)
        process: BaseProcess = context.Process(target=_rank.supervise, args=(connection, job))
        process.start()
        return process

    if job.standins and not standin_libraries.enabled():
        # The fork server of this process has been started without them, or will be.
        with _STARTING, write_variables(standin_libraries.preloading()):
            return started("spawn")
    try:
        return started("forkserver")
    except (EOFError, OSError):
        # The fork server fails in a process forked from its owner, with a TMPDIR of some 80
        # characters ("AF_UNIX path too long"), or if it died while importing torch. A new
        # interpreter imports torch in each run, and reports the error of the import.
        return started("spawn")


def _outcome(
    job: RunSpec,
    rank: int,
    code: int | None,
    at: float,
    killed: bool,
    *,
    begun: float,
    timed_out: bool,
    lost: bool,
) -> RankOutcome:
    out, error_file, stack = (
        job.directory / f"{rank}.{kind}" for kind in ("out", "error", "stack")
    )
    returned = job.result(rank).exists()
    result, exception, reason = None, None, None
    if error_file.exists():
        at, reason, exception = pickle.loads(error_file.read_bytes())
    elif killed:
        limit = f"at the time limit of {job.timeout:g} s"
        grace = f"{_rank.GRACE:g} s after the first failure"
        exception = f"still running {limit if timed_out else grace}"
        if returned:
            exception = f"the function had returned, but the process was {exception}"
        reason, exception = exception, f"{exception}\n--- Python stacks ---\n{_tail(stack)}"
    elif lost:
        why = _tail(job.directory / "supervisor.out") or (
            "it was killed, or could not import the main module (then stderr says why; a main "
            'module has to call run_ranks under `if __name__ == "__main__":`)'
        )
        exception = f"lost: the process that supervises the ranks ended early: {why}"
    elif code is not None and code < 0:
        exception = f"killed by signal {-code} ({signals.strsignal(-code)})"
    elif code != 0 or not returned:
        when = "after the function had returned" if returned else "before the function returned"
        exception = f"exited with code {code} {when}"
    else:
        try:
            result = pickle.loads(job.result(rank).read_bytes())
        except Exception as error:
            exception = f"the result cannot be unpickled here: {error!r}"
    return RankOutcome(
        rank=rank,
        result=result,
        exception=exception,
        exitcode=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        killed=killed,
        output=_tail(out),
        reason=reason or exception,
        seconds=max(at - begun, 0.0),
    )


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _OUTPUT_LIMIT, 0))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _message(outcomes: Sequence[RankOutcome], left: Sequence[int]) -> str:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    # A process that crashed is the cause, but its peers' errors are often seen before its end.
    failed.sort(key=lambda o: (o.killed, o.signal is None, o.seconds))
    state = f"processes that could not be killed: {list(left)}" if left else "no process is left"
    first = f"rank {failed[0].rank}: {failed[0].reason}; " if failed else ""
    lines = [
        f"{first}{len(failed)} of {len(outcomes)} ranks failed ({state}). To get the outcomes "
        "instead of this error, call run_ranks with check=False."
    ]
    for index, outcome in enumerate(failed):
        note = f"after {outcome.seconds:.2f} s"
        if outcome.killed:
            note = "killed by the runner"
        elif index == 0:
            note = f"first failure, {note}"
        lines.append(f"\n===== rank {outcome.rank}: {note} =====")
        lines.append((outcome.exception or "").rstrip())
        output = outcome.output.rstrip().splitlines()
        if output:
            lines.append(f"--- output, last {min(len(output), _OUTPUT_LINES)} lines ---")
            lines.extend(output[-_OUTPUT_LINES:])
    return "\n".join(lines)
