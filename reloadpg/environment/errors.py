"""The errors of bring-up and detection; each is also the built-in that a caller would catch."""

from __future__ import annotations

from reloadpg.errors import ReloadpgError

__all__ = ["DistributedEnvironmentError", "GroupNotInitializedError", "MeshDimensionError"]


class DistributedEnvironmentError(ReloadpgError, OSError, ValueError):
    """The launcher's variables do not say who this process is; nothing was opened or written.

    Attributes:
        source: the launcher whose variables were read.
        variables: the names of the variables that are missing or wrong.
    """

    def __init__(self, message: str, *, source: str = "", variables: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.source = source
        self.variables = variables


class MeshDimensionError(ReloadpgError, ValueError):
    """The mesh dimensions cannot be laid over the world; no group was made."""


class GroupNotInitializedError(ReloadpgError):
    """Several ranks would have to meet, but this process has no default group."""
