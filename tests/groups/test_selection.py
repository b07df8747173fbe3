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
    """gloo, mpi and fake bypass, and so do single-rank groups."""
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
    """Only what is named, and that even if it is gloo."""
    assert Selection(frozenset(backends)).selected(devices, 2) == selected


@pytest.mark.parametrize(("size", "selected"), [(1, ()), (3, ()), (4, ("cuda",)), (5, ("cuda",))])
def test_smaller_groups_bypass(size, selected):
    """min_size is the smallest size that is taken."""
    assert Selection(min_size=4).selected(NCCL, size) == selected


def test_a_single_name_is_taken_as_one_backend_not_as_letters():
    """``backends="gloo"`` means the same as ``backends={"gloo"}``."""
    assert Selection.of("gloo", 2, True) == Selection.of({"gloo"}, 2, True)


@pytest.mark.parametrize("backends", [None, {"gloo"}])
@pytest.mark.parametrize("world", ["no", 0, None])
def test_world_is_true_or_false(backends, world):
    """A word would count as true: with ``world="no"`` the default group would be reloadable."""
    with pytest.raises(InvalidOptionError, match=r"install\(world=.*nothing was installed"):
        Selection.of(backends, 2, world)
