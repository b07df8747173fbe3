"""Launchers: detection of the job that started this process, and the rank before a group exists.

torchrun, LSF's jsrun, OpenMPI and PMI number their processes themselves; SLURM has a module of its
own. Imports no torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from .model import LOOPBACK, DistributedEnvironment
from .slurm import from_slurm, is_daemon_step
from .variables import Variables, check_layout, port_from_text

__all__ = [
    "detect_environment",
    "get_rank",
    "is_initialized",
    "is_rank_zero",
    "rank_zero_only",
]

P = ParamSpec("P")
R = TypeVar("R")

TORCHRUN_IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
TORCHRUN = (*TORCHRUN_IDENTITY, "MASTER_ADDR", "MASTER_PORT")

SINGLE = DistributedEnvironment(
    source="single",
    rank=0,
    local_rank=0,
    world_size=1,
    local_world_size=1,
    node_rank=0,
    num_nodes=1,
)


def detect_environment(environ: Mapping[str, str] | None = None) -> DistributedEnvironment:
    """Say who this process is in its job, from its launcher's variables.

    Local, non-blocking, pure: it reads, writes nothing, opens no socket and imports no torch.
    All fields come from the first of these that is there; two are never combined:

    1. torchrun: ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``,
       ``MASTER_PORT`` (and ``GROUP_RANK``, ``GROUP_WORLD_SIZE`` if set);
    2. a SLURM step (before PMI, which srun sets as well); the shell of an allocation is one
       process;
    3. LSF's jsrun; 4. OpenMPI's mpirun; 5. PMI (MPICH, Intel MPI, Cray);
    6. a single process: rank 0 of 1.

    Under SLURM the ranks meet on the first host of the step's node list, at a port derived from
    job and step id, also where ``MASTER_ADDR`` is set alone. LSF reads its host list. OpenMPI and
    PMI hand out no address: on one host the ranks meet on the loopback interface; on more,
    ``MASTER_ADDR`` and ``MASTER_PORT`` must be set. A world of 1 has port 0: any free one.

    Ranks of a node that are not consecutive are logged as a warning.

    Args:
        environ: the variables; ``os.environ`` if None.

    Raises:
        DistributedEnvironmentError: a launcher's variables are incomplete (the message lists what
            is missing), empty, not numbers, or out of range. Also an OSError and a ValueError.
    """
    variables = os.environ if environ is None else environ
    found = from_torchrun(variables)
    if found is None:
        mpi = from_openmpi(variables) if is_daemon_step(variables) else None
        if mpi is not None and str(mpi.world_size) != variables["SLURM_STEP_NUM_TASKS"]:
            return mpi
        found = from_slurm(variables)
    for source in (from_lsf, from_openmpi, from_pmi):
        if found is None:
            found = source(variables)
    return SINGLE if found is None else found


# -- the rank ---------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Whether this process has a default group. Local; imports no torch."""
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and bool(distributed.is_available())
        and bool(distributed.is_initialized())
    )


def get_rank() -> int:
    """The rank of this process: the default group's, or before it exists the launcher's.

    Local, non-blocking; imports no torch. Right under srun and mpirun too, where ``RANK`` is not
    set and every process used to think that it was rank 0.

    Raises:
        DistributedEnvironmentError: there is no group, and the variables are incomplete or wrong.
    """
    if is_initialized():
        return int(sys.modules["torch.distributed"].get_rank())
    return detect_environment().rank


def is_rank_zero() -> bool:
    """Whether this process is rank 0; see :func:`get_rank`. Local, non-blocking."""
    return get_rank() == 0


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Make ``function`` do nothing, and return None, on every rank but 0.

    The rank is looked up at each call, not at decoration: a module is often imported before the
    group exists. Local: no rank waits for another.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if is_rank_zero() else None

    return wrapper


