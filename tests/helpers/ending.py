"""Programs that end in different ways, in real interpreters that are forked with torch imported.

``python ending.py`` reads one job per line on stdin: a program, and the environments and the files
for stderr of its processes. Each process runs the program as the rest of this module and then ends
as any interpreter does: with its exit handlers and its finalization. The exit codes of the
processes are written to stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch.distributed as dist  # noqa: F401

import reloadpg
from reloadpg.testing import simulated  # noqa: F401

for _module in (reloadpg, reloadpg.recovery):
    for _public in _module.__all__:
        getattr(_module, _public)


def _next_program() -> tuple[str, dict[str, str], str] | None:
    """Serve jobs; return in each forked process, with its program; None at the end."""
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        processes = []
        for environment, stderr in zip(job["environments"], job["stderr"], strict=True):
            process = os.fork()
            if process == 0:
                return job["program"], environment, stderr
            processes.append(process)
        codes = _await(processes, job["seconds"])
        print(json.dumps(codes), flush=True)
    return None


def _await(processes: list[int], seconds: float) -> list[int | None]:
    """The exit codes, negative for a signal; None for a process that hung and was killed."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[process] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for process in set(processes) - codes.keys():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                codes[process] = None
        time.sleep(0.01)
    return [codes[process] for process in processes]


if __name__ == "__main__":
    _todo = _next_program()
    if _todo is not None:
        _program, _environment, _stderr = _todo
        os.environ.update(_environment)
        _file = os.open(_stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(_file, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        exec(compile(_program, "program", "exec"))
