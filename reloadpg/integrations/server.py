"""Requests to the HTTP server of a rollout engine; see the modules ``vllm`` and ``sglang``."""

from __future__ import annotations

import json
from datetime import timedelta
from http.client import HTTPException
from typing import Any
from urllib import request
from urllib.error import HTTPError

from ..errors import InvalidOptionError, ReloadpgError
from ..settings import as_timedelta

__all__ = ["HttpServer"]


class HttpServer:
    """Sends requests to a server, each with a timeout. No proxy is used.

    Args:
        url: address of the server, such as ``"http://127.0.0.1:8000"``.
        timeout: longest wait for a response, a timedelta or seconds.
        api_key: key that the server asks for.

    Raises:
        InvalidOptionError: an argument is invalid; nothing was sent.
    """

    def __init__(self, url: str, timeout: timedelta | float, api_key: str | None = None) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise InvalidOptionError(
                f"Server({url!r}): not an address; nothing was changed. Pass one such as "
                '"http://127.0.0.1:8000".'
            )
        self._url = url.rstrip("/")
        self._timeout = as_timedelta(timeout, "timeout", "nothing was changed").total_seconds()
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open = request.build_opener(request.ProxyHandler({})).open

    def _request(self, method: str, route: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the response. Blocking.

        Raises:
            ReloadpgError: the server did not respond, or with another status than 2xx; see
                :func:`status_of`. The error has the text of the response.
        """
        url = f"{self._url}/{route}"
        data = None if body is None else json.dumps(body).encode()
        sent = request.Request(url, data, self._headers, method=method)
        try:
            with self._open(sent, timeout=self._timeout) as response:
                found: bytes = response.read()
                return found
        except (OSError, HTTPException) as error:  # also HTTPError: a response other than 2xx
            said = error.read().decode(errors="replace") if isinstance(error, HTTPError) else ""
            raise ReloadpgError(f"{method} {url} failed: {error} {said}".rstrip()) from error


def status_of(error: ReloadpgError) -> int | None:
    """The status of the response that an error of a request reports; None without a response."""
    return error.__cause__.code if isinstance(error.__cause__, HTTPError) else None
