"""Work in a separate thread."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

from reloadpg.rendezvous.worker_thread import Task
from reloadpg.testing import run_ranks


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
