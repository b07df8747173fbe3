"""Work beside the calling thread."""

from __future__ import annotations

import gc
import weakref

from reloadpg.rendezvous.worker_thread import Task


class _Held:
    pass


def test_a_task_that_has_ended_holds_nothing_of_its_work() -> None:
    """It may be kept, to be waited for; the groups that it has aborted must not be kept with it."""

    def begin() -> tuple[Task[None], weakref.ref[_Held]]:
        held = _Held()

        return Task(lambda: held and None, "test"), weakref.ref(held)

    task, held = begin()
    assert task.wait(10)
    task._thread.join(10)
    gc.collect()
    assert held() is None
