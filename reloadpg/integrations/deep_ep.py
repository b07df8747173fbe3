"""DeepEP: its communicators and buffers end with the generation of their group.

::

    ep = keep(ep_group, lambda: deep_ep.ElasticBuffer(ep_group, ..., explicitly_destroy=True))
    ep.buffer.dispatch(...)  # always through ep.buffer: each reload creates another one

DeepEP V2 takes the ``ncclComm_t`` out of the group and keeps it in a dictionary by group
(``deep_ep.utils.comm._storage``; ``EP_REUSE_NCCL_COMM=1`` is its default). A reloadable group keeps
its identity, so without this module the dictionary returns the released communicator after a
reload. A V1 ``Buffer`` holds 1 to 3 GB, and the end of a process hangs if it was not destroyed by
all ranks. Written for DeepEP dd758ca (V1 and V2) and its branch ``hybrid-ep`` 94a9f8f, whose source
was read; not run with DeepEP, which needs a GPU. DeepEP is not imported here.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import InvalidOptionError, ReloadpgError
from . import holders

__all__ = ["Kept", "keep"]


class Kept(holders.GroupResource):
    """A DeepEP buffer of a reloadable group; see :func:`keep`."""

    PACKAGE = "deep_ep"

    @property
    def buffer(self) -> Any:
        """The current buffer; None while the group is offloaded, and without ``make``."""
        return self.value

    def create(self) -> None:
        super().create()
        if not getattr(self.value, "explicitly_destroy", True):
            raise InvalidOptionError(
                f"keep(): {type(self.value).__name__} was created without explicitly_destroy=True, "
                "so DeepEP cannot free it before the offload. Pass explicitly_destroy=True."
            )

    def drop(self, group: Any, *, broken: bool) -> None:
        buffer, self.value = self.value, None
        destroys = hasattr(buffer, "destroy")
        borrows = not getattr(getattr(buffer, "nccl_comm_handle", None), "managed", True)
        if destroys and not (broken and borrows):
            buffer.destroy()
        # Without destroy(), the destructor of V2 frees the buffer. The window, which belongs to
        # the communicator that has ended, and the pinned workspace stay.
        freed = None if buffer is None else weakref.ref(buffer)
        del buffer
        if freed is not None and not destroys:  # HybridEP frees its memory in the destructor
            gc.collect()
            if freed() is not None:
                raise ReloadpgError(
                    f"{type(freed()).__name__} of {group!r} has no destroy() and is still "
                    "referenced, so its memory is not free. Use it through Kept.buffer only."
                )
        comm = sys.modules.get(f"{self.PACKAGE}.utils.comm")
        getattr(comm, "_storage", {}).pop(group, None)


def keep(group: Any, make: Callable[[], Any] | None = None) -> Kept:
    """Destroy a DeepEP buffer before a generation of its group ends, and create it afterwards.

    Collective over the group if ``make`` is; call it on all members in the same order. An offload
    that recreates the group destroys the buffer and drops DeepEP's communicator of the group, on
    all members in one order, before anything is released. The reload calls ``make`` on all members
    when all groups are live. A suspended group keeps its communicator and its buffer. While
    something of DeepEP is kept by this function, ``install(borrowed=...)`` does not count it as
    borrowed.

    After :func:`reloadpg.recovery.recover` the group's communicator has ended. A V2 buffer that
    borrowed it is dropped without ``destroy``, which would use it. A V1 buffer is destroyed, which
    needs all of its ranks: restart the job instead if a process was replaced.

    Args:
        group: the group that the buffer was created with.
        make: creates the buffer (``Buffer``, ``ElasticBuffer`` or ``HybridEPBuffer``); called now
            and after each reload. V1 and V2 need ``explicitly_destroy=True``. None if the program
            creates no buffer, or creates it when it is missing.

    Returns:
        A handle; its ``buffer`` is the current buffer.

    Raises:
        InvalidOptionError: ``group`` is no group, or the buffer cannot be destroyed explicitly.
    """
    return Kept(group, make)
