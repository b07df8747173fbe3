"""``get_nccl_comm_handle`` of DeepEP V2: the communicator of a group, in a dictionary by group."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

_storage: dict[Any, NCCLCommHandle] = {}


class NCCLCommHandle:
    """A communicator that was taken from torch: DeepEP does not manage it."""

    managed = False

    def __init__(self, nccl_comm: int) -> None:
        self.nccl_comm = nccl_comm

    def get(self) -> int:
        return self.nccl_comm


def get_nccl_comm_handle(group: Any) -> NCCLCommHandle:
    if group in _storage:
        return _storage[group]
    backend = group._get_backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not hasattr(backend, "_comm_ptr") or not int(os.getenv("EP_REUSE_NCCL_COMM", "1")):
        raise RuntimeError("the stand-in has no communicator to take")
    _storage[group] = NCCLCommHandle(backend._comm_ptr())
    return _storage[group]


def size_of(communicator: int) -> int:
    """What a kernel of DeepEP does with the communicator: use it, without torch."""
    size = ctypes.c_int()
    result = ctypes.CDLL(None).ncclCommCount(ctypes.c_void_p(communicator), ctypes.byref(size))
    return size.value if result == 0 else -1
