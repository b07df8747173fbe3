"""torch's ProcessGroupNCCL over stand-ins for CUDA and NCCL, on a machine without a GPU.

torch's CUDA build links the CUDA runtime and NCCL dynamically. Two libraries implement on the CPU
the functions of them that torch uses. With these, torch's own ``ProcessGroupNCCL`` runs: watchdog,
timeouts, error handling, eager and lazy connection, splits, abort, suspend and resume::

    run_ranks(check, 2, standins=True)                             # a function as ranks
    python -m reloadpg standins run -- torchrun --nproc-per-node 2 train.py   # a program

A *job* is a set of processes that see the same devices and communicators. It has a folder, which
holds the counters of device memory and is removed when the job ends.

Do not assume that a kernel runs: torch's operators are computed by their CPU kernels, and launching
any other kernel raises an error. The processes of a job find the libraries through ``LD_PRELOAD``,
and the CPU kernels through ``PYTHONPATH``, so ``python -I`` and ``python -E`` cannot be used.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ...settings import NCCL
from ._build import StandinsError, build, check_nccl

__all__ = [
    "JOB",
    "NCCL",
    "Fault",
    "InjectedFault",
    "Job",
    "StandinsError",
    "activate",
    "build",
    "clear_faults",
    "communicators",
    "enable",
    "enabled",
    "inject",
    "job",
    "left_bytes",
    "load",
    "pinned_bytes",
    "preloading",
    "uses_after_release",
]

JOB = "RELOADPG_STANDIN_JOB"
"""Environment variable with the folder of the job. Without it a process has no devices."""

_FAULTS = "faults"
_RELEASED = "released"
_RUNNER = re.compile(r"\n[^\n]*/reloadpg/testing/_rank\.py")
"""The first line of a Python stack below the function of ``run_ranks``."""
_serials = itertools.count()

Action = Literal["fail", "delay", "hang", "async"]
Call = Literal[
    "init",
    "split",
    "collective",
    "send",
    "recv",
    "finalize",
    "destroy",
    "abort",
    "suspend",
    "resume",
    "copy",
    "monitor",
]


@dataclass(frozen=True)
class Fault:
    """A fault in calls of NCCL.

    Attributes:
        action: ``fail``: the call returns ``ncclRemoteError``. ``delay``: it takes `seconds`
            longer. ``hang``: it does not return until the fault is cleared, or another thread
            aborts the communicator. ``async``: it succeeds, and the communicator has this
            asynchronous error; its operations then wait until it is aborted.
        call: the function of NCCL. ``copy`` is the work of a suspend or resume, once all members
            have called it: an abort does not end it. ``monitor`` is not NCCL's: the thread
            with which torch monitors the watchdog of a group does not run for `seconds`, before
            it waits.
        rank: the global rank (its variable RANK); None for all ranks.
        skip: number of matching calls of each process that succeed before the fault.
        times: number of calls of each process that fail after them; None for all.
        seconds: length of a delay.
    """

    action: Action
    call: Call
    rank: int | None = None
    skip: int = 0
    times: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.action, get_args(Action), "action"),
            (self.call, get_args(Call), "call"),
        ):
            if value not in known:
                raise ValueError(f"{what}={value!r} must be one of {', '.join(known)}")
        if self.call == "monitor" and self.action != "delay":
            raise ValueError(f"{self}: call='monitor' takes action='delay'")
        if self.skip < 0 or self.seconds < 0 or (self.times is not None and self.times < 1):
            raise ValueError(f"{self}: skip and seconds must be 0 or more, times 1 or more")


class InjectedFault:
    """A fault of a job; clears it when a ``with`` block ends."""

    def __init__(self, folder: Path, identity: str, fault: Fault) -> None:
        self.fault = fault
        self._folder = folder
        self._identity = identity

    def clear(self) -> None:
        """Remove the fault; calls that hang because of it continue. Local, idempotent."""
        _edit(self._folder, lambda lines: [x for x in lines if f"id={self._identity}\t" not in x])

    def __enter__(self) -> InjectedFault:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


@dataclass(frozen=True)
class Job:
    """A set of processes that see the same devices: those started with its environment.

    Attributes:
        folder: the folder that its processes share.
        environment: the variables to set for each process at its start.
    """

    folder: Path
    environment: Mapping[str, str]

    def uses_after_release(self) -> list[str]:
        """List the calls of NCCL with a communicator that was destroyed or aborted before. Local.

        Also the aborts of a communicator while a suspend or resume moves its memory. Each has the
        rank, the function of NCCL, the communicator, and the Python stack of the caller. On a GPU
        each is a use after free. Calls from threads without Python are not recorded: torch's
        watchdog looks for an abort and then calls NCCL.
        """
        path = self.folder / _RELEASED
        text = path.read_text(errors="replace") if path.exists() else ""
        starts = [found.start() for found in re.finditer(r"^rank -?\d+, pid ", text, re.MULTILINE)]
        uses = [text[a:b] for a, b in itertools.pairwise([*starts, len(text)])]
        return [_RUNNER.split(use)[0].rstrip() for use in uses]


@contextmanager
def job(
    folder: str | os.PathLike[str] | None = None,
    *,
    nccl: str | os.PathLike[str] | None = None,
) -> Iterator[Job]:
    """Create a job, and remove its folder at the end. Local; the first use builds the libraries.

    Args:
        folder: an empty folder on a local file system; None creates one, in memory if possible.
        nccl: the file of an NCCL that its user has built from NVIDIA's source and linked to the
            dynamic CUDA runtime of torch's version. Its host code runs in addition to the stand-in,
            which moves the data; its kernels do not run. None: the file in RELOADPG_NCCL, or the
            stand-in alone.

    Raises:
        StandinsError: the libraries cannot be built, see :func:`build`, or ``nccl`` is not usable.
    """
    libraries = preloading()
    nccl = nccl or os.environ.get(NCCL)
    if nccl:
        libraries[NCCL] = check_nccl(nccl)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = Path(folder or tempfile.mkdtemp(prefix="reloadpg-standins-", dir=memory))
    made.mkdir(mode=0o700, exist_ok=True)
    try:
        yield Job(made, {**libraries, JOB: str(made)})
    finally:
        for _ in range(100):  # a process that is about to end may create a file at the same time
            shutil.rmtree(made, ignore_errors=True)
            if not made.exists():
                break
            time.sleep(0.02)


def inject(fault: Fault) -> InjectedFault:
    """Inject a fault into calls of NCCL in all processes of this process's job. Local.

    Returns:
        A handle that clears the fault; also a context manager.
    """
    folder, identity = _own_job().folder, f"{os.getpid()}.{next(_serials)}"
    fields = {
        "id": identity,
        "action": fault.action,
        "call": fault.call,
        "rank": fault.rank,
        "skip": fault.skip,
        "times": fault.times,
        "milliseconds": round(fault.seconds * 1000),
    }
    line = "\t".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    _edit(folder, lambda lines: [*lines, line])
    return InjectedFault(folder, identity, fault)


def clear_faults() -> None:
    """Remove all faults of this process's job. Local, idempotent."""
    _edit(_own_job().folder, lambda lines: [])


