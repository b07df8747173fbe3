"""Export of reports to other systems: OpenTelemetry spans and Prometheus metrics.

Neither is required. Spans need ``opentelemetry-api`` and do nothing without it; the metrics need
the extra ``prometheus``::

    from prometheus_client import REGISTRY, start_http_server
    from reloadpg.observability import ReloadpgCollector

    REGISTRY.register(ReloadpgCollector())
    start_http_server(9400 + local_rank)

Metrics are computed when they are scraped, from ``reloadpg.status()`` and the sums over all reports
since the collector was created. Every sample has the label ``rank``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import reloadpg
from reloadpg import on_report
from reloadpg.reports import GroupStatus, Report, Status

logger = logging.getLogger("reloadpg")

_STATES = ("live", "offloaded", "failed")


def subscribe(what: str, callback: Callable[[Report], object]) -> Callable[[], None]:
    """Register a callback for each report; return a function that removes it. Local.

    It is removed after its first failure, which is logged as one warning that names the exporter
    ``what``: a broken exporter would fail for every report.
    """

    def guarded(report: Report) -> None:
        try:
            callback(report)
        except Exception as error:
            remove()
            logger.warning(
                "%s failed and is now disabled; the job is not affected: %s: %s",
                what,
                type(error).__name__,
                error,
            )

    remove = on_report(guarded)
    return remove


# -- spans -----------------------------------------------------------------------------------------


def export_spans(tracer_provider: Any = None) -> Callable[[], None]:
    """Export spans of each operation: one for the call, and one for each phase and group.

    Local. The span of the call is a child of the caller's current span. Spans are created when the
    operation has ended, with the original times. Does nothing without ``opentelemetry-api``.

    Args:
        tracer_provider: a provider of the OpenTelemetry API; None is the global one.

    Returns:
        A function that stops the export; idempotent.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return lambda: None
    tracer = trace.get_tracer("reloadpg", reloadpg.__version__, tracer_provider)
    return subscribe("the export of spans", partial(_export, trace, tracer))


def _export(trace: Any, tracer: Any, report: Report) -> None:
    def at(ms: float) -> int:
        return int((report.started_at + ms / 1e3) * 1e9)

    attributes = {
        "reloadpg.rank": report.rank,
        "reloadpg.world_size": report.world_size,
        "reloadpg.generation": report.generation,
        "reloadpg.groups": len(report.groups),
        "reloadpg.released_bytes": report.released_bytes,
        "reloadpg.restored_bytes": report.restored_bytes,
    }
    given = {name: value for name, value in attributes.items() if value is not None}
    call = tracer.start_span(f"reloadpg.{report.operation}", start_time=at(0), attributes=given)
    if report.error:
        call.set_status(trace.Status(trace.StatusCode.ERROR, report.error))
    context = trace.set_span_in_context(call)
    for span in report.spans:
        part = tracer.start_span(span.name, context=context, start_time=at(span.start_ms))
        part.end(at(span.start_ms + span.ms))
    for group in report.groups:
        part = tracer.start_span(
            f"group {group.name}",
            context=context,
            start_time=at(group.start_ms),
            attributes={
                "reloadpg.group.desc": group.desc,
                "reloadpg.group.backend": group.backend,
                "reloadpg.group.size": group.size,
                "reloadpg.group.strategy": group.strategy,
            },
        )
        part.end(at(group.start_ms + group.ms))
    call.end(at(report.total_ms))


# -- metrics ---------------------------------------------------------------------------------------


@dataclass
class _Totals:
    calls: int = 0
    failures: int = 0
    seconds: float = 0.0
    bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    last: Report | None = None

    def add(self, report: Report) -> None:
        self.calls += 1
        self.failures += bool(report.error)
        self.seconds += report.total_ms / 1e3
        self.bytes += max(report.moved_bytes or 0, 0)
        for phase, ms in report.phases_ms.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + ms / 1e3
        self.last = report


