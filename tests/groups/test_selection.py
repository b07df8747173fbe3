"""Selection of the groups that become reloadable, as a table."""

from __future__ import annotations

import pytest

from reloadpg.c10d.tables import Entry
from reloadpg.groups.selection import Selected, Selection
from reloadpg.groups.sets import TRAINER

NCCL, GLOO = {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "gloo"}
MIXED = {"cpu": "gloo", "cuda": "nccl"}


def decided(selection, devices, size, name="1", desc="undefined"):
    """The devices that are selected; for a group that bypasses, none."""
    config = ",".join(f"{device}:{backend}" for device, backend in devices.items())
    decision = selection.decide(Entry(name, range(size), "", config, desc), lambda: TRAINER)
    return decision.devices if isinstance(decision, Selected) else ()


@pytest.mark.parametrize(
    ("options", "devices", "size", "selected"),
    [
        ({}, NCCL, 2, ("cuda",)),
        ({}, NCCL, 1, ()),
        ({}, GLOO, 8, ()),
        ({}, MIXED, 8, ("cuda",)),
        ({}, {"cpu": "mpi", "cuda": "mpi"}, 8, ()),
        ({}, {"cpu": "fake", "cuda": "fake"}, 8, ()),
        ({}, {"xpu": "xccl"}, 8, ("xpu",)),
        ({}, {"npu": "hccl"}, 8, ("npu",)),
        ({}, {"cpu": "gloo", "musa": "mccl"}, 8, ("musa",)),
        ({}, {"cuda": "nccl-legacy"}, 8, ("cuda",)),
        ({}, {"cpu": "sim", "privateuseone": "sim"}, 2, ("cpu", "privateuseone")),
        ({}, {"cpu": "sim"}, 2, ()),
        ({"backends": frozenset({"gloo"})}, GLOO, 2, ("cpu", "cuda")),
        ({"backends": frozenset({"gloo"})}, MIXED, 2, ("cpu",)),
        ({"backends": frozenset({"nccl"})}, MIXED, 2, ("cuda",)),
        ({"backends": frozenset({"nccl", "gloo"})}, MIXED, 2, ("cpu", "cuda")),
        ({"backends": frozenset({"gloo"})}, NCCL, 2, ()),
        *(({"min_size": 4}, NCCL, size, ("cuda",) if size >= 4 else ()) for size in (1, 3, 4, 5)),
    ],
)
def test_selected_backends(options, devices, size, selected):
    """By default every backend that serves an accelerator: gloo, mpi, fake and groups of one rank
    bypass. Named backends override the default.
    """
    assert decided(Selection(**options), devices, size) == selected


def test_a_string_is_one_backend():
    assert Selection.of("gloo", 2, True) == Selection.of({"gloo"}, 2, True)
