"""The environment as the variables that torchrun would have set, and the exact way back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from types import TracebackType

from reloadpg.environment.errors import DistributedEnvironmentError

__all__ = ["Export", "export_variables"]

ADDRESS_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT"})


class Export:
    """What an export changed. Call it, or leave its ``with`` block, to undo it.

    Local, idempotent. A variable that someone else changed meanwhile is left and logged: only
    what is still ours is undone.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._changes: list[tuple[str, str | None, str]] = []

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the variables that were written and are not yet undone."""
        return tuple(name for name, _, _ in self._changes)

    def __call__(self) -> None:
        while self._changes:
            name, before, written = self._changes.pop()
            now = self._environ.get(name)
            if now != written:
                logging.getLogger(__name__).warning(
                    "%s was set to %r by the export and is %r now; it is left as it is",
                    name,
                    written,
                    now,
                )
            elif before is None:
                del self._environ[name]
            else:
                self._environ[name] = before

    def __enter__(self) -> Export:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self()

    def _write(self, name: str, value: str) -> None:
        before = self._environ.get(name)
        self._environ[name] = value
        self._changes.append((name, before, value))


def export_variables(
    values: Mapping[str, str], environ: MutableMapping[str, str], *, overwrite: bool
) -> Export:
    """Write ``values`` to ``environ`` and return the undo; all of them or none.

    Local. Without ``overwrite``, a preset address (``MASTER_ADDR``, ``MASTER_PORT``) stays, and a
    preset identity (rank, sizes) that differs is an error: half of one identity and half of
    another is how rank 7 of 4 comes about.

    Raises:
        DistributedEnvironmentError: a preset identity differs; nothing was written.
    """
    clashes = {
        name: environ[name]
        for name, value in values.items()
        if name in environ and environ[name] != value and name not in ADDRESS_VARIABLES
    }
    if clashes and not overwrite:
        listed = ", ".join(
            f"{name} is {now!r} and would become {values[name]!r}" for name, now in clashes.items()
        )
        raise DistributedEnvironmentError(
            f"The environment cannot be exported: {listed}. Nothing was written. Unset them, or "
            f"call export(overwrite=True).",
            variables=tuple(clashes),
        )
    export = Export(environ)
    try:
        for name, value in values.items():
            if environ.get(name) != value and (overwrite or name not in environ):
                export._write(name, value)
    except BaseException:
        export()
        raise
    return export
