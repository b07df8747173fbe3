"""Userbuffers: one communicator for each layer name, over groups that are never destroyed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_ub_communicators: dict[str, _Communicator] = {}
alive: list[str] = []


class _Communicator:
    """Its members exchange handles in the constructor; the destructor frees the memory."""

    def __init__(self, name: str, group: Any) -> None:
        handles = [None] * group.size()
        dist.all_gather_object(handles, (name, group.rank()), group)
        assert handles == [(name, rank) for rank in range(group.size())]
        self.name = name
        alive.append(name)

    def __del__(self) -> None:
        alive.remove(self.name)


def initialize_ub(shape: list[int], tp_size: int) -> None:
    if _ub_communicators:
        raise RuntimeError("UB communicators are already initialized.")
    world = dist.new_group(backend="gloo")
    for name in ("qkv_fprop", "proj_fprop"):
        _ub_communicators[name] = _Communicator(name, world)


def is_ub_initialized() -> bool:
    return bool(_ub_communicators)


def destroy_ub() -> None:
    _ub_communicators.clear()
