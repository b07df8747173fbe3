"""Observability that starts with an installation: cheap, local, and never an error."""

from __future__ import annotations

import logging

from ..groups.registry import registry
from .debug_server import serve_status
from .logs import name_rank_in_records
from .publish import publish_status

__all__ = ["start", "start_with_installations"]

logger = logging.getLogger("reloadpg")


def start_with_installations() -> None:
    """Call :func:`start` with every ``install`` from now on. Local; idempotent."""
    if start not in registry.callbacks.install:
        registry.callbacks.install.append(start)


def start() -> None:
    """Name the rank in log records, answer torch's debug server, publish the status if asked to.

    Local; idempotent; called by ``install``, also by one that finds the library installed: a
    forked child gets what its parent had.
    """
    name_rank_in_records()
    try:
        serve_status()
        publish_status()
    except Exception as error:  # what only shows the job must not stop it
        logger.warning("no status of this process will be shown: %s", error)
