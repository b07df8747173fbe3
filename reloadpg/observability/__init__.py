"""Observability of a running job: log records, traces, metrics, spans, status files.

Everything here is built on ``reloadpg.on_report`` and ``reloadpg.status()``, is local, and keeps
its own failures to itself: a full disk or a broken exporter is one warning in the log and never an
error of the job. Names are loaded when they are used.

================================  =================================================================
``TraceWriter(path)``             Chrome/Perfetto trace of each offload and reload
``merge_traces(paths, path)``     the ranks' traces as one, on one clock
``ReloadpgCollector``             Prometheus metrics (extra ``prometheus``)
``export_spans()``                OpenTelemetry spans, if its API can be imported
``RELOADPG_STATUS_DIR``           one status file a rank in that directory, for ``reloadpg status``
debug server                      the same record at ``/handler/reloadpg`` of torch's debug server
================================  =================================================================

Records of the logger ``reloadpg`` and of those below it have an attribute ``rank``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end

if TYPE_CHECKING:
    from .debug_server import serve_status
    from .logs import RankHandler, name_rank_in_records
    from .prometheus import ReloadpgCollector
    from .publish import Publisher, publish_status
    from .spans import export_spans
    from .trace import TraceWriter, merge_traces, write_trace

__all__ = [
    "Publisher",
    "RankHandler",
    "ReloadpgCollector",
    "TraceWriter",
    "export_spans",
    "merge_traces",
    "name_rank_in_records",
    "publish_status",
    "serve_status",
    "write_trace",
]

_HOMES = {
    "Publisher": "publish",
    "RankHandler": "logs",
    "ReloadpgCollector": "prometheus",
    "TraceWriter": "trace",
    "export_spans": "spans",
    "merge_traces": "trace",
    "name_rank_in_records": "logs",
    "publish_status": "publish",
    "serve_status": "debug_server",
    "write_trace": "trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
