"""SGLang behind HTTP: a server that releases its memory while the trainer runs.

::

    engine = Server("http://127.0.0.1:30000") if rank == 0 else None
    rollout = colocated(engine, engine_groups="server")  # every rank waits for the engine

SGLang's ``Engine`` in the trainer's processes, and its ``HttpServerEngineAdapter``, need no
adapter: ``colocated`` takes them. SGLang itself is not imported. Written from the source of SGLang
0.5; it has not run with a real server.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ..errors import InvalidOptionError
from .servers import EngineServer

__all__ = ["Server"]


class Server(EngineServer):
    """An SGLang server as an engine for ``colocated``, driven by one rank.

    Start the server with ``--enable-memory-saver``, without which it frees no memory. Blocking; no
    proxy is used.

    Args:
        url: address of the server, such as ``"http://127.0.0.1:30000"``.
        timeout: longest wait for a response, a timedelta or seconds.

    Raises:
        InvalidOptionError: an argument is invalid, or the server is not SGLang's or has no memory
            saver; nothing was changed.
        ReloadpgError: the server did not respond. Nothing was changed by the constructor; whether
            another call took effect is unknown.
    """

    ROUTE = "get_server_info"
    REMEDY = "Pass the address of an SGLang server."

    def __init__(self, url: str, *, timeout: timedelta | float = 600.0) -> None:
        super().__init__(url, timeout=timeout)
        if isinstance(self._found, dict) and self._found.get("enable_memory_saver") is False:
            raise InvalidOptionError(
                f"Server({url!r}): it has no memory saver and would keep its memory; nothing was "
                "changed. Start SGLang's server with --enable-memory-saver."
            )

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Release the engine's memory, or its parts. No request may be running.

        Not idempotent in SGLang: a tag must not be released already.
        """
        self._post("release_memory_occupation", _tagged(tags))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the engine's memory, or its parts. Only tags that were released."""
        self._post("resume_memory_occupation", _tagged(tags))


def _tagged(tags: Sequence[str] | None) -> dict[str, object]:
    return {} if tags is None else {"tags": list(tags)}
