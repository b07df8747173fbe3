"""SGLang outside of the trainer's processes: a server as an engine for ``colocated``.

::

    engine = Server("http://127.0.0.1:30000") if rank == 0 else None
    rollout = colocated(engine, wake_tags=["weights"], engine_groups="server")

SGLang's own ``HttpServerEngineAdapter`` wakes the whole engine at once. SGLang is not imported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta

from ..errors import InvalidOptionError, ReloadpgError
from .server import HttpServer, status_of

__all__ = ["Server"]

TAGS = ("weights", "kv_cache", "cuda_graph")
"""The kinds of memory that a server releases."""

POLL_S = 0.1
"""Seconds between two questions whether the server is idle."""


class Server(HttpServer):
    """A SGLang server as an engine for ``colocated``.

    Start it with ``--enable-memory-saver``, and with ``--enable-weights-cpu-backup`` unless each
    rollout begins with an update of weights. One rank drives it. Blocking; no proxy is used.

    SGLang's scheduler ends if it is to resume memory that is not released, and no route tells what
    is released. So this object keeps account of it: use its methods alone.

    Args:
        url: address of the server, such as ``"http://127.0.0.1:30000"``.
        timeout: longest wait for a response, and for running requests to end, a timedelta or
            seconds.
        api_key: the server's ``--api-key`` or ``--admin-api-key``.
        asleep: whether all of the server's memory is released now.

    Raises:
        InvalidOptionError: an argument is invalid, it is not a SGLang server, or it was started
            without ``--enable-memory-saver``; nothing was changed.
        ReloadpgError: the server did not respond. Nothing was changed by the constructor; whether
            memory was released or resumed is unknown.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: timedelta | float = 600.0,
        api_key: str | None = None,
        asleep: bool = False,
    ) -> None:
        super().__init__(url, timeout, api_key)
        self._released = list(TAGS if asleep else ())
        try:
            enabled = json.loads(self._info())["enable_memory_saver"]
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidOptionError(
                f"Server({url!r}): the response to /server_info is not SGLang's; nothing was "
                "changed. Pass the address of a SGLang server."
            ) from error
        if not enabled:
            raise InvalidOptionError(
                f"Server({url!r}): it was started without --enable-memory-saver and would release "
                "nothing; nothing was changed. Start it with this option."
            )

    def _info(self) -> bytes:
        try:
            return self._request("GET", "server_info")
        except ReloadpgError as error:
            if status_of(error) != 404:
                raise
            return self._request("GET", "get_server_info")  # before 0.5.10

    def release_memory_occupation(self) -> None:
        """Abort running requests, wait until the engine is idle, and release all memory.

        Idempotent.

        Raises:
            ReloadpgError: the engine was still busy after ``timeout``, and nothing was released; or
                as for the constructor.
        """
        tags = [tag for tag in TAGS if tag not in self._released]
        if tags:
            self._request("POST", "abort_request", {"rid": "", "abort_all": True})
            self._await_idle()
            self._request("POST", "release_memory_occupation", {"tags": tags})
            self._released = list(TAGS)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> bool:
        """Resume memory of these tags, or all; return whether all of it is resumed. Idempotent."""
        due = [tag for tag in self._released if tags is None or tag in tags]
        if due:
            self._request("POST", "resume_memory_occupation", {"tags": due})
            self._released = [tag for tag in self._released if tag not in due]
        return not self._released

    def _await_idle(self) -> None:
        """Wait until no request runs: a busy scheduler ends if it is to release memory."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._request("POST", "flush_cache")
                return
            except ReloadpgError as error:
                if status_of(error) != 400:  # it is busy
                    raise
                if time.monotonic() > deadline:
                    raise ReloadpgError(
                        f"{self._url} still runs requests {self._timeout:.0f} s after they were "
                        "aborted; its memory was not released. Send no more requests, and call "
                        "this again."
                    ) from error
            time.sleep(POLL_S)
