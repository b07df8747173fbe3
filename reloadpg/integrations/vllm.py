"""vLLM outside of the trainer's processes: workers in separate processes, or a server.

::

    rollout = colocated(WorkerGroups(llm))  # workers that were started with RELOADPG_AUTOINSTALL=1

    engine = Server("http://127.0.0.1:8000") if rank == 0 else None
    rollout = colocated(engine, engine_groups="server")  # every rank waits for the engine

An engine in the trainer's processes needs neither class: see ``install(sets=...)``. vLLM is not
imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from .. import is_installed, offload, reload
from ..errors import InvalidOptionError, ReloadpgError
from ..settings import is_off
from .colocation import blocking
from .server import HttpServer, status_of

__all__ = ["Server", "WorkerGroups"]


class WorkerGroups:
    """A ``vllm.LLM`` whose ``sleep`` also offloads its workers' groups; for ``colocated``.

    The workers (vLLM's ``mp`` executor) are ranks of a separate job; each call reaches all of them
    by ``LLM.collective_rpc``. Start them with ``RELOADPG_AUTOINSTALL=1`` and
    ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``, without which vLLM passes no functions to workers.
    Blocking; both calls are idempotent.

    Args:
        llm: the engine, awake or asleep.

    Raises:
        InvalidOptionError: the object has no ``collective_rpc`` that blocks, or the workers were
            started without an installation; nothing was changed.
    """

    def __init__(self, llm: Any) -> None:
        if not callable(getattr(llm, "collective_rpc", None)):
            raise InvalidOptionError(
                f"WorkerGroups({llm!r}): it has no collective_rpc(); nothing was changed. Pass a "
                "vllm.LLM."
            )
        self._llm = llm
        self._on_all = blocking(llm, "collective_rpc", f"WorkerGroups({type(llm).__qualname__})")
        if not all(self._on_all(_is_installed)):
            raise InvalidOptionError(
                "WorkerGroups: reloadpg is not installed in the engine's workers; nothing was "
                "changed. Set RELOADPG_AUTOINSTALL=1 before the engine is created."
            )

    def sleep(self, level: int = 1) -> list[dict[str, float | int | str | bool]]:
        """Put the engine to sleep, and offload its workers' groups. Blocking.

        Returns:
            The numbers of each worker's report.
        """
        self._llm.sleep(level=level)
        return list(self._on_all(_offload))

    def wake_up(self, tags: Sequence[str] | None = None) -> Any:
        """Reload the workers' groups, and wake the engine. Blocking.

        Returns:
            What the engine's own ``wake_up`` returns: whether all of it is awake.
        """
        self._on_all(_reload)
        return self._llm.wake_up(tags=None if tags is None else list(tags))


class Server(HttpServer):
    """A vLLM server as an engine for ``colocated``: its ``/sleep`` and ``/wake_up``.

    Start it with ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-sleep-mode``; without the variable it
    has neither route. One rank drives it. Blocking; no proxy is used.

    Args:
        url: address of the server, such as ``"http://127.0.0.1:8000"``.
        timeout: longest wait for a response, a timedelta or seconds.

    Raises:
        InvalidOptionError: an argument is invalid, or the server has no such routes; nothing was
            changed.
        ReloadpgError: the server did not respond. Nothing was changed by the constructor; whether a
            ``sleep`` or ``wake_up`` took effect is unknown.
    """

    def __init__(self, url: str, *, timeout: timedelta | float = 600.0) -> None:
        super().__init__(url, timeout)
        try:
            self._is_sleeping()
        except ReloadpgError as error:
            if status_of(error) != 404:
                raise
            raise InvalidOptionError(
                f"Server({url!r}): it has no /is_sleeping; nothing was changed. Start vLLM's "
                "server with VLLM_SERVER_DEV_MODE=1."
            ) from error

    def sleep(self, level: int = 1) -> None:
        """Put the engine to sleep; this aborts its running requests (vLLM's default)."""
        self._request("POST", f"sleep?level={level}")

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Wake the engine, or its parts; return whether all of it is awake."""
        query = urlencode({"tags": list(tags or ())}, doseq=True)
        self._request("POST", f"wake_up?{query}" if query else "wake_up")
        return not self._is_sleeping()

    def _is_sleeping(self) -> bool:
        body = self._request("GET", "is_sleeping")
        try:
            return bool(json.loads(body)["is_sleeping"])
        except (ValueError, TypeError, KeyError) as error:
            raise ReloadpgError(
                f"GET {self._url}/is_sleeping: the response is not vLLM's"
            ) from error


def _is_installed(worker: Any) -> bool:
    return is_installed() or is_off(os.environ)


def _offload(worker: Any) -> dict[str, float | int | str | bool]:
    return offload().to_dict()


def _reload(worker: Any) -> dict[str, float | int | str | bool]:
    return reload().to_dict()
