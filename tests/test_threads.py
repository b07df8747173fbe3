"""Work in a separate thread."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

import reloadpg
from reloadpg.testing import run_ranks
from reloadpg.threads import Task


class _Held:
    pass


def test_an_ended_task_keeps_no_reference_to_its_work() -> None:
    """A task may be kept, but must not keep the groups alive that it has aborted."""

    def begin() -> tuple[Task[None], weakref.ref[_Held]]:
        held = _Held()

        return Task(lambda: held and None, "test"), weakref.ref(held)

    task, held = begin()
    assert task.wait(60)
    task.join(60)
    gc.collect()
    assert held() is None


def _given_to_another_thread(rank: int, world_size: int) -> list[bool]:
    ready, handled, ended = threading.Event(), threading.Event(), threading.Event()
    while_waiting: list[bool] = []

    def signal_the_process() -> None:
        ready.wait()
        os.kill(os.getpid(), signal.SIGUSR2)
        while_waiting.append(handled.wait(60))
        ended.set()

    signal.signal(signal.SIGUSR2, lambda *_: handled.set())
    threading.Thread(target=signal_the_process, daemon=True).start()
    task = Task(ended.wait, "test")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # of this thread alone
    ready.set()
    task.wait(300)
    return while_waiting


def test_a_signal_delivered_to_another_thread_is_handled_while_waiting() -> None:
    """The kernel does not wake the main thread for it, so the wait checks periodically."""
    assert run_ranks(_given_to_another_thread, 1, timeout=120) == [[True]]


@pytest.mark.slow
def test_the_exit_of_the_interpreter_waits_for_running_tasks() -> None:
    """Otherwise a thread would be unwound within a call of the store, which ends the process."""
    program = """
import atexit, threading, time
from reloadpg.threads import Task

exits = threading.Event()

def work():
    exits.wait()
    time.sleep(0.2)  # the exit has continued
    print("ended", flush=True)

Task(work, "test")
atexit.register(exits.set)  # called before the functions that were registered earlier
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


@pytest.mark.slow
def test_no_thread_starts_while_the_interpreter_exits() -> None:
    """A background task that starts others is refused, and no thread is joined before its start."""
    program = """
import threading
from reloadpg.threads import Task

begun = threading.Event()

def work():
    try:
        while True:
            Task(begun.set, "inner").wait(60)
    except RuntimeError as error:
        print(error, flush=True)

Task(work, "outer")
begun.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "reloadpg-inner was not started" in done.stdout


def test_every_thread_of_the_library_follows_the_rule() -> None:
    """No module starts a thread that the exit of the interpreter does not know."""
    package = Path(reloadpg.__file__).parent
    sources = {path: path.read_text("utf-8") for path in package.rglob("*.py")}
    found = {
        str(path.relative_to(package))
        for path, text in sources.items()
        if re.search(r"threading\.Thread\(|ThreadPoolExecutor|start_new_thread", text)
    }
    # Within a block that joins it; and a pool of workers, which Python joins itself.
    assert found == {"testing/standins/_build.py"}


def test_an_interrupt_in_the_start_of_a_thread_does_not_break_the_exit() -> None:
    """The other threads are joined: a thread that never began cannot be."""
    program = """
import linecache, sys, threading
from reloadpg.threads import Task

def trace(frame, event, arg):
    inside = frame.f_code is threading.Thread.start.__code__
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if event == "line" and inside and "(self._bootstrap" in line:  # the thread does not begin
        sys.settrace(None)
        raise KeyboardInterrupt
    return trace if inside or event == "call" else None

sys.settrace(trace)
try:
    Task(lambda: None, "interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)

def work():
    threading.main_thread().join(0.5)
    print("ended", flush=True)

Task(work, "other")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\nended\n", "")
