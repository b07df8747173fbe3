"""Strict reading of environment variables: every error names the variable and its value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

from reloadpg.environment.errors import DistributedEnvironmentError

_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.:%-]+", re.ASCII)


class Variables:
    """The variables of one launcher, read from a mapping that is never written.

    Args:
        environ: the mapping.
        source: the launcher, for messages.
    """

    def __init__(self, environ: Mapping[str, str], source: str) -> None:
        self._environ = environ
        self.source = source

    def __contains__(self, name: str) -> bool:
        return name in self._environ

    def error(self, what: str, *names: str, call: str = "") -> DistributedEnvironmentError:
        """An error about ``names``, with the state and the remedy appended."""
        remedy = call or f"Correct it, or unset the {self.source} variables."
        return DistributedEnvironmentError(
            f"{what}. Nothing was opened or written. {remedy}",
            source=self.source,
            variables=names,
        )

    def require(self, names: Iterable[str]) -> None:
        """Raise, listing what is missing, unless all ``names`` are set.

        ``"A|B"`` stands for either of two names.
        """
        wanted = tuple(names)
        missing = [n for n in wanted if not any(part in self for part in n.split("|"))]
        if not missing:
            return
        present = [part for n in wanted for part in n.split("|") if part in self]
        listed = ", ".join(name.replace("|", " or ") for name in missing)
        seen = ", ".join(f"{name}={self._environ[name]!r}" for name in present)
        raise self.error(
            f"The {self.source} variables are only partly set: missing {listed}"
            + (f"; set are {seen}" if seen else ""),
            *missing,
            call="Set all of them or none; variables of several launchers are never combined.",
        )

    def first(self, *names: str) -> str | None:
        """The first of ``names`` that is set, or None."""
        return next((name for name in names if name in self), None)

    def text(self, name: str) -> str:
        """A value that is not empty."""
        value = self._environ[name]
        if not value.strip():
            raise self.error(f"{name}={value!r} is empty", name)
        return value

    def host(self, name: str) -> str:
        """A host name or address: one word of the characters that such names have, no port."""
        value = self.text(name)
        if not _HOST.fullmatch(value) or (":" in value and not _is_address(value)):
            raise self.error(f"{name}={value!r} is not a host name or address", name)
        return value

    def integer(self, name: str, *, minimum: int = 0, maximum: int | None = None) -> int:
        """A decimal number in ``minimum..maximum``: no sign ``+``, blanks or underscores."""
        text = self.text(name)
        if not _INTEGER.fullmatch(text):
            raise self.error(f"{name}={text!r} is not a whole number", name)
        value = int(text)
        if value < minimum:
            kind = "negative" if value < 0 else f"below {minimum}"
            raise self.error(f"{name}={text!r} is {kind}", name)
        if maximum is not None and value > maximum:
            raise self.error(f"{name}={text!r} is above {maximum}", name)
        return value

    def below(self, name: str, limit_name: str, limit: int) -> int:
        """A number from 0 to ``limit - 1``; ``limit_name`` says where the limit is from."""
        value = self.integer(name)
        if value >= limit:
            raise self.error(
                f"{name}={self._environ[name]!r} is not below {limit_name}={limit}",
                name,
                limit_name,
            )
        return value


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value.partition("%")[0])
    except ValueError:
        return False
    return True
