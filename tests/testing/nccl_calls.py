"""Calls of NCCL from Python, without torch's engines, in a rank over the stand-ins."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from helpers.nccl_job import MIB, Meetings, signals

SUCCESS = 0
FLOAT, SUM = 7, 0


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Nccl:
    """A rank that creates communicators of all ranks. Each method returns NCCL's result."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._library: Any = ctypes.CDLL(None)
        self._store = signals()
        self._meetings = Meetings(size)
        self._created = 0
        torch.cuda.set_device(rank)
        self._tensor = torch.ones(1, device="cuda")

    def meet(self) -> None:
        """Wait for all ranks."""
        self._meetings.meet()

    def version(self) -> int:
        found = ctypes.c_int()
        assert self("GetVersion", ctypes.byref(found)) == SUCCESS
        return found.value

    def create(self) -> ctypes.c_void_p:
        """Create a communicator of all ranks; a call that fails raises."""
        self._created += 1
        key = f"id{self._created}"
        identity = _UniqueId()
        if self.rank == 0:
            assert self._library.ncclGetUniqueId(ctypes.byref(identity)) == SUCCESS
            self._store.set(key, bytes(identity))
        identity = _UniqueId.from_buffer_copy(self._store.get(key))
        made = ctypes.c_void_p()
        result = self._library.ncclCommInitRank(ctypes.byref(made), self.size, identity, self.rank)
        assert result == SUCCESS
        return made

    def connected(self) -> ctypes.c_void_p:
        """Create a communicator of all ranks and run an all-reduce on it."""
        made = self.create()
        assert self.all_reduce(made) == SUCCESS
        torch.cuda.synchronize()
        return made

    def all_reduce(self, comm: ctypes.c_void_p) -> int:
        return self("AllReduce", *self._buffers(), FLOAT, SUM, comm, None)

    def send(self, comm: ctypes.c_void_p, peer: int) -> int:
        return self("Send", *self._buffers()[1:], FLOAT, peer, comm, None)

    def recv(self, comm: ctypes.c_void_p, peer: int) -> int:
        return self("Recv", *self._buffers()[1:], FLOAT, peer, comm, None)

    def memory_stat(self, comm: ctypes.c_void_p, what: int) -> int:
        """A value of ``ncclCommMemStats``, in bytes."""
        value = ctypes.c_uint64()
        assert self("CommMemStats", comm, what, ctypes.byref(value)) == SUCCESS
        return value.value

    def __call__(self, function: str, *args: Any) -> int:
        return int(getattr(self._library, f"nccl{function}")(*args))

    def _buffers(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]:
        memory = ctypes.c_void_p(self._tensor.data_ptr())
        return memory, memory, ctypes.c_size_t(1)


class Running:
    """A call in a thread."""

    def __init__(self, call: Callable[..., int], *args: Any) -> None:
        self._results: list[int] = []
        self._thread = Thread(target=lambda: self._results.append(call(*args)), daemon=True)
        self._thread.start()

    def returned(self, within: float) -> int | None:
        """The result, or None if the call has not returned within so many seconds."""
        self._thread.join(within)
        return self._results[0] if self._results else None


def device_mib() -> int:
    """MiB of communicators on this rank's device."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) // MIB
