"""DeepEP's buffers: V2 borrows the group's communicator, V1 and HybridEP exchange handles."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .utils.comm import get_nccl_comm_handle, size_of

alive: list[str] = []
"""Kinds of the buffers that exist in this process, with the memory that they hold."""
events: list[str] = []


class ElasticBuffer:
    """Of V2."""

    def __init__(self, group: Any, *, explicitly_destroy: bool = False) -> None:
        self.group = group
        self.explicitly_destroy = explicitly_destroy
        self.nccl_comm_handle = get_nccl_comm_handle(group)
        self.runtime: Any = self.nccl_comm_handle.get()
        alive.append("elastic")
        events.append("elastic created")
        group.barrier().wait()

    def dispatch(self) -> int:
        """The number of ranks, from the communicator."""
        return size_of(self.runtime)

    def destroy(self) -> None:
        """A barrier on the communicator, and the end of a window on it."""
        assert self.explicitly_destroy
        if self.runtime is not None:
            assert size_of(self.runtime) == self.group.size()
            self.runtime = None
            alive.remove("elastic")
            events.append("elastic destroyed")

    def __del__(self) -> None:
        if self.runtime is not None:  # the destructor in C++ frees its memory, and no window
            alive.remove("elastic")


class Buffer:
    """Of V1: all ranks exchange handles in the constructor, and meet in ``destroy``."""

    def __init__(self, group: Any, *, explicitly_destroy: bool = False) -> None:
        self.group = group
        self.explicitly_destroy = explicitly_destroy
        handles = [None] * group.size()
        dist.all_gather_object(handles, group.rank(), group)
        self.runtime: Any = handles
        alive.append("buffer")
        events.append("buffer created")

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        dist.all_gather_object([None] * self.group.size(), 0, self.group)
        self.runtime = None
        alive.remove("buffer")
        events.append("buffer destroyed")


class HybridEPBuffer:
    """It has no ``destroy``: the destructor frees the memory."""

    def __init__(self, group: Any) -> None:
        self.group = group
        alive.append("hybrid")
        events.append("hybrid created")

    def __del__(self) -> None:
        alive.remove("hybrid")
        events.append("hybrid destroyed")
