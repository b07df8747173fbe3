"""Prometheus metrics of this rank: the extra ``prometheus``.

::

    from prometheus_client import REGISTRY, start_http_server
    from reloadpg.observability import ReloadpgCollector

    REGISTRY.register(ReloadpgCollector())
    start_http_server(9400 + local_rank)

Figures are read when they are scraped, from ``reloadpg.status()`` and from what reports have added
up to since the collector was made. Every sample has the label ``rank``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import reloadpg
from reloadpg.lifecycle.report import GroupStatus, Report, Status

from .subscription import subscribe

__all__ = ["ReloadpgCollector"]

_STATES = ("live", "offloaded", "failed")


@dataclass
class _Totals:
    """Sums over the reports of one operation."""

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
        moved = report.released_bytes if report.operation == "offload" else report.restored_bytes
        self.bytes += max(moved or 0, 0)
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
        """Take no more reports. Idempotent."""
        self._remove()

    def describe(self) -> list[Any]:
        """Nothing: asked for by the registry, which would otherwise collect while registering."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics now; called by the registry."""
        status = reloadpg.status()
        rank = "" if status.rank is None else str(status.rank)
        yield from self._of_status(status, rank)
        yield from self._of_groups(status.groups, rank)
        with self._lock:
            yield from self._of_reports(rank)

    def _add(self, report: Report) -> None:
        with self._lock:
            self._totals[report.operation].add(report)

    def _of_status(self, status: Status, rank: str) -> Iterator[Any]:
        state = self._gauge("reloadpg_state", "Whether the groups are in this state.", "state")
        for name in _STATES:
            state.add_metric([rank, name], float(status.initialized and status.state == name))
        yield state
        figures = {
            "installed": ("Whether the library is installed.", status.installed),
            "generation": ("Number of completed reloads of the job.", status.generation),
            "groups": ("Number of reloadable groups.", len(status.groups)),
            "bypassed_groups": ("Number of groups that are left alone.", status.bypassed),
        }
        for name, (text, value) in figures.items():
            family = self._gauge(f"reloadpg_{name}", text)
            family.add_metric([rank], float(value))
            yield family
        memory = self._gauge("reloadpg_memory_bytes", "Bytes in use, by source.", "source")
        for source, used in status.memory.items():
            memory.add_metric([rank, source], used)
        yield memory

    def _of_groups(self, groups: tuple[GroupStatus, ...], rank: str) -> Iterator[Any]:
        labels = ("group", "desc")
        live = self._gauge("reloadpg_group_live", "Whether the group can be used.", *labels)
        held = self._gauge(
            "reloadpg_group_memory_bytes", "What its communicator holds, by its account.", *labels
        )
        last = self._gauge(
            "reloadpg_group_last_seconds",
            "Its part in the last operation of this kind.",
            *labels,
            "operation",
        )
        for group in groups:
            key = [rank, group.name, group.desc]
            live.add_metric(key, float(group.state == "live"))
            if group.memory_bytes is not None:
                held.add_metric(key, group.memory_bytes)
            times = {"offload": group.last_offload_ms, "reload": group.last_reload_ms}
            for operation, ms in times.items():
                if ms is not None:
                    last.add_metric([*key, operation], ms / 1e3)
        yield from (live, held, last)

    def _of_reports(self, rank: str) -> Iterator[Any]:
        counters: dict[str, tuple[str, Callable[[_Totals], float]]] = {
            "calls": ("Calls that ended, failed ones too.", lambda one: one.calls),
            "failures": ("Calls that failed.", lambda one: one.failures),
            "seconds": ("Time spent in calls.", lambda one: one.seconds),
            "bytes": ("Bytes released by offloads, restored by reloads.", lambda one: one.bytes),
        }
        for name, (text, value) in counters.items():
            family = self._counter(f"reloadpg_{name}", text, "operation")
            for operation, totals in self._totals.items():
                family.add_metric([rank, operation], value(totals))
            yield family
        phases = self._counter(
            "reloadpg_phase_seconds",
            "Time by phase; wait.* is time spent waiting for other ranks.",
            *("operation", "phase"),
        )
        last = self._gauge("reloadpg_last_seconds", "Time of the last call.", "operation")
        when = self._gauge(
            "reloadpg_last_timestamp_seconds", "Unix time of the last call.", "operation"
        )
        for operation, totals in self._totals.items():
            for phase, seconds in totals.phases.items():
                phases.add_metric([rank, operation, phase], seconds)
            if totals.last is not None:
                last.add_metric([rank, operation], totals.last.total_ms / 1e3)
                when.add_metric([rank, operation], totals.last.started_at)
        yield from (phases, last, when)

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._core.GaugeMetricFamily(name, text, labels=["rank", *labels])

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._core.CounterMetricFamily(name, text, labels=["rank", *labels])
