"""A task of a SLURM step. A shell of an allocation, outside any step, is not one.

``salloc`` and ``sbatch`` shells carry ``SLURM_NTASKS`` and, in a batch script, also
``SLURM_PROCID=0``: reading those as "rank 0 of 8" made seven ranks that never came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from reloadpg.environment.hostlist import count_hosts, expand_counts, first_host
from reloadpg.environment.layout import check_layout, port_from_ids
from reloadpg.environment.model import LOOPBACK, DistributedEnvironment
from reloadpg.environment.variables import Variables

T = TypeVar("T")

STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
_STEP_ONLY = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def from_slurm(environ: Mapping[str, str]) -> DistributedEnvironment | None:
    """The environment of a SLURM step's task, or None outside a step. Local, pure.

    Raises:
        DistributedEnvironmentError: the step's variables are incomplete or wrong.
    """
    read = Variables(environ, "slurm")
    if read.first(*_STEP_ONLY) is None and not _stray_task(read):
        return None
    read.require(STEP)
    read.integer("SLURM_STEP_ID")
    world_size = read.integer("SLURM_STEP_NUM_TASKS", minimum=1)
    rank = read.below("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", world_size)
    counts = _tasks_per_node(read, world_size)
    if counts is None:
        num_nodes = _num_nodes(read, world_size)
        if world_size % num_nodes:
            raise read.error(
                f"SLURM_STEP_NUM_TASKS={world_size} tasks on {num_nodes} nodes are not equally "
                f"many on each, and {_COUNTS[0]} is missing",
                _COUNTS[0],
            )
        counts = [world_size // num_nodes] * num_nodes
    node_rank = _node_rank(read, rank, counts)
    local_rank = read.below("SLURM_LOCALID", f"tasks on node {node_rank}", counts[node_rank])
    check_layout("slurm", rank=rank, local_rank=local_rank, first=sum(counts[:node_rank]))
    return DistributedEnvironment(
        source="slurm",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=counts[node_rank],
        node_rank=node_rank,
        num_nodes=len(counts),
        master_addr=_from_node_list(read, first_host, LOOPBACK, world_size),
        master_port=_master_port(read) if world_size > 1 else 0,
    )


def is_daemon_step(environ: Mapping[str, str]) -> bool:
    """Whether the step is one daemon a node, as mpirun makes it inside an allocation.

    On every node but its own, OpenMPI's ``mpirun`` starts its daemon with srun; the ranks that
    the daemon starts inherit the daemon's SLURM variables, in which all ranks of a node are one.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    return tasks is not None and tasks == environ.get("SLURM_STEP_NUM_NODES")


def _stray_task(read: Variables) -> bool:
    # A batch script has SLURM_PROCID=0 outside any step. Any other number is a task whose step
    # variables got lost; it must not run as a second process 0 of 1.
    return "SLURM_PROCID" in read and read.integer("SLURM_PROCID") > 0


def _from_node_list(read: Variables, parse: Callable[[str], T], alone: T, world_size: int) -> T:
    """What ``parse`` finds in the step's node list; ``alone`` if a world of 1 has no list."""
    name = read.first(*_NODE_LISTS)
    if name is None:
        if world_size > 1:
            read.require((*STEP, _NODE_LISTS[0]))
        return alone
    try:
        return parse(read.text(name))
    except ValueError as error:
        raise read.error(f"{name}: {error}", name) from error


def _num_nodes(read: Variables, world_size: int) -> int:
    if "SLURM_STEP_NUM_NODES" in read:
        return read.integer("SLURM_STEP_NUM_NODES", minimum=1, maximum=world_size)
    return _from_node_list(read, count_hosts, 1, world_size)


def _tasks_per_node(read: Variables, world_size: int) -> list[int] | None:
    """Tasks on each node of the step, or None if SLURM does not say so for the step."""
    for name in _COUNTS:
        if name not in read:
            continue
        try:
            counts = expand_counts(read.text(name))
        except ValueError as error:
            raise read.error(f"{name}: {error}", name) from error
        if sum(counts) == world_size and all(counts):
            return counts
        if name == _COUNTS[0]:
            raise read.error(
                f"{name}={','.join(map(str, counts))} sums to {sum(counts)} tasks, but "
                f"SLURM_STEP_NUM_TASKS={world_size}",
                name,
                "SLURM_STEP_NUM_TASKS",
            )
        # SLURM_TASKS_PER_NODE is the allocation's: it may count more tasks than the step has.
    return None


def _node_rank(read: Variables, rank: int, counts: list[int]) -> int:
    if "SLURM_NODEID" in read:
        return read.below("SLURM_NODEID", "number of nodes", len(counts))
    before = 0
    for node, count in enumerate(counts):
        before += count
        if rank < before:
            return node
    raise read.error(f"SLURM_PROCID={rank} is on none of {len(counts)} nodes", "SLURM_PROCID")


def _master_port(read: Variables) -> int:
    read.require((*STEP, "SLURM_JOB_ID|SLURM_JOBID"))
    name = "SLURM_JOB_ID" if "SLURM_JOB_ID" in read else "SLURM_JOBID"
    return port_from_ids(read.integer(name), read.integer("SLURM_STEP_ID"))
