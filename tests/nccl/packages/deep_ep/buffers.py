"""The buffer of DeepEP V2, which borrows the group's communicator."""

from __future__ import annotations

from typing import Any

from .utils.comm import get_nccl_comm_handle, size_of

alive: list[str] = []
"""Kinds of the buffers that exist in this process, with the memory that they hold."""


class ElasticBuffer:
    """Of V2."""

    def __init__(self, group: Any, *, explicitly_destroy: bool = False) -> None:
        self.group = group
        self.explicitly_destroy = explicitly_destroy
        self.nccl_comm_handle = get_nccl_comm_handle(group)
        self.runtime: Any = self.nccl_comm_handle.get()
        alive.append("elastic")
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

    def __del__(self) -> None:
        if self.runtime is not None:  # the destructor in C++ frees its memory, and no window
            alive.remove("elastic")
