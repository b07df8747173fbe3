"""Store keys and errors of NCCL, without NCCL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from reloadpg.c10d import stores
from reloadpg.c10d.tables import Entry
from reloadpg.groups.creation import WORLD_ORDER, Call, Construction
from reloadpg.groups.managed import History
from reloadpg.lifecycle.recreate import spent_keys


@pytest.mark.parametrize(
    ("rank", "size", "more"),
    [
        (0, 4, ["0:1", "0:2", "0:3"]),
        (2, 4, ["2:3"]),
        (3, 4, []),
        (1, 17, []),
        (0, 300, ["UniqueNCCLID:0", "UniqueNCCLID:1", "UniqueNCCLID:2"]),
        (1, 300, []),
    ],
)
def test_keys_of_nccl(rank: int, size: int, more: list[str]) -> None:
    """Unique ids of groups and of pairs are deleted by the member that writes them."""
    if hasattr(dist.distributed_c10d, "ProcessGroupNCCL2") and rank == 0:
        more = [*more, "7@1.1.2/nccl_storekey_0"]
    keys = stores.rendezvous_keys("7@1.1.2", {"cpu": "gloo", "cuda": "nccl"}, rank, size)
    assert [key for key in keys if key.rpartition("//")[2] in more] == [
        f"7@1.1.2//cuda//{key}" for key in more
    ]
    plain = stores.rendezvous_keys("7@1.1.2", {"cpu": "gloo", "cuda": "other"}, rank, size)
    assert len(keys) - len(plain) == len(more)


@pytest.mark.parametrize("rank", [0, 1])
def test_keys_of_gloo(rank: int) -> None:
    """Only keys that a rank writes are listed, since each one costs a request to the store.

    If all device types have the same backend, torch creates it once, and gloo writes one key. In a
    split group the key lacks the prefix of the device.
    """
    made = Construction(
        Call(print, (), {}),
        Entry("0", (0, 1), "gloo", "cpu:gloo,cuda:gloo"),
        ("cpu", "cuda"),
        rank,
        place=WORLD_ORDER,
    )
    group: Any = SimpleNamespace(construction=made, kept={}, history=History(("0", "0@1.1.0")))
    assert spent_keys(group, group) == [
        f"{name}//{place}0/{rank}" for name in ("0", "0@1.1.0") for place in ("cpu//", "")
    ]
    assert spent_keys(group, group) == []