# -- one launcher each ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """How one MPI-like launcher calls what it hands out; ``A|B`` means either.

    Attributes:
        source: name of the launcher.
        numbers: rank, size, local rank, local size, in this order.
        job: variables that tell one run of the launcher from another on the same hosts.
    """

    source: str
    numbers: tuple[str, str, str, str]
    job: tuple[str, ...]


_LSF = _Names(
    "lsf",
    (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    ("LSB_JOBID",),
)
_OPENMPI = _Names(
    "openmpi",
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_PMI = _Names(
    "pmi",
    (
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID|PMI_LOCAL_RANK",
        "MPI_LOCALNRANKS|PMI_LOCAL_SIZE",
    ),
    ("PMI_JOBID",),
)


def from_torchrun(environ: Mapping[str, str]) -> DistributedEnvironment | None:
    """The environment as torchrun hands it out, or None. Local, pure.

    An address alone (``MASTER_ADDR``, ``MASTER_PORT``) says nothing about who this process is.

    Raises:
        DistributedEnvironmentError: the variables are incomplete or wrong.
    """
    read = Variables(environ, "torchrun")
    if read.first(*TORCHRUN_IDENTITY) is None:
        return None
    read.require(TORCHRUN)
    world_size = read.integer("WORLD_SIZE", minimum=1)
    rank = read.below("RANK", "WORLD_SIZE", world_size)
    local_size = read.integer("LOCAL_WORLD_SIZE", minimum=1, maximum=world_size)
    local_rank = read.below("LOCAL_RANK", "LOCAL_WORLD_SIZE", local_size)
    if "GROUP_WORLD_SIZE" in read:
        num_nodes = read.integer("GROUP_WORLD_SIZE", minimum=1, maximum=world_size)
    else:
        num_nodes = -(-world_size // local_size)
    if "GROUP_RANK" in read:
        node_rank = read.below("GROUP_RANK", "GROUP_WORLD_SIZE", num_nodes)
    else:
        node_rank = min(rank // local_size, num_nodes - 1)
    if num_nodes * local_size == world_size:
        check_layout("torchrun", rank=rank, local_rank=local_rank, first=node_rank * local_size)
    return DistributedEnvironment(
        source="torchrun",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=read.host("MASTER_ADDR"),
        master_port=read.integer("MASTER_PORT", minimum=min(1, world_size - 1), maximum=65535),
    )


def from_lsf(environ: Mapping[str, str]) -> DistributedEnvironment | None:
    """The environment of a task of LSF's ``jsrun``, or None. Local, pure.

    The shell of an LSF job, which has ``LSB_JOBID`` but no task number, is not a task.

    Raises:
        DistributedEnvironmentError: the variables are incomplete or wrong.
    """
    return _from_mpi(environ, _LSF)


def from_openmpi(environ: Mapping[str, str]) -> DistributedEnvironment | None:
    """The environment of a process of OpenMPI's ``mpirun``, or None. Local, pure.

    Raises:
        DistributedEnvironmentError: the variables are incomplete or wrong.
    """
    return _from_mpi(environ, _OPENMPI)


def from_pmi(environ: Mapping[str, str]) -> DistributedEnvironment | None:
    """The environment of a process of a PMI launcher (MPICH, Intel MPI, Cray), or None.

    Local, pure.

    Raises:
        DistributedEnvironmentError: the variables are incomplete or wrong.
    """
    return _from_mpi(environ, _PMI)


def _from_mpi(environ: Mapping[str, str], names: _Names) -> DistributedEnvironment | None:
    read = Variables(environ, names.source)
    if read.first(*(part for name in names.numbers for part in name.split("|"))) is None:
        return None
    read.require(names.numbers)
    rank_name, size_name, local_name, local_size_name = (
        read.first(*name.split("|")) or name for name in names.numbers
    )
    world_size = read.integer(size_name, minimum=1)
    rank = read.below(rank_name, size_name, world_size)
    local_size = read.integer(local_size_name, minimum=1, maximum=world_size)
    local_rank = read.below(local_name, local_size_name, local_size)
    num_nodes = -(-world_size // local_size)
    node_rank = rank // local_size
    if num_nodes * local_size == world_size:
        check_layout(names.source, rank=rank, local_rank=local_rank, first=node_rank * local_size)
    address, port = _address(read, names, world_size=world_size, local_size=local_size)
    return DistributedEnvironment(
        source=names.source,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=address,
        master_port=port,
    )


def _address(
    read: Variables, names: _Names, *, world_size: int, local_size: int
) -> tuple[str, int]:
    """Where the ranks meet.

    These launchers hand out no address, so the one that the user set (``mpirun -x MASTER_ADDR``)
    belongs to them; without it all ranks on one host meet there, and LSF's host list is read.
    """
    if read.first("MASTER_ADDR", "MASTER_PORT") is not None:
        read.require((*names.numbers, "MASTER_ADDR", "MASTER_PORT"))
        lowest = min(1, world_size - 1)
        port = read.integer("MASTER_PORT", minimum=lowest, maximum=65535)
        return read.host("MASTER_ADDR"), port
    if world_size == 1:
        return LOOPBACK, 0
    if local_size == world_size:
        address = LOOPBACK
    else:
        address = _lsf_host(read) if names is _LSF else ""
        if not address:
            read.require((*names.numbers, "MASTER_ADDR", "MASTER_PORT"))
    # jsrun's job id alone would be shared by two runs in one job; PMIx names the run.
    wanted = dict.fromkeys((*names.job, "PMIX_NAMESPACE"))
    ids = [read.text(name) for name in wanted if name in read]
    if not ids:
        read.require((*names.numbers, "|".join((*names.job, "MASTER_PORT"))))
    return address, port_from_text(*ids)


def _lsf_host(read: Variables) -> str:
    """The first compute host of an LSF job.

    ``LSB_MCPU_HOSTS`` is ``host slots host slots ...``. With jsrun the first entry is the launch
    node, with one slot and no task, when compute hosts follow.
    """
    if "LSB_MCPU_HOSTS" not in read:
        return ""
    words = read.text("LSB_MCPU_HOSTS").split()
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or not all(slots.isdecimal() for _, slots in pairs):
        raise read.error(
            f"LSB_MCPU_HOSTS={' '.join(words)!r} is not pairs of host and slots", "LSB_MCPU_HOSTS"
        )
    if len(pairs) > 1 and int(pairs[0][1]) == 1:
        pairs = pairs[1:]
    return pairs[0][0]
