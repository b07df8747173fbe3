"""Errors of reloadpg: one root, and for each the built-in that a caller would already catch.

Every message says what happened, the state now, and what to call. This module imports neither
torch nor any other module of the package, so it can be used before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BorrowedError",
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
    "UnsupportedTorchError",
]


class ReloadpgError(RuntimeError):
    """Root of every error that reloadpg raises."""


class InvalidOptionError(ReloadpgError, ValueError):
    """An option has a value that cannot be used; nothing was changed."""


class NotInstalledError(ReloadpgError):
    """A lifecycle function was called before ``reloadpg.install()``; nothing was changed."""


class PatchConflictError(ReloadpgError):
    """Other patches are in place than those asked for; nothing was changed."""


class UnsupportedTorchError(ReloadpgError):
    """The installed torch lacks names that reloadpg uses; nothing was changed."""


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


class BorrowedError(ReloadpgError):
    """An offload would invalidate what other code holds of a group, or a handle has ended.

    Raised by ``offload``, on the ranks that know the holder, before anything is changed; and by
    each use of a backend object that belongs to an earlier generation of its group.
    """


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
        missing: the ranks that had not; empty if the store did not respond.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str = "",
        seconds: float = 0.0,
        arrived: int = 0,
        missing: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.seconds = seconds
        self.arrived = arrived
        self.missing = tuple(missing)


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
