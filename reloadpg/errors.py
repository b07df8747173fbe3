"""Errors of reloadpg: one root, and for each the built-in that a caller would already catch.

Every message says what happened, the state now, and what to call. This module imports neither
torch nor any other module of the package, so it can be used before torch is loaded. It also has the
functions that format values and check variables and timeouts.
"""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

__all__ = [
    "DisagreementError",
    "GroupDestroyedError",
    "GroupOffloadedError",
    "GroupPickleError",
    "InsufficientMemoryError",
    "InvalidOptionError",
    "NotInstalledError",
    "PatchConflictError",
    "PeerFailedError",
    "PendingError",
    "RebuildError",
    "ReleaseError",
    "ReloadpgError",
    "RendezvousTimeoutError",
]

_SHORTEST, _LONGEST = timedelta(milliseconds=1), timedelta(days=365)
"""Torch counts in whole milliseconds; longer ones overflow between Python, C++ and the store."""


class ReloadpgError(RuntimeError):
    """Root of every error that reloadpg raises."""


class InvalidOptionError(ReloadpgError, ValueError):
    """An option has a value that cannot be used; nothing was changed."""


class NotInstalledError(ReloadpgError):
    """A lifecycle function was called before ``reloadpg.install()``; nothing was changed."""


class PatchConflictError(ReloadpgError):
    """Other patches are in place than those asked for; nothing was changed."""


class GroupOffloadedError(ReloadpgError):
    """A group was used while it owns no communicator.

    Attributes:
        group: name of the group.
        operation: the method that was called on it.
    """

    def __init__(self, message: str, *, group: str = "", operation: str = "") -> None:
        super().__init__(message)
        self.group = group
        self.operation = operation


class GroupDestroyedError(ReloadpgError):
    """A group was used after ``destroy_process_group``, ``shutdown`` or ``abort``."""


class GroupPickleError(ReloadpgError):
    """A pickled group names a group that the receiving process does not have."""


class DisagreementError(ReloadpgError):
    """The ranks' calls differ. Raised on all ranks, before anything is changed."""


class RendezvousTimeoutError(ReloadpgError, TimeoutError):
    """Not all ranks reached a phase within the timeout.

    Attributes:
        phase: the phase in which the ranks waited for each other.
        seconds: the timeout.
        arrived: how many ranks had arrived.
        missing: the ranks that had not.
        unknown: the ranks whose state is unknown, since the store did not respond.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str = "",
        seconds: float = 0.0,
        arrived: int = 0,
        missing: Sequence[int] = (),
        unknown: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.seconds = seconds
        self.arrived = arrived
        self.missing = tuple(missing)
        self.unknown = tuple(unknown)


class PeerFailedError(ReloadpgError):
    """Another rank failed in a collective step.

    Attributes:
        rank: the rank that failed.
        phase: the phase in which it failed.
        missing: the ranks that did not respond to the failure. A rank that dies makes its
            neighbours fail first; it is named here.
    """

    def __init__(
        self, message: str, *, rank: int = -1, phase: str = "", missing: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.missing = tuple(missing)


class PendingError(ReloadpgError, TimeoutError):
    """An operation with ``wait=False`` has not ended within the caller's timeout."""


class InsufficientMemoryError(ReloadpgError, MemoryError):
    """There is no room to resume suspended communicators; nothing was changed."""


class ReleaseError(ReloadpgError):
    """A group could not be released on this rank; the cause is chained."""


class RebuildError(ReloadpgError):
    """A group could not be rebuilt on this rank; the cause is chained."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text, with runs as ranges: ``0-3, 7``.

    Local, pure.
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def named_ranks(ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2-3``. Local, pure."""
    shown = format_ranks(ranks)
    return f"rank {shown}" if shown.isdecimal() else f"ranks {shown}"


