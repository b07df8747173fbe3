"""Strict reading of what launchers and callers give: every error names the value.

Also what follows from a launcher's numbers: the port of a job step, and where ranks should lie.
Imports no torch.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from ..errors import InvalidOptionError
from .model import DistributedEnvironmentError

__all__ = ["Variables", "as_timedelta", "check_layout", "port_from_ids", "port_from_text"]

_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.:%-]+", re.ASCII)
FIRST_PORT = 15000
LAST_PORT = 30000
_PORTS = LAST_PORT - FIRST_PORT + 1
# Coprime to _PORTS (7 * 2143). The first 211 steps of 71 consecutive jobs all get different ports:
# jobs that share a host were usually submitted close to each other.
_STRIDE = 211


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
        if missing:
            raise self.missing(missing, (part for n in wanted for part in n.split("|")))

    def missing(
        self, missing: Sequence[str], others: Iterable[str] = ()
    ) -> DistributedEnvironmentError:
        """An error that lists what is missing, and the values of ``others`` that are set."""
        present = [name for name in others if name in self]
        listed = ", ".join(name.replace("|", " or ") for name in missing)
        seen = ", ".join(f"{name}={self._environ[name]!r}" for name in present)
        return self.error(
            f"The {self.source} variables are only partly set: missing {listed}"
            + (f"; set are {seen}" if seen else ""),
            *missing,
            call="Set what is missing, or unset all of them: half of an identity is none.",
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

    def address(
        self, world_size: int, host: Callable[[], str], port: Callable[[], int]
    ) -> tuple[str, int]:
        """The address that the user set; what of it is not set is derived.

        Args:
            world_size: a world of 1 may have port 0.
            host: derives the host where ``MASTER_ADDR`` is not set.
            port: derives the port where ``MASTER_PORT`` is not set.
        """
        lowest = min(1, world_size - 1)
        return (
            self.host("MASTER_ADDR") if "MASTER_ADDR" in self else host(),
            self.integer("MASTER_PORT", minimum=lowest, maximum=65535)
            if "MASTER_PORT" in self
            else port(),
        )

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


def port_from_ids(job: int, step: int) -> int:
    """A port in 15000..30000 that all ranks of one step compute alike. Local, pure.

    Below the usual range of ephemeral ports (32768 and up). Two steps of one job differ unless
    their ids differ by a multiple of 15001.
    """
    return FIRST_PORT + (job * _STRIDE + step) % _PORTS


def port_from_text(*ids: str) -> int:
    """A port in 15000..30000 from ids that are not numbers. Local, pure."""
    return FIRST_PORT + zlib.crc32("\0".join(ids).encode()) % _PORTS


def check_layout(source: str, *, rank: int, local_rank: int, first: int) -> None:
    """Warn unless the ranks of a node are consecutive. Local.

    Args:
        source: the launcher.
        rank: the rank in the world.
        local_rank: the rank on the node.
        first: the rank with which this node should begin: node rank times ranks per node.
    """
    if rank != first + local_rank:
        logging.getLogger(__name__).warning(
            "%s placed rank %d as local rank %d on a node whose ranks should begin at %d: ranks "
            "of a node are not consecutive, so groups of neighbouring ranks cross nodes; use a "
            "block distribution",
            source,
            rank,
            local_rank,
            first,
        )


def as_timedelta(value: timedelta | float, name: str) -> timedelta:
    """``value`` as a timedelta. Local, pure.

    Raises:
        InvalidOptionError: not a number of seconds above 0, or too long for a timedelta.
    """
    if isinstance(value, timedelta):
        bound = value
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _no_time(name, value)
    else:
        try:
            bound = timedelta(seconds=value)
        except OverflowError as error:
            raise _no_time(name, value) from error
    # torch counts in milliseconds: less than one is 0 to it, which it reads as "no time at all".
    if bound < timedelta(milliseconds=1):
        raise _no_time(name, value)
    return bound


def _no_time(name: str, value: object) -> InvalidOptionError:
    return InvalidOptionError(
        f"{name}={value!r} is not a time of at least one millisecond. Nothing was started. Give a "
        f"timedelta, or seconds."
    )
