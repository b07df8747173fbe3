"""Reports of operations that complete, and of those that fail."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from helpers.fault_job import HELD, Job, fail

import reloadpg
from reloadpg.groups.registry import registry
from reloadpg.lifecycle.callbacks import publish
from reloadpg.reports import GroupReport, Report, Span


class Logged(logging.Handler):
    """Records the levels and messages that the library logs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        logging.getLogger("reloadpg").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@pytest.mark.ranks(2)
def test_reports_of_operations_that_complete_and_of_one_that_fails(rank: int) -> None:
    """Callbacks get the report that the call returns, until they are removed.

    Phases and waits lie within the call. A callback that raises is logged, and the
    operation succeeds. The status has the last error until an operation completes. While an
    operation runs, the status has no memory, since no communicator is queried.
    """
    logged, reports, within, after = Logged(), [], [], []
    Job("sim", subgroups=())

    def memory_of_groups() -> list[int | None]:
        return [group.memory_bytes for group in reloadpg.status().groups]

    assert memory_of_groups() == [HELD]
    with registry.lock, ThreadPoolExecutor() as other:  # as where an operation begins
        assert other.submit(memory_of_groups).result() == [None]
    reloadpg.on_offload(lambda: within.append(memory_of_groups()))
    removes = [
        reloadpg.on_report(lambda _: fail()),
        reloadpg.on_report(reports.append),
        reloadpg.on_report(lambda _: after.append(reloadpg.status().memory_bytes)),
    ]
    offload, reload = reloadpg.offload(), reloadpg.reload()
    take_off = reloadpg.on_offload(lambda: 1 / (1 - rank))
    own = reloadpg.ReloadpgError if rank == 1 else reloadpg.PeerFailedError
    with pytest.raises(own) as raised:
        reloadpg.offload()
    assert "ZeroDivisionError" in reloadpg.status().last_error
    take_off()
    for remove in [*removes, *removes]:
        remove()
    reloadpg.offload()
    assert reloadpg.status().last_error == ""
    first, second, _ = reports
    assert first is offload
    assert second is reload
    assert [report.operation for report in reports] == ["offload", "reload", "offload"]
    assert [report.error.split(":")[0] for report in reports] == ["", "", raised.type.__name__]
    assert {(report.rank, report.world_size) for report in reports} == {(rank, 2)}
    assert [span.name for span in first.spans] == [
        "callbacks", "device", "wait.enter", "groups", "wait.released"
    ]  # fmt: skip
    assert [len(report.groups) for report in reports] == [1, 1, 0]
    for report in reports:
        for span in report.spans:
            assert 0 <= span.start_ms <= span.start_ms + span.ms <= report.total_ms
    assert first.started_at <= second.started_at
    texts = [text for _, text in logged.lines]
    assert texts.count("a callback registered with reloadpg.on_report failed") == 3
    # Rank 0 may enter after rank 1 has failed: it then calls no callback.
    assert within in ([[None]] * 2, [[None]] * 3) if rank == 0 else within == [[None]] * 3
    assert after == [0, 0, 0]  # the callback of the report can query memory


@pytest.mark.ranks(1)
def test_a_warning_is_logged_once_whatever_its_figures() -> None:
    """Later warnings of the same kind are logged at level DEBUG."""
    logged = Logged()
    logging.getLogger("reloadpg").setLevel(logging.DEBUG)
    for texts in (["12.5 MiB stay"], ["99 MiB stay"], ["3 MiB stay", "something else"]):
        publish(replace(_report(0, 1, 0), warnings=tuple(texts)))
    lines = [(level, text) for level, text in logged.lines if level != "INFO"]
    assert lines == [
        ("WARNING", "offload: 12.5 MiB stay"),
        ("DEBUG", "offload: 99 MiB stay"),
        ("DEBUG", "offload: 3 MiB stay"),
        ("WARNING", "offload: something else"),
    ]


def _report(rank: int, size: int, released: int, error: str = "") -> Report:
    memory = {"before": {"device": 1 << 30}, "after": {"device": (1 << 30) - released}}
    groups = tuple(GroupReport(str(n), "", "nccl", 2, "recreate", 1.0) for n in range(size))
    spans = (Span("wait.enter", 0.0, 1.5), Span("groups", 1.5, 2.0), Span("wait.released", 4, 0.5))
    return Report(
        operation="offload",
        changed=not error,
        generation=3,
        groups=groups,
        spans=spans,
        total_ms=12.0,
        memory=memory,
        error=error,
        rank=rank,
    )


def test_str_of_a_report() -> None:
    """One group, not "1 groups"; zero memory, not "-0.0 MiB"; or the error."""
    text = str(_report(0, 1, -5))
    assert text == "offload: 1 group in 12.0 ms, 0.0 MiB released (device), generation 3"
    assert str(_report(0, 2, 3 << 20)).startswith("offload: 2 groups in 12.0 ms, 3.0 MiB released")
    failed = Report(
        operation="reload", changed=False, generation=3, total_ms=1.0, error="RebuildError: x"
    )
    assert str(failed) == "reload: failed after 1.0 ms: RebuildError: x"
    assert failed.to_dict()["reload/failed"] is True
    assert failed.restored_bytes is None


def test_computed_figures_of_a_report() -> None:
    """These are waits, and the released or restored bytes."""
    offload = _report(0, 1, 3 << 20)
    assert (offload.wait_ms, offload.released_bytes) == (2.0, 3 << 20)
    on_cpu = replace(offload, memory={"before": {"rss": 5 << 20}, "after": {"rss": 2 << 20}})
    assert (on_cpu.released_bytes, on_cpu.memory_source) == (None, "")
    reload = replace(offload, operation="reload")
    assert reload.restored_bytes == -(3 << 20)


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


def test_values_of_a_report() -> None:
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