def described(desc: str, ranks: Iterable[int]) -> str:
    """The description of a group; its ranks, where torch gave it none. Local, pure."""
    if desc not in ("", "undefined"):
        return desc
    shown = named_ranks(ranks)
    return shown if len(shown) <= 30 else f"{shown[:27]}..."


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``. Local, pure."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def mebibytes(size: float) -> str:
    """``1.5 MiB``; never ``-0.0``. Local, pure."""
    return f"{round(size / (1 << 20), 1) + 0.0:.1f} MiB"


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Lay out columns of text, numbers to the right, as wide as they need. Local, pure."""
    texts = [[_cell(value) for value in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [
        all(isinstance(row[index], (int, float, type(None))) for row in rows)
        for index in range(len(header))
    ]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in texts
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


STATUS_DIR = "RELOADPG_STATUS_DIR"
"""Environment variable: where the ranks of a job keep their status files."""

GRACE = "RELOADPG_GRACE_S"
"""Environment variable: seconds after a failure within which the other ranks must respond."""

LOG_WAIT = "RELOADPG_LOG_WAIT_S"
"""Environment variable: seconds of a wait before the first message. Later messages come after 2, 4,
8 times as long."""

VARIABLES = frozenset(
    {
        "RELOADPG_AUTOINSTALL",
        "RELOADPG_BACKENDS",
        "RELOADPG_EXCLUDE",
        GRACE,
        "RELOADPG_LOG_LEVEL",
        LOG_WAIT,
        "RELOADPG_RANK_LOADING",
        STATUS_DIR,
        "RELOADPG_STRATEGY",
        "RELOADPG_TIMEOUT_S",
    }
)
"""The environment variables that this library reads."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean NAME?)`` for the known name that is nearest; empty if none is. Pure."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """List the variables that are set, begin with ``RELOADPG_``, and mean nothing. Local, pure."""
    return sorted(
        f"{name}{did_you_mean(name, VARIABLES)}"
        for name, value in environ.items()
        if name.startswith("RELOADPG_")
        and name not in VARIABLES
        and value.strip()
        and not name.startswith("RELOADPG_STANDIN_")  # read by reloadpg.testing.standins
    )


def refuse_unknown_variables(environ: Mapping[str, str], what: str) -> None:
    """Refuse an environment with unknown variables of this library. Local.

    Args:
        environ: the variables.
        what: what is refused, for the message.

    Raises:
        InvalidOptionError: a variable begins with ``RELOADPG_`` and is unknown.
    """
    unknown = unknown_variables(environ)
    if unknown:
        raise InvalidOptionError(
            f"{what}: the environment has {', '.join(unknown)}, which reloadpg does not know; "
            "nothing was changed. Correct the name or unset it."
        )


def as_timedelta(
    value: timedelta | float, name: str, nothing: str = "nothing was started"
) -> timedelta:
    """Convert a caller's timeout. Local, pure.

    Args:
        value: a timedelta, or seconds as a number of Python or NumPy.
        name: the name of the argument.
        nothing: the consequence, for the message: "nothing was installed".

    Raises:
        InvalidOptionError: not a time, or one that torch does not take.
    """
    with suppress(TypeError, ValueError, OverflowError):
        bound = value
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            bound = timedelta(seconds=float(value))  # timedelta does not take NumPy's integers
        if isinstance(bound, timedelta) and _SHORTEST <= bound <= _LONGEST:
            return bound
    raise InvalidOptionError(
        f"{name}={value!r} is not a time between one millisecond and {_LONGEST.days} days; "
        f"{nothing}. Give a timedelta, or seconds."
    )


def as_integer(value: object) -> int | None:
    """Convert an integer of Python or NumPy, or an integer tensor of one element. Local, pure.

    None if it is another value, or a bool. Strings of digits are not converted.
    """
    with suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, bool) and not isinstance(_item(value), bool):
            return operator.index(value)  # type: ignore[arg-type]
    return None


def as_flag(value: object, name: str, nothing: str = "nothing was started") -> bool:
    """Convert a bool of Python, NumPy or a tensor. Local, pure.

    Raises:
        InvalidOptionError: another value; a string such as "False" would count as true.
    """
    with suppress(TypeError, ValueError, RuntimeError):
        found = value if isinstance(value, bool) else _item(value)
        if isinstance(found, bool):
            return found
    raise InvalidOptionError(f"{name}={value!r} is not True or False; {nothing}. Pass a bool.")


def _item(value: object) -> object:
    """The Python value of a scalar of NumPy or torch; None for other objects."""
    return value.item() if hasattr(value, "item") else None


def as_names(value: object) -> tuple[str, ...] | None:
    """Convert a string, or an iterable of strings. Local, pure. None if it is another value."""
    if isinstance(value, str):
        return (str(value),)
    found: tuple[object, ...] = (None,)
    with suppress(TypeError):
        found = tuple(value)  # type: ignore[arg-type]
    if not all(isinstance(name, str) and name for name in found):
        return None
    return tuple([str(name) for name in found])  # NumPy's strings have another repr
