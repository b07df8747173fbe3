"""Selection of the groups that become reloadable, as a table."""

from __future__ import annotations

import pytest

from reloadpg import InvalidOptionError
from reloadpg.groups.selection import Selection

NCCL, GLOO = {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "gloo"}
MIXED = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    ("devices", "size", "selected"),
    [
        (NCCL, 2, ("cuda",)),
        (NCCL, 1, ()),
        (GLOO, 8, ()),
        (MIXED, 8, ("cuda",)),
        ({"cpu": "mpi", "cuda": "mpi"}, 8, ()),
        ({"cpu": "fake", "cuda": "fake"}, 8, ()),
        ({"xpu": "xccl"}, 8, ("xpu",)),
        ({"npu": "hccl"}, 8, ("npu",)),
        ({"cuda": "nccl-legacy"}, 8, ("cuda",)),
        ({"cpu": "sim", "privateuseone": "sim"}, 2, ("cpu", "privateuseone")),
        ({"cpu": "sim"}, 2, ()),
    ],
)
def test_by_default_every_backend_that_serves_an_accelerator(devices, size, selected):
    """gloo, mpi, fake and single-rank groups bypass."""
    assert Selection().selected(devices, size) == selected


@pytest.mark.parametrize(
    ("backends", "devices", "selected"),
    [
        ({"gloo"}, GLOO, ("cpu", "cuda")),
        ({"gloo"}, MIXED, ("cpu",)),
        ({"nccl"}, MIXED, ("cuda",)),
        ({"nccl", "gloo"}, MIXED, ("cpu", "cuda")),
        ({"gloo"}, NCCL, ()),
    ],
)
def test_named_backends_override_the_default(backends, devices, selected):
    """Only the named ones, also gloo."""
    assert Selection(frozenset(backends)).selected(devices, 2) == selected


@pytest.mark.parametrize(("size", "selected"), [(1, ()), (3, ()), (4, ("cuda",)), (5, ("cuda",))])
def test_groups_smaller_than_min_size_bypass(size, selected):
    assert Selection(min_size=4).selected(NCCL, size) == selected


def test_a_string_is_one_backend():
    assert Selection.of("gloo", 2, True) == Selection.of({"gloo"}, 2, True)


@pytest.mark.parametrize("backends", [None, {"gloo"}])
@pytest.mark.parametrize("world", ["no", 0, None])
def test_world_is_true_or_false(backends, world):
    """Not any truthy value: ``world="no"`` would make the default group reloadable."""
    with pytest.raises(InvalidOptionError, match=r"install\(world=.*nothing was installed"):
        Selection.of(backends, 2, world)
