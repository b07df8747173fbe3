"""Launchers: a table of the known ones, and the rank before a group exists.

Does not import torch.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from .identity import (
    ADDRESS,
    LOOPBACK,
    DistributedEnvironment,
    DistributedEnvironmentError,
    Variables,
    ip_of,
    port_from_ids,
)


@dataclass(frozen=True)
class Launcher:
    """A row of the table: the names of the variables that a launcher sets for its tasks.

    Attributes:
        source: name of the launcher.
        marks: a process that has one of them is a task.
        required: variables that a task must have.
        rank: number of the task.
        size: number of tasks.
        local_rank: number of the task on its node.
        local_size: number of tasks on the node.
        tasks_per_node: number of tasks on each node, as ``4(x2)``. Unequal ones, as ``4(x2),3``, do
            not say which of them is the number on this node: it is unknown.
        node_rank: number of the node.
        num_nodes: number of nodes.
        hosts: hosts of the nodes, as ``rack[1-2]node[08-11,20]-ib,login``.
        job: identifiers of this run of the launcher, of which the port is derived.
    """

    source: str
    marks: tuple[str, ...]
    required: tuple[str, ...]
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    tasks_per_node: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    hosts: str = ""
    job: tuple[str, ...] = ()


TORCHRUN = Launcher(
    source="torchrun",
    marks=("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    required=("RANK", "WORLD_SIZE", *ADDRESS),  # as for torch's init_method="env://"
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK",
    num_nodes="GROUP_WORLD_SIZE",
)
SLURM = Launcher(
    source="slurm",
    # Not SLURM_NTASKS: the shells of salloc and sbatch have it, too, and would be rank 0 of it.
    marks=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    required=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
    node_rank="SLURM_NODEID",
    num_nodes="SLURM_STEP_NUM_NODES",
    hosts="SLURM_STEP_NODELIST",
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_OPENMPI_NUMBERS = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
OPENMPI = Launcher(
    source="openmpi",
    marks=_OPENMPI_NUMBERS,
    required=_OPENMPI_NUMBERS,
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE",),
)

UNKNOWN_SIZES = (
    *("MV2_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE"),
    *("PET_NNODES", "PET_NPROC_PER_NODE"),
)
UNKNOWN_RANKS = ("PMIX_RANK", "JOB_COMPLETION_INDEX")
"""Variables of tasks of other launchers: MVAPICH2, Hydra, LSF's jsrun, Kubeflow (for torchrun);
PMIx and an indexed job of Kubernetes, which set no size."""

SINGLE = DistributedEnvironment("single", 0, 0, 1, 1, 0, 1)

_COUNT = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,5})\))?", re.ASCII)
_BRACKET = re.compile(r"\[([0-9]+)[0-9,-]*\]", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)


def detect_environment(environ: Mapping[str, str] | None = None) -> DistributedEnvironment:
    """Return the identity of this process in its job, from its launcher's variables.

    Local, non-blocking, pure: it writes nothing, opens no socket and does not import torch. The
    first available source is used:

    1. torch's variables: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as for
       torchrun and ``init_method="env://"``;
    2. a SLURM step; the shell of an allocation is one process;
    3. OpenMPI's mpirun;
    4. a single process: rank 0 of 1. A warning names the variables if another launcher has set
       some (PMI, PMIx, MVAPICH2, LSF, ``PET_*``, ``JOB_COMPLETION_INDEX``).

    Local ranks that are not set are inferred if that is certain: in a world of 1, and if the ranks
    meet on the loopback interface. Nodes that are not set are inferred if the ranks fill one node
    after the other, with the same number on each. Otherwise they are None.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are each used if set, with any launcher. Otherwise the ranks
    meet on the first host of SLURM's list, at a port derived from the ids of job and step. OpenMPI
    provides no address: on one host the ranks meet on the loopback interface; on several,
    ``MASTER_ADDR`` must be set. A world of 1 has port 0: any free port.

    Warns if torch's variables have another rank or world size than SLURM or OpenMPI (variables that
    an earlier job has left).

    Args:
        environ: the variables; ``os.environ`` if None.

    Raises:
        DistributedEnvironmentError: the variables are incomplete (the message lists the missing
            ones), contradict each other, are empty, not numbers, or out of range. Also an OSError
            and a ValueError.
    """
    return identify(os.environ if environ is None else environ, address=True)


def identify(environ: Mapping[str, str], *, address: bool = False) -> DistributedEnvironment:
    """Return the identity of this process. Local, pure.

    Without ``address`` none is required, and the port is None.
    """
    read = Variables(environ, TORCHRUN.source)
    if not read.any_of(TORCHRUN.marks) or _selects_a_device(read):
        return _from_launcher(environ, address) or _single(environ, address)
    alone = "WORLD_SIZE" in read and read.integer("WORLD_SIZE", minimum=1) == 1
    if not alone and ("RANK" not in read or "WORLD_SIZE" not in read):
        read.require(TORCHRUN.required, TORCHRUN.marks)
    own = _from_row(TORCHRUN, read, address)
    _check_other_launcher(own, environ)
    return own


def _selects_a_device(read: Variables) -> bool:
    """Whether only a local rank is set, of a process alone: it does not imply several ranks."""
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    if "WORLD_SIZE" in read or "RANK" in read:
        return False
    return all(read.integer(name) == least for name, least in alone.items() if name in read)


def _check_other_launcher(mine: DistributedEnvironment, environ: Mapping[str, str]) -> None:
    """Warn if SLURM or OpenMPI have started this process as another rank, or of another size."""
    with suppress(DistributedEnvironmentError):
        its = _from_launcher(environ, address=False)
        # torchrun in each task sets its run id; a task may also start its ranks itself.
        if its is None or "TORCHELASTIC_RUN_ID" in environ:
            return
        starts = (mine.local_world_size or 0) * its.world_size
        same = (its.rank, its.world_size) == (mine.rank, mine.world_size)
        if not same and starts != mine.world_size:
            _warn_of_other_numbers(mine.rank, mine.world_size, its.source, its.rank, its.world_size)


def _from_launcher(environ: Mapping[str, str], address: bool) -> DistributedEnvironment | None:
    """The identity from a launcher other than torchrun, or None."""
    rows = [SLURM, OPENMPI]
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks == environ.get("SLURM_STEP_NUM_NODES"):
        # mpirun starts one daemon per node with srun, on every node except its own. The ranks that
        # a daemon starts inherit its SLURM variables, which describe one task per node.
        rows.reverse()
    for row in rows:
        read = Variables(environ, row.source)
        if read.any_of(row.marks) or (row is SLURM and _lost_its_step(read)):
            read.require(row.required)
            return _from_row(row, read, address)
    return None


def _lost_its_step(read: Variables) -> bool:
    """Whether this is a task without the variables of its step, and no second rank 0 of 1.

    A batch script has ``SLURM_PROCID=0`` outside any step.
    """
    return "SLURM_PROCID" in read and read.integer("SLURM_PROCID") > 0


def _single(environ: Mapping[str, str], address: bool) -> DistributedEnvironment:
    found = [name for name in UNKNOWN_SIZES if environ.get(name, "1") != "1"]
    found += [name for name in UNKNOWN_RANKS if name in environ]
    if found:
        _warn_of_unknown_launcher(", ".join(f"{name}={environ[name]}" for name in found))
    return replace(SINGLE, master_port=0 if address else None)


@functools.cache  # once: the rank is looked up often
def _warn_of_unknown_launcher(found: str) -> None:
    logging.getLogger(__name__).warning(
        "this process is treated as a job of one, rank 0 of 1, but a launcher that is not known "
        "here has set %s. If it belongs to a job of several ranks, set RANK, WORLD_SIZE, "
        "LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each of them, or start them with torchrun",
        found,
    )


@functools.cache  # once: the rank is looked up often
def _warn_of_other_numbers(rank: int, size: int, source: str, task: int, tasks: int) -> None:
    logging.getLogger(__name__).warning(
        "RANK=%d and WORLD_SIZE=%d are set and used, but %s started this process as task %d of "
        "%d. If it belongs to a job of %d ranks, these variables are left from another one: unset "
        "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT before the launcher is called",
        *(rank, size, source, task, tasks, tasks),
    )


# -- a row of the table -----------------------------------------------------------------------


def _from_row(row: Launcher, read: Variables, address: bool) -> DistributedEnvironment:
    """The identity of a task whose variables for rank and size are set."""
    world_size = read.integer(row.size, minimum=1)
    rank = read.below(row.rank, row.size, world_size) if row.rank in read else 0
    num_nodes = node_rank = local_size = None
    if row.num_nodes in read:
        num_nodes = read.integer(row.num_nodes, minimum=1, maximum=world_size)
        if row.node_rank in read:
            node_rank = read.below(row.node_rank, row.num_nodes, num_nodes)
    if row.tasks_per_node in read:
        same = _COUNT.fullmatch(read.text(row.tasks_per_node))
        local_size = int(same[1]) if same else None
    elif row.local_size in read:
        local_size = read.integer(row.local_size, minimum=1, maximum=world_size)
    elif world_size == 1 or ("MASTER_ADDR" in read and _is_loopback(read.host("MASTER_ADDR"))):
        local_size = world_size
    local_rank = None
    if row.local_rank in read:
        limit = row.size if local_size is None else row.local_size or f"tasks on node {node_rank}"
        local_rank = read.below(row.local_rank, limit, local_size or world_size)
    elif local_size in (1, world_size):
        local_rank = rank % local_size
    if local_size is not None and world_size % local_size == 0:
        num_nodes = world_size // local_size if num_nodes is None else num_nodes
        if node_rank is None and local_rank in (None, rank % local_size):
            node_rank = rank // local_size
    host, port = _address(row, read, world_size, local_size) if address else (LOOPBACK, None)
    return DistributedEnvironment(
        source=row.source,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=host,
        master_port=port,
    )


def _is_loopback(host: str) -> bool:
    address = ip_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(
    row: Launcher, read: Variables, world_size: int, local_size: int | None
) -> tuple[str, int]:
    """The address that is set; otherwise from hosts and job."""
    if row is TORCHRUN and world_size > 1:
        read.require(row.required, row.marks)
    if "MASTER_ADDR" in read:
        host = read.host("MASTER_ADDR")
    elif row.hosts in read:
        host = _first_host(row, read)
    else:
        if local_size != world_size:
            read.require((*row.required, " or ".join(filter(None, (row.hosts, "MASTER_ADDR")))))
        host = LOOPBACK
    if "MASTER_PORT" in read:
        return host, read.port(world_size)
    if world_size == 1:
        return host, 0
    if not all(name in read for name in row.job):
        read.require((*row.required, " and ".join(row.job) + " or MASTER_PORT"))
    return host, port_from_ids(*(read.text(name) for name in row.job))


def _first_host(row: Launcher, read: Variables) -> str:
    """The first of the hosts, as ``scontrol show hostnames`` lists them."""
    text = read.text(row.hosts)
    host = _BRACKET.sub(r"\1", text).partition(",")[0]
    if not _NAME.fullmatch(host):
        raise read.error(f"{row.hosts}={text!r} is not a list of hosts")
    return host


# -- the rank ---------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Whether this process has a default group. Local; imports no torch."""
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and bool(distributed.is_available())
        and bool(distributed.is_initialized())
    )


