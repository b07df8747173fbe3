"""The report of each operation, also of one that failed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import worlds

import reloadpg
from reloadpg.lifecycle import memory
from reloadpg.lifecycle.report import GroupReport, Report, Span
from reloadpg.testing import run_ranks, simulated


def listen(rank: int, size: int) -> dict[str, Any]:
    reports: list[Any] = []
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg").addHandler(handler)
    simulated.register()
    reloadpg.install()
    worlds.init("sim")
    before = [group.memory_bytes for group in reloadpg.status().groups]

    def broken(_: Any) -> None:
        raise ValueError("broken on purpose")

    within: list[Any] = []
    reloadpg.on_offload(lambda: within.append([g.memory_bytes for g in reloadpg.status().groups]))
    after: list[Any] = []
    removes = [
        reloadpg.on_report(broken),
        reloadpg.on_report(reports.append),
        reloadpg.on_report(lambda _: after.append(reloadpg.status().memory_bytes)),
    ]
    returned = [reloadpg.offload(), reloadpg.reload()]
    take_off = reloadpg.on_offload(lambda: 1 / (1 - rank))
    kind = ""
    try:
        reloadpg.offload()
    except reloadpg.ReloadpgError as error:
        kind = type(error).__name__
    failed = reloadpg.status().last_error
    take_off()
    for remove in [*removes, *removes]:
        remove()
    reloadpg.offload()
    return {
        "same": [a is b for a, b in zip(reports, returned, strict=False)],
        "kinds": [(r.operation, r.error.split(":")[0]) for r in reports],
        "who": {(r.rank, r.world_size) for r in reports},
        "spans": [s.name for s in reports[0].spans],
        "inside": all(
            s.start_ms >= 0 and s.start_ms + s.ms <= r.total_ms for r in reports for s in r.spans
        ),
        "groups": [
            (g.start_ms >= 0, g.start_ms + g.ms <= r.total_ms) for r in reports for g in r.groups
        ],
        "started": reports[0].started_at <= reports[1].started_at,
        "kind": kind,
        "failed": failed,
        "afterwards": reloadpg.status().last_error,
        "logged": logged,
        "memory": (before, within[0]),
        "after": after,
    }


def test_reports_of_operations_that_complete_and_of_one_that_fails() -> None:
    """Callbacks get the report that the call returns, until they are removed.

    Phases, waits and groups lie within the call. A callback that raises is logged, and the
    operation succeeds. The status has the last error until an operation completes. While an
    operation runs, the status has no memory, since no communicator is queried.
    """
    for rank, seen in enumerate(run_ranks(listen, 2, timeout=60)):
        error = "ReloadpgError" if rank == 1 else "PeerFailedError"
        assert seen["same"] == [True, True]
        assert seen["kinds"] == [("offload", ""), ("reload", ""), ("offload", error)]
        assert seen["who"] == {(rank, 2)}
        assert seen["spans"] == [
            "wait.enter", "callbacks", "device", "wait.quiesced", "groups", "wait.released"
        ]  # fmt: skip
        assert seen["inside"]
        assert seen["groups"] == [(True, True)] * 2
        assert seen["started"]
        assert seen["logged"].count("a callback registered with reloadpg.on_report failed") == 3
        assert seen["kind"] == error
        assert "ZeroDivisionError" in seen["failed"]
        assert seen["afterwards"] == ""
        assert seen["memory"] == ([0], [None])
        assert seen["after"] == [0, 0, 0]  # the callback of the report can query memory


def warned(rank: int, size: int) -> list[tuple[str, str]]:
    logged: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(  # type: ignore[method-assign]
        (record.levelname, record.getMessage())
    )
    logging.getLogger("reloadpg").addHandler(handler)
    logging.getLogger("reloadpg").setLevel(logging.DEBUG)
    simulated.register()
    reloadpg.install()
    worlds.init("sim")
    held = iter((12.5, 99, 3))
    memory.add_check(lambda: f"{next(held)} MiB stay" if rank == 0 else "this rank is odd")
    reloadpg.offload()
    reloadpg.reload()
    memory.add_check(lambda: "something else stays")
    reloadpg.offload()
    return [(level, text) for level, text in logged if "stay" in text or "odd" in text]


def test_a_warning_is_logged_once_whatever_its_figures() -> None:
    """Later ones of the kind are logged at level DEBUG."""
    ranks = run_ranks(warned, 2, timeout=60)
    for text, logged in zip(["12.5 MiB stay", "this rank is odd"], ranks, strict=True):
        same = [entry for entry in logged if "something else" not in entry[1]]
        assert [level for level, _ in same] == ["WARNING", "DEBUG", "DEBUG"]
        assert text in same[0][1]
        assert [level for level, line in logged if "something else" in line] == ["WARNING"]


def _report(rank: int, size: int, released: int, error: str = "") -> Report:
    memory = {"before": {"device": 1 << 30}, "after": {"device": (1 << 30) - released}}
    groups = tuple(GroupReport(str(n), "", "nccl", 2, "recreate", 1.0) for n in range(size))
    spans = (Span("wait.enter", 0.0, 1.5), Span("groups", 1.5, 2.0), Span("wait.released", 4, 0.5))
    return Report("offload", not error, 3, groups, spans, 12.0, "", memory, (), error, rank=rank)


def test_str_of_a_report_with_small_numbers() -> None:
    """One group, not "1 groups"; zero memory, not "-0.0 MiB"."""
    text = str(_report(0, 1, -5))
    assert text == "offload: 1 group in 12.0 ms, 0.0 MiB released (device), generation 3"
    assert str(_report(0, 2, 3 << 20)).startswith("offload: 2 groups in 12.0 ms, 3.0 MiB released")


def test_computed_figures_of_a_report() -> None:
    """Waits, the library's own overhead, and the bytes that were released or restored."""
    offload = _report(0, 1, 3 << 20)
    assert (offload.wait_ms, offload.overhead_ms) == (2.0, 8.0)
    assert offload.moved_bytes == offload.released_bytes == 3 << 20
    reload = replace(offload, operation="reload")
    assert reload.moved_bytes == reload.restored_bytes == -(3 << 20)


def test_reports_of_many_ranks_print_a_table() -> None:
    """One row per rank, with the first line of an error. ``Reports`` is a list."""
    reports = reloadpg.Reports([_report(0, 2, 3 << 20), _report(1, 0, -5, "PeerFailed: x\nmore")])
    header, rule, first, second = str(reports).splitlines()
    assert header.split() == [
        *("rank", "operation", "groups", "ms", "waiting", "ms", "MiB", "generation", "note")
    ]
    assert set(rule) == {"-", " "}
    assert first.split() == ["0", "offload", "2", "12.00", "2.00", "3.00", "3"]
    assert second.split() == ["1", "offload", "0", "12.00", "2.00", "0.00", "3", "PeerFailed:", "x"]
    assert reports == list(reports)
