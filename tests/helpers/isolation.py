"""Separate temporary folder, caches and processes for a test run: none is shared, none is left."""

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
sys.stdin.buffer.read()  # until the run has ended, by whatever means


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
    """Give this process, and all that it starts, a separate temporary folder.

    A keeper process waits for the end of this one, also by a signal. It then kills every process
    that was started with the folder in its environment, and removes the folder: no rank is left,
    and no later run reads a partly written compiled object. A process that ends normally waits.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Inherited by a run in the background of a script; ranks that tests interrupt must not.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of interpreters read the same modules: these are compiled once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Short: names of sockets have 107 characters, and Ray's and multiprocessing's are long.
    folder = tempfile.mkdtemp(prefix="rpg-")
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _KEEPER, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
    )
    stdin = keeper.stdin
    assert stdin is not None
    os.register_at_fork(after_in_child=stdin.close)  # a child that lives on is not the run
    os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    # Torch's own default lies in the temporary folder; run_ranks has one for each process.
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    tempfile.tempdir = None

    def end() -> None:
        stdin.close()
        keeper.wait()

    # After multiprocessing has removed what it has in the folder.
    util.Finalize(None, end, exitpriority=-1000)
