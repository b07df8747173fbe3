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

from ...settings import NCCL
from ..faults import Fault, InjectedFault
from ._build import StandinsError, build, check_nccl

__all__ = [
    "JOB",
    "NCCL",
    "Job",
    "StandinsError",
    "activate",
    "build",
    "communicators",
    "enable",
    "enabled",
    "job",
    "left_bytes",
    "load",
    "pinned_bytes",
    "preloading",
    "uses_after_release",
]

JOB = "RELOADPG_STANDIN_JOB"
"""Environment variable with the folder of the job. Without it a process has no devices."""

_FAULTS, _FIRED = "faults", "fired"
"""Files of a job: the faults, a line each, and the id of a fault for each time it has fired."""
_RELEASED = "released"
_RUNNER = re.compile(r"\n[^\n]*/reloadpg/testing/_rank\.py")
"""The first line of a Python stack below the function of ``run_ranks``."""
_serials = itertools.count()


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


def uses_after_release() -> list[str]:
    """Call :meth:`Job.uses_after_release` of this process's job. Local."""
    return _own_job().uses_after_release()


def communicators() -> int:
    """The number of communicators that this process has created and not destroyed. Local."""
    return _counted("communicators")


def left_bytes() -> int:
    """Device memory left by communicators that ended while they were suspended. Local.

    NCCL 2.30.7 does not release these 4 MiB of each communicator before the process ends.
    """
    return _counted("left_bytes")


def pinned_bytes() -> int:
    """Pinned host memory that suspended communicators of this process hold, in bytes. Local.

    With NVIDIA's host code: all pinned host memory of the process.
    """
    return _counted("pinned_bytes")


def _counted(what: str) -> int:
    _own_job()
    count = ctypes.CDLL(None)[f"standin_{what}"]
    count.restype = ctypes.c_long
    return int(count())


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


class FaultOfNccl(InjectedFault):
    """A fault of NCCL, as a line of a file that the calls of all processes of the job read."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self._folder, self._identity = _own_job().folder, f"{os.getpid()}.{next(_serials)}"
        given = {"id": self._identity}
        for name in ("action", "operation", "rank", "nth", "times", "seconds"):
            given[name] = getattr(fault, name)
        line = "\t".join(f"{name}={value}" for name, value in given.items() if value is not None)
        _edit_faults(self._folder, lambda lines: [*lines, line])

    @property
    def fired(self) -> int:
        path = self._folder / _FIRED
        return path.read_text().split().count(self._identity) if path.exists() else 0

    def wait_fired(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self.fired and time.monotonic() < end:
            time.sleep(0.01)
        return self.fired > 0

    def clear(self) -> None:
        super().clear()
        own = f"id={self._identity}\t"
        _edit_faults(self._folder, lambda lines: [x for x in lines if not x.startswith(own)])


def clear_faults_of_nccl() -> None:
    """Remove all faults of NCCL of this process's job, if it belongs to one. Local."""
    if os.environ.get(JOB):
        _edit_faults(_own_job().folder, lambda _: [])


def _edit_faults(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    """Change the lines of the job's faults; a reader sees the old or the new file."""
    path = folder / _FAULTS
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = path.read_text().splitlines() if path.exists() else []
        new = path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in change(lines)))
        new.replace(path)
