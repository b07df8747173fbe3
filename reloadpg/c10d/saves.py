"""Asynchronous saves of ``torch.distributed.checkpoint``: the groups that they use in a thread.

``async_save`` returns while a thread still plans and writes the checkpoint, with collectives on the
group that it was given. If that group is released, the checkpoint is lost, and only the future of
the save says so. All savers in threads go through ``execute_save`` of one class, which torch calls
with keyword arguments (2.8.0, 2.13.0, 2.15.0). The saver in a process uses a separate group there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from torch.distributed import ProcessGroup

from .tables import world

SAVERS = "torch.distributed.checkpoint._async_thread_executor"
"""The module of the class. It is not imported here: that takes a second."""

SAVER = ("_ThreadBasedAsyncCheckpointExecutor", "execute_save")

_running: dict[Future[Any], ProcessGroup] = {}


def recording_save(wrapped: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """Wrap ``execute_save``: it also records the save, until the save has ended."""

    @functools.wraps(wrapped)
    def execute_save(*args: Any, **kwargs: Any) -> Future[Any]:
        future = wrapped(*args, **kwargs)
        group = kwargs.get("process_group") or world()
        if group is not None and not kwargs.get("no_dist"):
            _running[future] = group
            future.add_done_callback(_ended)
        return future

    return execute_save


def _ended(future: Future[Any]) -> None:
    _running.pop(future, None)


def saves_on(groups: Collection[ProcessGroup]) -> dict[Future[Any], ProcessGroup]:
    """The running saves that use one of these groups. Local, cheap."""
    running = dict(_running)
    return {save: used for save, used in running.items() if any(used is group for group in groups)}
