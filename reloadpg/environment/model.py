"""Who this process is in its job, as a value."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass

from reloadpg.environment.errors import DistributedEnvironmentError
from reloadpg.environment.export import Export, export_variables

__all__ = ["DistributedEnvironment"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class DistributedEnvironment:
    """Who this process is in its job. A value: it holds nothing open and writes nothing.

    Attributes:
        source: where all fields come from: ``torchrun``, ``slurm``, ``lsf``, ``openmpi``, ``pmi``,
            ``single``, or ``process_group`` for a group made by other means.
        rank: number of this process, from 0 to ``world_size - 1``.
        local_rank: number of this process on its node.
        world_size: number of processes of the job.
        local_world_size: number of processes on this node.
        node_rank: number of this node.
        num_nodes: number of nodes.
        master_addr: host where the rendezvous store is.
        master_port: its port. 0 in a world of 1: any free port, taken when it is needed.

    Raises:
        DistributedEnvironmentError: a field is out of range.
    """

    source: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str = LOOPBACK
    master_port: int = 0

    def __post_init__(self) -> None:
        for name, limit in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            value, bound = getattr(self, name), getattr(self, limit)
            if not 0 <= value < bound:
                raise self._error(f"{name}={value} is not in 0..{limit}-1 with {limit}={bound}")
        if self.local_world_size > self.world_size:
            raise self._error(
                f"local_world_size={self.local_world_size} is above world_size={self.world_size}"
            )
        if self.num_nodes > self.world_size:
            raise self._error(f"num_nodes={self.num_nodes} is above world_size={self.world_size}")
        if not 0 <= self.master_port <= 65535:
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
        """The variables that torchrun sets for such a process. Local.

        A world of 1 without a port gets one that is free now on the loopback interface.
        """
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port or _free_port(),
        }
        return {name: str(value) for name, value in values.items()}

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
        return export_variables(self.variables(), target, overwrite=overwrite)

    def as_dict(self) -> dict[str, str | int]:
        """All fields by name. Local, pure."""
        return asdict(self)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
