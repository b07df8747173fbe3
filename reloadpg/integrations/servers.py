"""Requests to the HTTP server of a rollout engine; the base of the classes ``Server``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from http.client import HTTPException
from typing import Any
from urllib import request
from urllib.error import HTTPError
from urllib.parse import urlencode

from ..errors import InvalidOptionError, ReloadpgError
from ..settings import as_timedelta

__all__ = ["EngineServer"]


class EngineServer:
    """An engine behind HTTP. Blocking; no proxy is used.

    A subclass names a route that only its servers have; the constructor reads it.
    """

    ROUTE: str
    REMEDY: str
    """What to do if the server does not have the route."""

    def __init__(self, url: str, *, timeout: timedelta | float = 600.0) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise InvalidOptionError(
                f"Server({url!r}): not an address; nothing was changed. Pass one such as "
                '"http://127.0.0.1:8000".'
            )
        self._url = url.rstrip("/")
        self._timeout = as_timedelta(timeout, "timeout", "nothing was changed").total_seconds()
        self._open = request.build_opener(request.ProxyHandler({})).open
        try:
            self._found = self._get(self.ROUTE)
        except ReloadpgError as error:
            if not isinstance(error.__cause__, HTTPError) or error.__cause__.code != 404:
                raise
            raise InvalidOptionError(
                f"Server({url!r}): it has no /{self.ROUTE}; nothing was changed. {self.REMEDY}"
            ) from error

    def _get(self, route: str) -> Any:
        """The decoded response of a route."""
        body = self._request("GET", route)
        try:
            return json.loads(body)
        except ValueError as error:
            raise ReloadpgError(f"GET {self._url}/{route}: the response is not JSON") from error

    def _post(
        self,
        route: str,
        body: Mapping[str, object] | None = None,
        **query: int | str | list[str],
    ) -> None:
        """Post a request, with values in the query or with a body, which is sent as JSON."""
        encoded = urlencode(query, doseq=True)
        self._request("POST", route + (f"?{encoded}" if encoded else ""), body)

    def _request(self, method: str, route: str, body: Mapping[str, object] | None = None) -> bytes:
        url = f"{self._url}/{route}"
        data, headers = None, {}
        if body is not None:
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = request.Request(url, data, headers, method=method)
        try:
            with self._open(asked, timeout=self._timeout) as response:
                found: bytes = response.read()
                return found
        except (OSError, HTTPException) as error:  # also HTTPError: a response other than 2xx
            said = error.read().decode(errors="replace") if isinstance(error, HTTPError) else ""
            raise ReloadpgError(f"{method} {url} failed: {error} {said}".rstrip()) from error
