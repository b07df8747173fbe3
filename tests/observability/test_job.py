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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch._C import _distributed_c10d
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg import observability


class Spans(InMemorySpanExporter):
    """The spans of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self))

    def begin_with(self, prefix: str) -> list[Any]:
        return [one for one in self.get_finished_spans() if one.name.startswith(prefix)]


@dataclass
class Job:
    """One rank of the job, and what its exporters have written."""

    rank: int
    directory: Path
    log: io.StringIO
    registry: CollectorRegistry
    spans: Spans
    reports: list[reloadpg.Report]
    error: str
    """The error of the offload that failed."""


def run(rank: int, directory: Path) -> Job:
    """Enable everything and run the operations."""
    text = io.StringIO()
    printer = logging.StreamHandler(text)
    printer.setFormatter(logging.Formatter("rank %(rank)s %(name)s %(levelname)s"))
    logging.getLogger().addHandler(printer)
    logging.getLogger("reloadpg").setLevel(logging.INFO)

    reloadpg.install(backends={"gloo"})
    observability.name_rank_in_records()
    served = observability.serve_status()
    end_publishing = observability.publish_status(directory)
    observability.TraceWriter(directory / "trace.json")
    registry = CollectorRegistry()
    registry.register(observability.ReloadpgCollector())
    spans = Spans()
    observability.export_spans(spans.provider)
    reports: list[reloadpg.Report] = []
    reloadpg.on_report(reports.append)

    worlds.init("gloo")
    dist.new_group([0, 1], group_desc="pair")
    for _ in range(2):
        with reloadpg.offloaded():
            pass
    with spans.provider.get_tracer("trainer").start_as_current_span("step"):
        remove = reloadpg.on_offload(lambda: 1 / 0)
        with pytest.raises(reloadpg.ReloadpgError) as failed:
            reloadpg.offload()
        remove()
    reloadpg.offload()
    logging.getLogger("reloadpg.environment.somewhere").warning("a child's record")
    assert served == (TorchVersion(torch.__version__) >= (2, 9))  # torch 2.8 has no handlers
    over_http = _ask_debug_server() if served else None
    end_publishing()
    for thread in _status_threads():
        thread.join(60)
    assert _status_threads() == []
    record = json.loads((directory / f"rank-{rank}.json").read_text())
    assert over_http is None or {**over_http, "time": 0} == {**record, "time": 0}
    return Job(rank, directory, text, registry, spans, reports, type(failed.value).__name__)


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


# ---------------------------------------------------------------------------------------------


def check_log(job: Job) -> None:
    """Each record has the rank, also of child loggers of ``reloadpg`` at the root's handler."""
    lines = job.log.getvalue().splitlines()
    assert f"rank {job.rank} reloadpg INFO" in lines
    assert f"rank {job.rank} reloadpg.environment.somewhere WARNING" in lines
    assert all(line.startswith(f"rank {job.rank} ") for line in lines)


def check_status_file(job: Job) -> None:
    """It has the last state and report."""
    record = json.loads((job.directory / f"rank-{job.rank}.json").read_text())
    assert set(record) == {
        *(
            "version",
            "pid",
            "started",
            "process_table",
            "rank",
            "world_size",
            "host",
            "time",
            "exited",
            "installed",
        ),
        *("status", "last_report", "last_ms", "running", "collectives"),
    }
    assert (record["version"], record["rank"], record["world_size"]) == (1, job.rank, 2)
    assert (record["pid"], record["installed"]) == (os.getpid(), True)
    assert record["status"]["state"] == "offloaded"
    assert [group["desc"] for group in record["status"]["groups"]] == ["default_pg", "pair"]
    last = json.loads(job.reports[-1].to_json())
    assert record["last_report"] == last
    assert record["last_ms"] == {one.operation: one.total_ms for one in job.reports}
    assert record["time"] >= last["started_at"] + last["total_ms"] / 1e3 - 0.01


def events(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event["ph"] != "M"]


def interval(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def operations_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in found if event["cat"].endswith("operation")]


