"""Asynchronous checkpoints: saves that threads of ``torch.distributed.checkpoint`` still write.

``async_save`` returns while a thread goes on with collectives on the group that it was given. Torch
keeps no list of these threads, so each save is noted when it is handed to one. Saves in a
separate process (``AsyncCheckpointerType.PROCESS``) use that process's groups and are not noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import ref

import wrapt
from torch.distributed import ProcessGroup

from .tables import world

__all__ = ["AsyncSave", "forget_saves", "note_saves", "saves_in_flight", "stop_noting_saves"]

_MODULE = "torch.distributed.checkpoint._async_thread_executor"
_EXECUTOR = "_ThreadBasedAsyncCheckpointExecutor"
_METHOD = "execute_save"
"""Seen on 2.8, 2.13 and 2.15: called once a save, with keywords only from the second argument on,
and returns the future that ``async_save`` gives to its caller."""


@dataclass(frozen=True, eq=False)
class AsyncSave:
    """A save that a thread of this process was given.

    Attributes:
        checkpoint: where it goes, for messages.
        group: the group on which its ranks coordinate.
        future: done when the save has ended, with or without an error.
    """

    checkpoint: str
    group: ref[ProcessGroup]
    future: Future[Any]


class _State:
    """What this process has noted: at most one instance is used, :data:`_state`."""

    noting = False
    hooked = False

    def __init__(self) -> None:
        self.saves: list[AsyncSave] = []


_state = _State()


def note_saves() -> None:
    """Note the saves that begin from now on. Local, idempotent; imports nothing of torch."""
    _state.noting = True
    if not _state.hooked:
        _state.hooked = True
        wrapt.register_post_import_hook(_wrap, _MODULE)
    elif _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])


def stop_noting_saves() -> None:
    """Put torch's own method back, unless somebody else has wrapped it since. Local, idempotent."""
    _state.noting = False
    executor: Any = getattr(sys.modules.get(_MODULE), _EXECUTOR, None)
    method = vars(executor).get(_METHOD) if executor is not None else None
    if isinstance(method, _NotingWrapper):
        setattr(executor, _METHOD, method.__wrapped__)


def saves_in_flight() -> list[AsyncSave]:
    """List the saves of this process that have not ended, in the order they began. Local."""
    _state.saves[:] = [save for save in _state.saves if not save.future.done()]
    return list(_state.saves)


def forget_saves() -> None:
    """In a forked child: the threads that save are the parent's."""
    _state.saves.clear()


class _NotingWrapper(wrapt.FunctionWrapper):  # type: ignore[misc, type-arg, unused-ignore]
    """The wrapper of the library, to be told from those of others."""


def _wrap(module: Any) -> None:
    executor = getattr(module, _EXECUTOR, None)
    method = vars(executor).get(_METHOD) if executor is not None else None
    if _state.noting and method is not None and not isinstance(method, _NotingWrapper):
        setattr(executor, _METHOD, _NotingWrapper(method, _execute_save))


def _execute_save(
    wrapped: Callable[..., Future[Any]], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[Any]:
    future = wrapped(*args, **kwargs)
    group = kwargs.get("process_group") or world()
    if _state.noting and group is not None and not kwargs.get("no_dist"):
        where = kwargs.get("checkpoint_id") or getattr(
            kwargs.get("storage_writer"), "checkpoint_id", None
        )
        saves_in_flight()  # drops those that have ended
        _state.saves.append(AsyncSave(str(where or "a storage writer"), ref(group), future))
    return future
