"""One job of two ranks, through every exporter.

It offloads and reloads twice, and then fails an offload on all ranks and reloads.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch._C import _distributed_c10d
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg import observability
from reloadpg.testing import run_ranks


def job(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """One rank: enable everything, run the operations, return what was recorded."""
    text = io.StringIO()
    printer = logging.StreamHandler(text)
    printer.setFormatter(logging.Formatter("rank %(rank)s %(name)s %(levelname)s"))
    logging.getLogger().addHandler(printer)
    logging.getLogger("reloadpg").setLevel(logging.INFO)

    reloadpg.install(backends={"gloo"})
    observability.name_rank_in_records()
    served = observability.serve_status()
    end_publishing = observability.publish_status(directory)
    observability.TraceWriter(f"{directory}/trace.json")
    registry = CollectorRegistry()
    registry.register(observability.ReloadpgCollector())
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    observability.export_spans(provider)
    reports: list[reloadpg.Report] = []
    reloadpg.on_report(reports.append)

    worlds.init("gloo")
    dist.new_group([0, 1], group_desc="pair")
    for _ in range(2):
        with reloadpg.offloaded():
            pass
    with provider.get_tracer("trainer").start_as_current_span("step"):
        remove = reloadpg.on_offload(lambda: 1 / 0)
        with pytest.raises(reloadpg.ReloadpgError) as failed:
            reloadpg.offload()
        remove()
    reloadpg.offload()
    logging.getLogger("reloadpg.environment.somewhere").warning("a child's record")
    over_http = _ask_debug_server() if served else None
    end_publishing()
    for thread in _status_threads():
        thread.join(60)
    return {
        "reports": [report.details() for report in reports],
        "error": type(failed.value).__name__,
        "log": text.getvalue(),
        "http": over_http,
        "metrics": {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in registry.collect()
            for sample in family.samples
        },
        "spans": [
            {
                "name": span.name,
                "start": span.start_time,
                "end": span.end_time,
                "parent": span.parent.span_id if span.parent else None,
                "id": span.context.span_id,
                "status": span.status.status_code.name,
                "attributes": dict(span.attributes or {}),
            }
            for span in spans.get_finished_spans()
        ],
        "pid": os.getpid(),
        "threads": len(_status_threads()),
    }


def _ask_debug_server() -> dict[str, Any]:
    server = _distributed_c10d._WorkerServer("127.0.0.1", 0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("POST", "/handler/reloadpg", body=b"", headers={"Content-Length": "0"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.getheader("Content-Type") == "application/json"
        answer: dict[str, Any] = json.loads(response.read())
        return answer
    finally:
        connection.close()
        server.shutdown()


def _status_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "reloadpg-status"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(job, 2, args=(str(directory),), timeout=120)


# ---------------------------------------------------------------------------------------------


def test_every_log_record_has_the_rank(ranks: list[dict[str, Any]]) -> None:
    """Also records of child loggers of ``reloadpg`` at a handler of the root logger."""
    for rank, seen in enumerate(ranks):
        lines = seen["log"].splitlines()
        assert f"rank {rank} reloadpg INFO" in lines
        assert f"rank {rank} reloadpg.environment.somewhere WARNING" in lines
        assert all(line.startswith(f"rank {rank} ") for line in lines)


def test_the_status_file_has_the_last_state_and_report(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    for rank, seen in enumerate(ranks):
        record = json.loads((directory / f"rank-{rank}.json").read_text())
        assert set(record) == {
            *("version", "pid", "rank", "world_size", "host", "time", "exited", "installed"),
            *("status", "last_report", "last_ms", "running", "collectives"),
        }
        assert (record["version"], record["rank"], record["world_size"]) == (1, rank, 2)
        assert record["pid"] == seen["pid"]
        assert record["installed"] is True
        assert record["status"]["state"] == "offloaded"
        assert [group["desc"] for group in record["status"]["groups"]] == ["default_pg", "pair"]
        assert record["last_report"] == json.loads(json.dumps(seen["reports"][-1]))
        assert record["last_ms"] == {one["operation"]: one["total_ms"] for one in seen["reports"]}
        last = record["last_report"]
        assert record["time"] >= last["started_at"] + last["total_ms"] / 1e3 - 0.01


def test_publishing_leaves_no_threads_and_no_partial_files(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    assert [seen["threads"] for seen in ranks] == [0, 0]
    assert sorted(file.name for file in directory.iterdir()) == [
        *("rank-0.json", "rank-1.json", "trace-rank-0.json", "trace-rank-1.json"),
        *("trace-rank0.json", "trace-rank1.json"),
    ]


def test_the_debug_server_returns_the_same_record(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    """Over HTTP, from torch's server; torch 2.8 has none."""
    if TorchVersion(torch.__version__) < (2, 9):
        assert [seen["http"] for seen in ranks] == [None, None]
        return
    for rank, seen in enumerate(ranks):
        record = json.loads((directory / f"rank-{rank}.json").read_text())
        assert {**seen["http"], "time": 0} == {**record, "time": 0}


