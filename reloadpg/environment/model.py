"""The identity of a process in its job, as a value that can be exported; and what can be wrong.

Imports no torch.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from types import TracebackType

from ..errors import ReloadpgError

__all__ = [
    "LOOPBACK",
    "DistributedEnvironment",
    "DistributedEnvironmentError",
    "Export",
    "GroupNotInitializedError",
    "Identity",
    "MeshDimensionError",
]

LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT"})


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


@dataclass(frozen=True)
class Identity:
    """Identity of a process in its job, before it is known where the ranks meet.

    Attributes:
        source, rank, local_rank, local_world_size, node_rank, num_nodes: as in
            :class:`DistributedEnvironment`.
        world_size: number of processes of the job; None where nobody says it.
        address: says where the ranks meet, or raises :class:`DistributedEnvironmentError`: asked
            only by those who are to meet.
    """

    source: str
    rank: int
    world_size: int | None
    address: Callable[[], tuple[str, int]]
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None

    def environment(self, *, has_store: bool = False) -> DistributedEnvironment:
        """Return the identity with its address. Local.

        Args:
            has_store: the ranks meet on a store that they were given; no address is needed.

        Raises:
            DistributedEnvironmentError: a variable that says the world size or the address is
                missing or wrong.
        """
        host, port = (LOOPBACK, None) if has_store else self.address()
        if self.world_size is None:
            raise DistributedEnvironmentError(
                "WORLD_SIZE is not set. Nothing was opened or written. Set it.",
                source=self.source,
                variables=("WORLD_SIZE",),
            )
        return DistributedEnvironment(
            source=self.source,
            rank=self.rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            node_rank=self.node_rank,
            num_nodes=self.num_nodes,
            master_addr=host,
            master_port=port,
        )


@dataclass(frozen=True)
class DistributedEnvironment:
    """Identity of a process in its job. A value: it holds nothing open and writes nothing.

    Attributes:
        source: where all fields come from: ``torchrun``, ``slurm``, ``lsf``, ``openmpi``, ``pmi``,
            ``single``, or ``process_group`` for a group made by other means.
        rank: number of this process, from 0 to ``world_size - 1``.
        local_rank: number of this process on its node; None where nobody says it.
        world_size: number of processes of the job.
        local_world_size: number of processes on this node; None where nobody says it.
        node_rank: number of this node; None where nobody says it.
        num_nodes: number of nodes; None where nobody says it.
        master_addr: host where the rendezvous store is.
        master_port: its port. 0 in a world of 1: any free port, taken when it is needed. None where
            the ranks met otherwise, on a store that they were given.

    Raises:
        DistributedEnvironmentError: a field is out of range.
    """

    source: str
    rank: int
    local_rank: int | None
    world_size: int
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    master_addr: str = LOOPBACK
    master_port: int | None = 0

    def __post_init__(self) -> None:
        for name, limit in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            value, bound = getattr(self, name), getattr(self, limit)
            if value is not None and not 0 <= value < (self.world_size if bound is None else bound):
                raise self._error(f"{name}={value} is not in 0..{limit}-1 with {limit}={bound}")
        for name in ("local_world_size", "num_nodes"):
            value = getattr(self, name)
            if value is not None and value > self.world_size:
                raise self._error(f"{name}={value} is above world_size={self.world_size}")
        if self.master_port is not None and not 0 <= self.master_port <= 65535:
            raise self._error(f"master_port={self.master_port} is not in 0..65535")
        if self.master_port == 0 and self.world_size > 1:
            raise self._error(
                f"master_port=0 cannot be shared by world_size={self.world_size} processes"
            )

    def _error(self, what: str) -> DistributedEnvironmentError:
        return DistributedEnvironmentError(
            f"{what} ({self.source}). Nothing was opened or written. Correct the launcher's "
            f"variables or the arguments.",
            source=self.source,
        )

    def variables(self) -> dict[str, str]:
        """Return the variables that torchrun sets for such a process. Local.

        What nobody says is left out. A world of 1 without a port gets one that is free now on the
        loopback interface.
        """
        port = _free_port() if self.master_port == 0 else self.master_port
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "MASTER_ADDR": None if port is None else self.master_addr,
            "MASTER_PORT": port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def export(
        self, overwrite: bool = False, *, environ: MutableMapping[str, str] | None = None
    ) -> Export:
        """Write the standard variables for libraries that read them, and return the undo.

        Local, non-blocking. What is preset and equal is not touched. Without ``overwrite`` a
        preset ``MASTER_ADDR`` or ``MASTER_PORT`` stays, and a preset identity that differs is an
        error. The undo puts back exactly what was there, once.

        Args:
            overwrite: replace what is preset.
            environ: the mapping to write; ``os.environ`` if None.

        Raises:
            DistributedEnvironmentError: a preset rank or size differs; nothing was written.
        """
        target = os.environ if environ is None else environ
        return _export(self.variables(), target, overwrite=overwrite)

    def as_dict(self) -> dict[str, str | int | None]:
        """All fields by name. Local, pure."""
        return asdict(self)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


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

    def write(self, name: str, value: str) -> None:
        """Set a variable, and remember what was there."""
        before = self._environ.get(name)
        self._environ[name] = value
        self._changes.append((name, before, value))


def _export(
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
                export.write(name, value)
    except BaseException:
        export()
        raise
    return export
