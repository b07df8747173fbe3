"""NCCL's expert parallelism: one context of the process, on the communicator of a group."""

from __future__ import annotations

from typing import Any

import torch
from deep_ep.utils.comm import size_of

_BOOTSTRAPPED = False
_kept: list[int] = []


def ep_bootstrap(group: Any) -> None:
    global _BOOTSTRAPPED
    if _BOOTSTRAPPED:
        raise RuntimeError("ep_bootstrap was called before")
    _kept.append(group._get_backend(torch.device("cuda"))._comm_ptr())
    _BOOTSTRAPPED = True


def ep_finalize() -> None:
    global _BOOTSTRAPPED
    if _BOOTSTRAPPED:
        assert size_of(_kept.pop()) > 0  # it uses the communicator
        _BOOTSTRAPPED = False


def dispatched() -> int:
    return size_of(_kept[0])