def check_trace(job: Job) -> None:
    """It has every operation; each contains its groups and waits. The publisher's is the same."""
    found = events(job.directory / f"trace-rank{job.rank}.json")
    assert found == events(job.directory / f"trace-rank-{job.rank}.json")
    assert {event["pid"] for event in found} == {job.rank}
    assert [event["name"] for event in operations_of(found)] == [
        report.operation for report in job.reports
    ]
    for operation, report in zip(operations_of(found), job.reports, strict=True):
        begin, end = interval(operation)
        inside = {
            event["name"]
            for event in found
            if begin <= interval(event)[0] <= interval(event)[1] <= end
        }
        assert {f"group {group.name}" for group in report.groups} <= inside
        assert {span.name for span in report.spans} <= inside


def check_metrics(job: Job) -> None:
    """Calls, failures, seconds and states; each sample has the rank as a label."""
    metrics = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in job.registry.collect()
        for sample in family.samples
    }
    label = ("rank", str(job.rank))
    offload, reload = ("operation", "offload"), ("operation", "reload")
    assert all(label in key for key in metrics)
    assert metrics["reloadpg_calls_total", offload, label] == 4
    assert metrics["reloadpg_calls_total", reload, label] == 2
    assert metrics["reloadpg_failures_total", offload, label] == 1
    assert metrics["reloadpg_failures_total", reload, label] == 0
    times = [one.total_ms / 1e3 for one in job.reports if one.operation == "offload"]
    assert metrics["reloadpg_seconds_total", offload, label] == pytest.approx(sum(times))
    assert metrics["reloadpg_last_seconds", offload, label] == pytest.approx(times[-1])
    waited = [
        span.ms / 1e3
        for report in job.reports
        for span in report.spans
        if (report.operation, span.name) == ("reload", "wait.enter")
    ]
    phase = metrics["reloadpg_phase_seconds_total", reload, ("phase", "wait.enter"), label]
    assert phase == pytest.approx(sum(waited))
    states = [
        metrics["reloadpg_state", label, ("state", state)]
        for state in ("live", "offloaded", "failed")
    ]
    assert states == [0, 1, 0]
    assert metrics["reloadpg_generation", label] == metrics["reloadpg_groups", label] == 2
    pair = (("desc", "pair"), ("group", "1"))
    assert metrics[("reloadpg_group_live", *pair, label)] == 0
    assert metrics[("reloadpg_group_last_seconds", *pair, reload, label)] > 0


def check_spans(job: Job) -> None:
    """Each call has a child span of its caller; phases and groups are its children."""
    calls = job.spans.begin_with("reloadpg.")
    (step,) = job.spans.begin_with("step")
    failed = [bool(report.error) for report in job.reports]
    assert failed == [False] * 4 + [True, False]
    assert job.error in job.reports[4].error  # the error that the call raised
    for call, report in zip(calls, job.reports, strict=True):
        assert call.name == f"reloadpg.{report.operation}"
        assert call.attributes["reloadpg.rank"] == job.rank
        assert call.status.status_code.name == ("ERROR" if report.error else "UNSET")
        assert (call.parent and call.parent.span_id) == (
            step.context.span_id if report.error else None
        )
        assert (call.end_time - call.start_time) / 1e6 == pytest.approx(report.total_ms, 0.01)
        parts = [
            one
            for one in job.spans.get_finished_spans()
            if one.parent and one.parent.span_id == call.context.span_id
        ]
        expected = [span.name for span in report.spans]
        expected += [f"group {group.name}" for group in report.groups]
        assert sorted(one.name for one in parts) == sorted(expected)
        assert all(call.start_time <= one.start_time <= one.end_time for one in parts)


@pytest.mark.ranks(2, timeout=120)
def test_every_exporter_has_the_operations_of_a_job(rank: int, tmp_path: Path) -> None:
    """Also torch's debug server, with the record of the status file."""
    job = run(rank, tmp_path)
    for check in (check_log, check_status_file, check_trace, check_metrics, check_spans):
        check(job)
    reloadpg.environment.barrier("all have written")
    names = [f"{kind}{one}.json" for kind in ("rank-", "trace-rank-", "trace-rank") for one in "01"]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)  # no partial files
    ranks = [operations_of(events(tmp_path / f"trace-rank{one}.json")) for one in (0, 1)]
    for one, other in zip(*ranks, strict=True):  # collective: they overlap in time
        assert max(interval(one)[0], interval(other)[0]) < min(interval(one)[1], interval(other)[1])
