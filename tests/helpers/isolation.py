"""Isolates a test run: a separate temporary folder and caches, and no processes left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import util

__all__ = ["isolate"]

_KEEPER = """
import os, shutil, signal, sys, time

folder = sys.argv[1]
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin.buffer.read()  # returns when the run has ended, also by a signal


def left():
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if folder.encode() in file.read():
                    yield int(entry)
        except OSError:
            continue


deadline = time.monotonic() + 60
while time.monotonic() < deadline and (pids := list(left())):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    time.sleep(0.05)
shutil.rmtree(folder, ignore_errors=True)
"""


def isolate() -> None:
    """Give this process and its descendants a separate temporary folder.

    A keeper process waits until this one has ended, normally or by a signal. It then kills every
    process that has the folder in its environment, and removes the folder. No rank is left, and no
    later run reads a partly written compiled object. A normal exit waits for the keeper.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background job of a script inherits SIG_IGN; tests interrupt ranks with SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of interpreters import the same modules: compile these once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # A short name: socket paths are limited to 107 characters, and those of Ray are long.
    folder = tempfile.mkdtemp(prefix="rpg-")
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _KEEPER, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
    )
    stdin = keeper.stdin
    assert stdin is not None
    os.register_at_fork(after_in_child=stdin.close)  # the keeper waits only for this process
    os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    # Torch's default is in the temporary folder.
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    tempfile.tempdir = None

    def end() -> None:
        stdin.close()
        keeper.wait()

    # After multiprocessing has removed its files in the folder.
    util.Finalize(None, end, exitpriority=-1000)
