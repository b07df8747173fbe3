"""The Chrome/Perfetto trace: events, nesting, and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.reports import group, report

from reloadpg.observability import TraceWriter, write_trace
from reloadpg.reports import Span

SECOND_US = 1e6


def events(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == phase]


def named(path: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in events(path)}


def ends(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def test_events_have_unix_microseconds_a_category_and_arguments(tmp_path: Path) -> None:
    """So the tracks of several ranks need no alignment."""
    write_trace([report(error="RuntimeError: no")], tmp_path / "trace.json")
    found = named(tmp_path / "trace.json")
    start = 1_700_000_000.25 * SECOND_US
    assert (found["offload"]["ts"], found["offload"]["dur"]) == (start, 10_000)
    assert (found["wait.enter"]["ts"], found["wait.enter"]["dur"]) == (start, 3_000)
    assert (found["group 1"]["ts"], found["group 1"]["dur"]) == (start + 4_000, 3_000)
    assert found["offload"]["args"]["error"] == "RuntimeError: no"
    assert found["offload"]["args"]["generation"] == 3
    assert found["group 0"]["args"] == {
        "desc": "desc 0",
        "backend": "nccl",
        "size": 8,
        "strategy": "recreate",
        "set": "trainer",
        "pinned_bytes": 0,
    }
    categories = {name: one["cat"].split(",")[1] for name, one in found.items()}
    assert categories == {
        "offload": "operation",
        "wait.enter": "wait",
        "device": "phase",
        "group 1": "group",
        "group 0": "group",
    }


def test_events_of_a_track_nest(tmp_path: Path) -> None:
    """Any two events are nested or consecutive, whatever the clock readings."""
    spans = (
        Span("connect", 5.0, 4.0),  # around two groups
        Span("wait.enter", 0.0, 3.0),
        Span("device", 2.999, 1.0),  # begins a little before the end of the one before it
        Span("wait.done", 9.0, 2.0),  # ends after the operation
        Span("late", 12.0, 1.0),
    )
    groups = (group("1", 5.5, 1.0), group("0", 6.5, 2.5001))
    path = tmp_path / "trace.json"
    write_trace([report(spans=spans, groups=groups)], path)
    found = events(path)
    for one in found:
        assert one["dur"] >= 0
        for other in found:
            apart = ends(one) <= other["ts"] or ends(other) <= one["ts"]
            within = one["ts"] <= other["ts"] and ends(other) <= ends(one)
            around = other["ts"] <= one["ts"] and ends(one) <= ends(other)
            assert apart or within or around, (one, other)
    by_name = {one["name"]: one for one in found}
    assert by_name["device"]["dur"] == pytest.approx(999, abs=1)  # moved, not swallowed
    assert by_name["connect"]["ts"] < by_name["group 1"]["ts"] < ends(by_name["connect"])


def test_each_rank_has_a_track(tmp_path: Path) -> None:
    """As a named process, in the order of ranks."""
    reports = [report(name, rank=rank) for rank in (1, 0) for name in ("offload", "reload")]
    write_trace(reports, tmp_path / "all.json")
    found = events(tmp_path / "all.json")
    assert sorted((one["pid"], one["name"]) for one in found if "operation" in one["cat"]) == [
        *((0, "offload"), (0, "reload"), (1, "offload"), (1, "reload"))
    ]
    metadata = events(tmp_path / "all.json", "M")
    names = {one["pid"]: one["args"] for one in metadata if one["name"] == "process_name"}
    assert names == {0: {"name": "rank 0"}, 1: {"name": "rank 1"}}
    order = {one["pid"]: one["args"] for one in metadata if one["name"] == "process_sort_index"}
    assert order == {0: {"sort_index": 0}, 1: {"sort_index": 1}}


@pytest.mark.parametrize(
    ("path", "size", "expected"),
    [
        ("trace.json", 1, "trace.json"),
        ("trace.json", 2, "trace-rank1.json"),
        ("trace.{rank}.json", 2, "trace.1.json"),
        ("deeper/{rank}/trace.json", 1, "deeper/1/trace.json"),
    ],
)
def test_each_rank_has_a_file(tmp_path: Path, path: str, size: int, expected: str) -> None:
    """Missing folders are created."""
    with TraceWriter(tmp_path / path) as writer:
        writer.add(report(rank=1, world_size=size))
    assert [str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*.json")] == [expected]


def test_a_file_keeps_the_latest_operations(tmp_path: Path) -> None:
    """A viewer can open the file of a long job."""
    with TraceWriter(tmp_path / "trace.json", kept=2) as writer:
        for generation in range(5):
            writer.add(report(world_size=1, spans=(), groups=(), note=str(generation)))
    notes = [one["args"]["note"] for one in events(tmp_path / "trace.json")]
    assert notes == ["3", "4"]
