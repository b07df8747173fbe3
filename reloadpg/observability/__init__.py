"""Observability of a running job: log records, traces, metrics, spans, status files.

Everything here is built on ``reloadpg.on_report`` and ``reloadpg.status()`` and is local. A failure
here, such as a full disk or a broken exporter, is one warning in the log and never an error of the
job. Names are loaded on first use.

================================  =================================================================
``TraceWriter(path)``             Chrome/Perfetto trace of each offload and reload
``ReloadpgCollector``             Prometheus metrics (extra ``prometheus``)
``export_spans()``                OpenTelemetry spans, if its API can be imported
``RELOADPG_STATUS_DIR``           one status file per rank in a directory, for ``reloadpg status``
debug server                      the same record at ``/handler/reloadpg`` of torch's debug server
================================  =================================================================

Records of the logger ``reloadpg`` and its children have an attribute ``rank``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end

if TYPE_CHECKING:  # for type checkers; at run time __getattr__ finds the names
    from .exporters import ReloadpgCollector as ReloadpgCollector
    from .exporters import export_spans as export_spans
    from .logs import RankHandler as RankHandler
    from .logs import name_rank_in_records as name_rank_in_records
    from .publish import Publisher as Publisher
    from .publish import publish_status as publish_status
    from .publish import serve_status as serve_status
    from .trace import TraceWriter as TraceWriter
    from .trace import write_trace as write_trace

_HOMES = {
    "exporters": "ReloadpgCollector export_spans",
    "logs": "RankHandler name_rank_in_records",
    "publish": "Publisher publish_status serve_status",
    "trace": "TraceWriter write_trace",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
