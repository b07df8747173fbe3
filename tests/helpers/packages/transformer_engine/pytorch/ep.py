"""Expert parallelism: the communicator of one group, once per process."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_communicator: list[int] = []
sizes: list[int] = []
"""What each ``ep_finalize`` has read from the communicator."""


def _size() -> int:
    """What NCCL-EP does with the communicator: read it, without torch."""
    size = ctypes.c_int()
    result = ctypes.CDLL(None).ncclCommCount(ctypes.c_void_p(_communicator[0]), ctypes.byref(size))
    return size.value if result == 0 else -1


def ep_bootstrap(ep_group: Any, num_experts: int) -> None:
    if _communicator:
        raise RuntimeError("ep_bootstrap was already called in this process")
    ep_group.barrier().wait()
    _communicator.append(ep_group._get_backend(torch.device("cuda"))._comm_ptr())


def is_ep_bootstrapped() -> bool:
    return bool(_communicator)


def ep_dispatch() -> int:
    """The number of ranks, from the communicator."""
    if not _communicator:
        raise RuntimeError("EpBuffer requires ep_bootstrap() to be called first.")
    return _size()


def ep_finalize() -> None:
    """Idempotent. The end of NCCL-EP's group reads the communicator."""
    if _communicator:
        sizes.append(_size())
        _communicator.clear()
