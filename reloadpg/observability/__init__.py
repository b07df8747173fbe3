"""Observability of a running job: the rank in log records, and a status file of each rank.

Everything here is built on ``reloadpg.on_report`` and ``reloadpg.status()`` and is local.
``reloadpg.install()`` starts it. A failure here, such as a full disk, is one warning in the log and
never an error of the job.

* ``RELOADPG_STATUS_DIR``: one status file per rank in a directory, for ``reloadpg status``.
* Records of the logger ``reloadpg`` and its children have an attribute ``rank``
  (:func:`name_rank_in_records`).
"""

from __future__ import annotations

import os

from ..settings import STATUS_DIR
from .logs import RankHandler, name_rank_in_records

__all__ = ["RankHandler", "name_rank_in_records", "start"]


def start() -> None:
    """Set the rank in log records, and publish the status if it is requested.

    Local; idempotent. Each ``install`` calls it, also if the library is already installed, so that
    a forked child gets the same.
    """
    name_rank_in_records()
    if os.environ.get(STATUS_DIR):
        from .publish import start as publish  # most programs do not need it

        publish()
