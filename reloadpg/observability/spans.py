"""Offload and reload as OpenTelemetry spans. The API is used if it is there, never required."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reloadpg.lifecycle.report import Report

from .subscription import subscribe

__all__ = ["export_spans"]


def export_spans(tracer_provider: Any = None) -> Callable[[], None]:
    """Make spans of each operation from now on: one for the call, one for each phase and group.

    Local. The span of the call becomes a child of the caller's current span. They are made when
    the operation has ended, with the times at which things happened. Without ``opentelemetry-api``
    this does nothing.

    Args:
        tracer_provider: a provider of the OpenTelemetry API; None is the global one.

    Returns:
        A function that ends it; idempotent.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return lambda: None
    import reloadpg

    tracer = trace.get_tracer("reloadpg", reloadpg.__version__, tracer_provider)

    def export(report: Report) -> None:
        _export(trace, tracer, report)

    return subscribe("the export of spans", export)


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
