"""What one rank does: load the function, call it, write down what came of it.

Entered by fork from `_rank_server`, or run as a script in a fresh interpreter. Standard library
only, and torch is touched only if it has been imported already: a fresh interpreter must be free
to choose the order of its imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import io
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

LOADING = "RELOADPG_RANK_LOADING"
"""Set in a rank's environment while it imports the function's module; see `run_ranks`."""

OVER = "over"
"""This file is in the job's directory once a rank has failed: nobody waits for the others."""


def _load_module(name: str, file: str) -> None:
    """Import `name`; if that is impossible or finds another file, load `file` under that name.

    pytest's import modes put test modules under names that a plain import does not find, or
    finds elsewhere (two `test_ranks.py`, some other package called `tests`).
    """
    if name != "__main__":
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(name), "__file__", None)
            if found is not None and os.path.realpath(found) == os.path.realpath(file):
                return
    # As multiprocessing does: `if __name__ == "__main__"` must not be taken in a rank.
    spec_name = "__mp_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(spec_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {file}")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec_name] = sys.modules[name] = module
    spec.loader.exec_module(module)


def _prepare(job: dict[str, Any], job_dir: Path, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(2)
    # Kept open for the life of the process: the dumper writes to it at any later time.
    stack = os.open(job_dir / f"{rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout = io.TextIOWrapper(
        io.FileIO(1, "w", closefd=False), errors="backslashreplace", write_through=True
    )
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True
    )
    sys.path[:] = job["sys_path"]
    sys.argv[:] = job["argv"]
    os.chdir(job["cwd"])


def _call(job: dict[str, Any], job_dir: Path, rank: int) -> bytes:
    os.environ[LOADING] = "1"
    try:
        for name, file in job["modules"]:
            _load_module(name, file)
        fn, args, kwargs = pickle.loads((job_dir / "call.pickle").read_bytes())
    finally:
        del os.environ[LOADING]
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    result = fn(rank, job["world_size"], *args, **kwargs)
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"rank {rank} finished, but its result of type {type(result).__qualname__} cannot be "
            "pickled; return plain values or CPU tensors"
        ) from error


def _write(path: Path, data: bytes) -> None:
    """Write so that the file is either complete or absent, whenever this process is killed."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _stay(job_dir: Path, world_size: int) -> None:
    """Until all ranks have returned or one has failed.

    A peer may still be connecting to this rank, or taking the last bytes of a collective: gloo
    breaks there if the sockets close ("connection closed by peer").
    """
    results = [job_dir / f"{rank}.result" for rank in range(world_size)]
    over = job_dir / OVER
    while not over.exists() and not all(result.exists() for result in results):
        time.sleep(0.01)


def _own_frames_skipped(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        if trace.tb_next is None:
            break
        trace = trace.tb_next
    return trace


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def run(job_dir: Path, rank: int) -> int:
    """Run the job's function as `rank`; return the exit code. Never raises."""
    try:
        job = json.loads((job_dir / "job.json").read_text())
        os.environ.update(job["rank_environ"][rank])
        _prepare(job, job_dir, rank)
        _write(job_dir / f"{rank}.result", _call(job, job_dir, rank))
        _stay(job_dir, job["world_size"])
        code = 0
    except BaseException as error:
        at = time.monotonic()
        error.__traceback__ = _own_frames_skipped(error.__traceback__)
        report = {"exception": "".join(traceback.format_exception(error)), "at": at}
        _write(job_dir / f"{rank}.error", json.dumps(report).encode())
        (job_dir / OVER).touch()
        code = _exit_code(error)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run_forked(job_dir: Path, rank: int) -> NoReturn:
    """Become `rank` in a process forked from the server. Exit handlers do not run."""
    environ = json.loads((job_dir / "job.json").read_text())["environ"]
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
    os._exit(run(job_dir, rank))


def main() -> None:
    """Become a rank in a fresh interpreter, which ends as any other interpreter does."""
    code = run(Path(sys.argv[1]), int(sys.argv[2]))
    if code != 0:
        # A failed rank must not wait for threads that wait for the other ranks.
        os._exit(code)


if __name__ == "__main__":
    main()
