"""Sources of the amount of memory in use, and reports."""

from __future__ import annotations

import json
import types
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest

from reloadpg.c10d import devices
from reloadpg.lifecycle import memory
from reloadpg.reports import GroupReport, Report, Span

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


REPORT = Report(
    operation="offload",
    changed=True,
    generation=3,
    groups=(
        GroupReport("1", "dp", "nccl", 2, "recreate", 2.0, "old", 100),
        GroupReport("2", "tp", "nccl", 2, "skip", 0.5),
        GroupReport("3", "pp", "nccl", 2, "suspend", 0.5, pinned_bytes=1 << 20),
    ),
    spans=(
        Span("device", 1.0, 5.0),
        Span("wait.enter", 6.0, 4.0),
        Span("wait.enter", 10.0, 1.0),
        Span("groups", 11.0, 2.5),
    ),
    total_ms=20.0,
    memory={"before": {"device": 500, "rss": 50}, "after": {"device": 380, "rss": 90}},
    warnings=("w",),
)


def test_values_of_a_report():
    """``to_dict`` is flat and scalar; ``asdict`` has all fields, and converts to JSON."""
    flat = REPORT.to_dict()
    assert flat["offload/total_ms"] == 20.0
    assert flat["offload/wait.enter_ms"] == 5.0
    assert flat["offload/released_bytes"] == 120
    assert flat["offload/pinned_bytes"] == 1 << 20
    assert flat["offload/groups"] == 3
    assert flat["offload/wait_ms"] == 5.0
    assert flat["offload/failed"] is False
    assert "offload/restored_bytes" not in flat
    assert all(isinstance(value, (int, float, str)) for value in flat.values())
    of_a_set = replace(REPORT, sets="engine").to_dict()
    assert of_a_set == {f"offload/engine{key[7:]}": value for key, value in flat.items()}
    details = json.loads(json.dumps(asdict(REPORT)))
    assert details["groups"][0]["reason"] == "old"
    assert details["memory"]["after"]["rss"] == 90
    assert REPORT.memory_source == "device"
    assert "1.0 MiB pinned on the host" in str(REPORT)
    assert details["warnings"] == ["w"]
