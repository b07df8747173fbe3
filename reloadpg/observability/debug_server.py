"""This rank's status record at torch's own debug server: ``/handler/reloadpg`` on each rank.

``torch.distributed.debug.start_debug_server()`` starts one server a rank (torch 2.13 and later);
what it answers then is the same record as in a status file. Nothing is started here.
"""

from __future__ import annotations

import os
import threading

from reloadpg import c10d

from .record import process_record

__all__ = ["HANDLER", "serve_status"]

HANDLER = "reloadpg"


def serve_status() -> bool:
    """Let a debug server of this process, now or later, answer with the status record.

    Local; idempotent; costs nothing until it is asked. The answer is made in the server's thread
    and asks no communicator for anything while an operation runs.

    Returns:
        Whether the installed torch takes handlers (2.8 does not).
    """
    return _served.serve()


class _Served:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registered: bool | None = None

    def serve(self) -> bool:
        with self._lock:
            process_record()  # so that it has the reports from now on
            if self._registered is None:
                self._registered = c10d.register_debug_handler(HANDLER, _answer)
                os.register_at_fork(after_in_child=self._after_fork)
            return self._registered

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


def _answer() -> str:
    record = process_record()
    record.refresh()
    return record.text()


_served = _Served()
