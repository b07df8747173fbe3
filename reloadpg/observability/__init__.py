"""Observability of a running job: log records, traces, metrics, spans, status files.

Everything here is built on ``reloadpg.on_report`` and ``reloadpg.status()`` and is local. A failure
here, such as a full disk or a broken exporter, is one warning in the log and never an error of the
job.

================================  =================================================================
``TraceWriter(path)``             Chrome/Perfetto trace of each offload and reload
``ReloadpgCollector``             Prometheus metrics (extra ``prometheus``)
``export_spans()``                OpenTelemetry spans, if its API can be imported
``RELOADPG_STATUS_DIR``           one status file per rank in a directory, for ``reloadpg status``
debug server                      the same record at ``/handler/reloadpg`` of torch's debug server
================================  =================================================================

Records of the logger ``reloadpg`` and its children have an attribute ``rank``.
"""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end

from .exporters import ReloadpgCollector, export_spans
from .logs import RankHandler, name_rank_in_records
from .publish import Publisher, publish_status, serve_status
from .trace import TraceWriter, write_trace

__all__ = [
    "Publisher",
    "RankHandler",
    "ReloadpgCollector",
    "TraceWriter",
    "export_spans",
    "name_rank_in_records",
    "publish_status",
    "serve_status",
    "write_trace",
]