def test_the_trace_has_every_operation(ranks: list[dict[str, Any]], directory: Path) -> None:
    """One track per rank; each operation contains its groups and waits."""
    paths = [directory / f"trace-rank{rank}.json" for rank in (0, 1)]
    found = [event for one in paths for event in json.loads(one.read_text())["traceEvents"]]
    events = [event for event in found if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    published = [directory / f"trace-rank-{rank}.json" for rank in (0, 1)]
    for path, other in zip(paths, published, strict=True):  # of the publisher: the same
        ours, theirs = (json.loads(one.read_text())["traceEvents"] for one in (path, other))
        assert [e for e in ours if e["ph"] != "M"] == [e for e in theirs if e["ph"] != "M"]
    spans = {}
    for rank, seen in enumerate(ranks):
        mine = [event for event in events if event["pid"] == rank]
        operations = [event for event in mine if event["cat"].endswith("operation")]
        assert [event["name"] for event in operations] == [
            report["operation"] for report in seen["reports"]
        ]
        for event, report in zip(operations, seen["reports"], strict=True):
            inside = {
                other["name"]
                for other in mine
                if event["ts"] <= other["ts"] <= other["ts"] + other["dur"]
                and other["ts"] + other["dur"] <= event["ts"] + event["dur"]
            }
            assert {f"group {group['name']}" for group in report["groups"]} <= inside
            assert {span["name"] for span in report["spans"]} <= inside
        spans[rank] = [(event["ts"], event["ts"] + event["dur"]) for event in operations]
    for one, other in zip(spans[0], spans[1], strict=True):  # collective: they overlap in time
        assert max(one[0], other[0]) < min(one[1], other[1])


def test_metrics_count_calls_failures_seconds_and_states(ranks: list[dict[str, Any]]) -> None:
    """Each sample has the rank as a label."""
    for rank, seen in enumerate(ranks):
        metrics, label = seen["metrics"], ("rank", str(rank))
        offload, reload = ("operation", "offload"), ("operation", "reload")
        assert metrics["reloadpg_calls_total", offload, label] == 4
        assert metrics["reloadpg_calls_total", reload, label] == 2
        assert metrics["reloadpg_failures_total", offload, label] == 1
        assert metrics["reloadpg_failures_total", reload, label] == 0
        times = [r["total_ms"] / 1e3 for r in seen["reports"] if r["operation"] == "offload"]
        assert metrics["reloadpg_seconds_total", offload, label] == pytest.approx(sum(times))
        assert metrics["reloadpg_last_seconds", offload, label] == pytest.approx(times[-1])
        waited = [
            span["ms"] / 1e3
            for report in seen["reports"]
            for span in report["spans"]
            if (report["operation"], span["name"]) == ("reload", "wait.enter")
        ]
        phase = metrics["reloadpg_phase_seconds_total", reload, ("phase", "wait.enter"), label]
        assert phase == pytest.approx(sum(waited))
        states = [
            metrics["reloadpg_state", label, ("state", state)]
            for state in ("live", "offloaded", "failed")
        ]
        assert states == [0, 1, 0]
        assert metrics["reloadpg_generation", label] == 2
        assert metrics["reloadpg_groups", label] == 2
        pair = (("desc", "pair"), ("group", "1"))
        assert metrics[("reloadpg_group_live", *pair, label)] == 0
        assert metrics[("reloadpg_group_last_seconds", *pair, reload, label)] > 0
        assert all(label in key for key in metrics)


def test_each_call_has_a_child_span_of_its_caller(ranks: list[dict[str, Any]]) -> None:
    """Phases and groups have child spans; errors are marked."""
    for rank, seen in enumerate(ranks):
        errors = [report["error"] for report in seen["reports"]]
        assert [bool(error) for error in errors] == [False] * 4 + [True, False]
        assert seen["error"] in errors[4]  # the error that the call raised
        spans = seen["spans"]
        calls = [span for span in spans if span["name"].startswith("reloadpg.")]
        assert [span["name"] for span in calls] == [
            f"reloadpg.{report['operation']}" for report in seen["reports"]
        ]
        for call, report in zip(calls, seen["reports"], strict=True):
            assert call["attributes"]["reloadpg.rank"] == rank
            assert call["status"] == ("ERROR" if report["error"] else "UNSET")
            assert (call["end"] - call["start"]) / 1e6 == pytest.approx(report["total_ms"], 0.01)
            parts = [span for span in spans if span["parent"] == call["id"]]
            expected = [span["name"] for span in report["spans"]]
            expected += [f"group {group['name']}" for group in report["groups"]]
            assert sorted(span["name"] for span in parts) == sorted(expected)
            assert all(call["start"] <= span["start"] <= span["end"] for span in parts)
        (step,) = [span for span in spans if span["name"] == "step"]
        failed = [call for call in calls if call["status"] == "ERROR"]
        assert [call["parent"] for call in failed] == [step["id"]]