class ReloadpgCollector:
    """A collector for ``prometheus_client``'s registry. Local; thread-safe.

    Raises:
        ImportError: ``prometheus_client`` is not installed; the message names the extra.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ImportError(
                "ReloadpgCollector needs prometheus_client, which is not installed; no metric is "
                "collected. Install it with: pip install 'reloadpg[prometheus]'"
            ) from error
        self._core: Any = core
        self._lock = threading.Lock()
        self._totals = {"offload": _Totals(), "reload": _Totals(), "recover": _Totals()}
        self._remove = subscribe("the Prometheus collector", self._add)

    def close(self) -> None:
        """Stop collecting reports. Idempotent."""
        self._remove()

    def describe(self) -> list[Any]:
        """Return nothing; otherwise the registry would collect during registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics now; called by the registry."""
        status = reloadpg.status()
        rank = "" if status.rank is None else str(status.rank)
        with self._lock:
            metrics = [*_of_status(status), *_of_groups(status.groups), *_of_reports(self._totals)]
        for metric in metrics:
            kind = getattr(self._core, f"{metric.kind}MetricFamily")
            family = kind(f"reloadpg_{metric.name}", metric.text, labels=["rank", *metric.labels])
            for labels, value in metric.samples:
                family.add_metric([rank, *labels], float(value))
            yield family

    def _add(self, report: Report) -> None:
        with self._lock:
            self._totals[report.operation].add(report)


class _Metric(NamedTuple):
    kind: str
    name: str
    text: str
    labels: tuple[str, ...]
    samples: Sequence[tuple[tuple[str, ...], float]]
    """The values of the labels, and the value."""


_gauge, _counter = partial(_Metric, "Gauge"), partial(_Metric, "Counter")


def _of_status(status: Status) -> Iterator[_Metric]:
    states = [((name,), status.initialized and status.state == name) for name in _STATES]
    yield _gauge("state", "Whether the groups are in this state.", ("state",), states)
    for name, text, value in (
        ("installed", "Whether the library is installed.", status.installed),
        ("generation", "Number of completed reloads of the job.", status.generation),
        ("groups", "Number of reloadable groups.", len(status.groups)),
        ("bypassed_groups", "Number of groups that bypass.", status.bypassed),
    ):
        yield _gauge(name, text, (), [((), value)])
    memory = [((source,), used) for source, used in status.memory.items()]
    yield _gauge("memory_bytes", "Bytes in use, by source.", ("source",), memory)


def _of_groups(groups: tuple[GroupStatus, ...]) -> Iterator[_Metric]:
    labels = ("group", "desc")
    live, held, last = [], [], []
    for group in groups:
        key = (group.name, group.desc)
        live.append((key, group.state == "live"))
        if group.memory_bytes is not None:
            held.append((key, group.memory_bytes))
        times = {"offload": group.last_offload_ms, "reload": group.last_reload_ms}
        last += [((*key, name), ms / 1e3) for name, ms in times.items() if ms is not None]
    yield _gauge("group_live", "Whether the group can be used.", labels, live)
    yield _gauge("group_memory_bytes", "Bytes that its communicator reports.", labels, held)
    text = "Time of the group in the last operation of this kind."
    yield _gauge("group_last_seconds", text, (*labels, "operation"), last)


def _of_reports(totals: Mapping[str, _Totals]) -> Iterator[_Metric]:
    each = ("operation",)
    for name, text in {
        "calls": "Calls that ended, including failed ones.",
        "failures": "Calls that failed.",
        "seconds": "Time spent in calls.",
        "bytes": "Bytes released by offloads, restored by reloads.",
    }.items():
        yield _counter(name, text, each, [((k,), getattr(one, name)) for k, one in totals.items()])
    phases = [((k, phase), s) for k, one in totals.items() for phase, s in one.phases.items()]
    text = "Time by phase; wait.* is time spent waiting for other ranks."
    yield _counter("phase_seconds", text, (*each, "phase"), phases)
    reports = {(k,): one.last for k, one in totals.items() if one.last is not None}
    last = [(k, report.total_ms / 1e3) for k, report in reports.items()]
    yield _gauge("last_seconds", "Time of the last call.", each, last)
    when = [(k, report.started_at) for k, report in reports.items()]
    yield _gauge("last_timestamp_seconds", "Unix time of the last call.", each, when)
