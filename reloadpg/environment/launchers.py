"""The launchers that number their processes themselves: torchrun, LSF's jsrun, OpenMPI, PMI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reloadpg.environment.layout import check_layout, port_from_text
from reloadpg.environment.model import LOOPBACK, DistributedEnvironment
from reloadpg.environment.variables import Variables

TORCHRUN_IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
TORCHRUN = (*TORCHRUN_IDENTITY, "MASTER_ADDR", "MASTER_PORT")


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