def uses_after_release() -> list[str]:
    """Call :meth:`Job.uses_after_release` of this process's job. Local."""
    return _own_job().uses_after_release()


def communicators() -> int:
    """The number of communicators that this process has created and not destroyed. Local."""
    _own_job()
    return int(ctypes.CDLL(None).standin_communicators())


def left_bytes() -> int:
    """Device memory left by communicators that ended while they were suspended. Local.

    NCCL 2.30.7 does not release these 4 MiB of each communicator before the process ends.
    """
    _own_job()
    left = ctypes.CDLL(None).standin_left_bytes
    left.restype = ctypes.c_long
    return int(left())


def pinned_bytes() -> int:
    """Pinned host memory that suspended communicators of this process hold, in bytes. Local.

    With NVIDIA's host code: all pinned host memory of the process.
    """
    _own_job()
    pinned = ctypes.CDLL(None).standin_pinned_bytes
    pinned.restype = ctypes.c_long
    return int(pinned())


def preloading() -> dict[str, str]:
    """The variables that preload the libraries into a process outside of any job. Local."""
    folder, libraries = str(build()), _libraries()
    given = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    searched = os.environ.get("PYTHONPATH", folder).split(":")
    return {
        "LD_PRELOAD": ":".join([*libraries, *(one for one in given if one not in libraries)]),
        # With the kernels of CUDA, which torch's import replaces through the entry point in this
        # folder, a job hangs.
        "PYTHONPATH": ":".join([folder, *(one for one in searched if one != folder)]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        JOB: "",
    }


def enable() -> None:
    """Make this process and its children use the libraries. Local, idempotent.

    Call it before torch is imported and before ``run_ranks``, which then creates a job for each
    run. Without a job a process has no devices.
    """
    load()
    if not enabled():
        os.environ.update(preloading())


def enabled() -> bool:
    """Whether processes started by this one use the libraries. Local."""
    return JOB in os.environ


def load() -> None:
    """Load the libraries into this process, so that torch can be imported. Local, idempotent.

    For a process outside of any job, where torch's CUDA build is installed without NVIDIA's
    packages. The process has no devices. Does nothing once torch is imported.
    """
    if "torch" not in sys.modules:
        for path in _libraries():
            ctypes.CDLL(path)


def activate() -> None:
    """Replace torch's CUDA kernels. Called at the end of ``import torch``. Local, idempotent."""
    if JOB in os.environ:
        from . import kernels

        kernels.activate()


def _libraries() -> list[str]:
    """The files to load: first the CUDA runtime, on which the others depend."""
    folder = build()
    return [str(folder / name) for name in (folder / "libraries").read_text().split()]


def _own_job() -> Job:
    if not os.environ.get(JOB):
        raise StandinsError(
            f"this process does not belong to a job of the stand-ins ({JOB} is not set); "
            "nothing was changed. Start it with run_ranks(..., standins=True) or python -m "
            "reloadpg standins run."
        )
    return Job(Path(os.environ[JOB]), os.environ)


def _edit(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    """Change the lines of the job's faults; a reader sees the old or the new file."""
    path = folder / _FAULTS
    with (folder / f"{_FAULTS}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = path.read_text().splitlines() if path.exists() else []
        new = folder / f"{_FAULTS}.new"
        new.write_text("".join(f"{line}\n" for line in change(lines)))
        new.replace(path)