def identity_in_group() -> DistributedEnvironment:
    """Return this process's identity in the default group; raise if that contradicts the launcher.

    Local. The launcher's identity, without an address, if it has this rank and size. A launcher of
    one process, or none, contradicts no group: a program may start its ranks itself. So may each
    task of SLURM and OpenMPI: a group that is larger than their job is no contradiction. Variables
    that define no rank say nothing.
    """
    distributed = sys.modules["torch.distributed"]
    rank, size = distributed.get_rank(), distributed.get_world_size()
    place = (rank, None, size, None, None, None)
    of_group = DistributedEnvironment("process_group", *place, master_port=None)
    try:
        launcher = identify(os.environ)
    except DistributedEnvironmentError:
        return of_group
    if (rank, size) == (launcher.rank, launcher.world_size):
        return launcher
    is_task = launcher.source != TORCHRUN.source
    if launcher.world_size == 1 or (is_task and size > launcher.world_size):
        return of_group
    raise DistributedEnvironmentError(
        f"{launcher.source} started this process as rank {launcher.rank} of "
        f"{launcher.world_size}, but the default group ({distributed.get_backend()}) has it as "
        f"rank {rank} of {size}: a library, a notebook or the parent of a forked process has "
        f"created that group. It is unchanged, and no group was created. Call "
        f"torch.distributed.destroy_process_group() first (in a forked child start the process "
        f"with spawn), or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT to those of the group."
    )


def get_rank() -> int:
    """Return the rank of this process: of the default group or, before it exists, the launcher.

    Local, non-blocking; does not import torch. Also works under srun and mpirun, where ``RANK`` is
    not set. Requires no address.

    Raises:
        DistributedEnvironmentError: there is no group, and the variables do not define the rank, or
            contradict each other.
    """
    if is_initialized():
        return int(sys.modules["torch.distributed"].get_rank())
    return identify(os.environ).rank


def is_rank_zero() -> bool:
    """Whether this process is rank 0; see :func:`get_rank`. Local, non-blocking."""
    return get_rank() == 0
