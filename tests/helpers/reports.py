"""Sample reports, for tests without a job."""

from __future__ import annotations

from typing import Any

from reloadpg.reports import GroupReport, Report, Span


def group(name: str, start_ms: float, ms: float, **more: Any) -> GroupReport:
    return GroupReport(name, f"desc {name}", "nccl", 8, "recreate", ms, start_ms, **more)


def report(operation: str = "offload", **more: Any) -> Report:
    settings = {
        "groups": (group("1", 4.0, 3.0), group("0", 7.0, 2.0)),
        "spans": (Span("wait.enter", 0.0, 3.0), Span("device", 3.0, 1.0)),
        "total_ms": 10.0,
        "started_at": 1_700_000_000.25,
        "rank": 0,
        "world_size": 2,
        **more,
    }
    return Report(operation=operation, changed=True, generation=3, **settings)
