"""Sources of the amount of memory in use."""

from __future__ import annotations

import types
from contextlib import nullcontext

import pytest

from reloadpg.c10d import devices, memory

GIB = 1 << 30


class FakeRuntime(types.ModuleType):
    """A device of 80 GiB, 50 of them free."""

    def mem_get_info(self):
        return 50 * GIB, 80 * GIB

    def device(self, index):
        return nullcontext()


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime("torch.cuda")
    monkeypatch.setattr(devices, "runtime", lambda: fake)
    monkeypatch.setattr(devices, "of_rank", lambda: (0,))
    return fake


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setattr(memory, "_sources", {})
    return memory.add_source


def test_without_an_accelerator_resident_memory_is_measured(added):
    seen = memory.in_use()
    assert list(seen) == ["rss"]
    with open("/proc/self/status", encoding="ascii") as file:
        resident = next(int(x.split()[1]) * 1024 for x in file if x.startswith("VmRSS"))
    assert seen["rss"] == pytest.approx(resident, rel=0.02)
    assert memory.free_bytes() is None


def test_sources_are_ordered(runtime, added):
    """The device, then added sources, then resident memory."""
    added("other", memory.Source(lambda: 5, lambda: 6))
    seen = memory.in_use()
    assert list(seen) == ["device", "other", "rss"]
    assert (seen["device"], seen["other"]) == (30 * GIB, 5)
    assert memory.free_bytes() == (50 * GIB, "device")


def test_an_added_source_without_a_value_is_omitted(added):
    """The source may not have started yet."""
    added("other", memory.Source(lambda: None))
    assert "other" not in memory.in_use()
    assert memory.free_bytes() is None
    added("other", memory.Source(lambda: 7, lambda: 9))
    assert memory.in_use()["other"] == 7
    assert memory.free_bytes() == (9, "other")
