"""SLURM: the task of a step.

A shell of an allocation, outside any step, is not a task. ``salloc`` and ``sbatch`` shells have
``SLURM_NTASKS`` and, in a batch script, also ``SLURM_PROCID=0``. Reading these as "rank 0 of 8"
would wait for seven missing ranks. So a task has the variables that ``srun`` sets for the step.
Where the job id is missing, as in a container that gets a few variables only, rank, local rank and
number of tasks are enough: a batch shell has its job's id. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .model import LOOPBACK, Identity, Variables, check_layout, port_from_ids

_SIZE = "SLURM_STEP_NUM_TASKS|SLURM_NTASKS"
TASK = ("SLURM_PROCID", "SLURM_LOCALID", _SIZE)
_JOB = "SLURM_JOB_ID|SLURM_JOBID"
_STEP_ONLY = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
_NODES = "SLURM_STEP_NODELIST"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"

_COUNT = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,5})\))?", re.ASCII)
_BRACKET = re.compile(r"\[([0-9]+)[0-9,-]*\]", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)


def from_slurm(environ: Mapping[str, str]) -> Identity | None:
    """Return the identity of a SLURM step's task, or None outside a step. Local, pure."""
    read = Variables(environ, "slurm")
    if read.first(*_STEP_ONLY) is None and not _stray_task(read):
        return None
    if read.first(*_STEP_ONLY) is None and read.first(*_JOB.split("|")) is not None:
        read.require(("SLURM_STEP_ID", *TASK))  # its rank 0 would count as the batch shell
    read.require(TASK)
    if "SLURM_STEP_ID" in read:
        read.integer("SLURM_STEP_ID")
    size_name = read.first(*_SIZE.split("|")) or _SIZE
    world_size = read.integer(size_name, minimum=1)
    rank = read.below("SLURM_PROCID", size_name, world_size)
    counts: list[int] = []
    node_rank: int | None = None
    if world_size == 1:
        counts, node_rank = [1], 0
    elif "SLURM_NODEID" in read and _COUNTS in read:
        counts = _tasks_per_node(read, world_size)
        node_rank = read.below("SLURM_NODEID", "number of nodes", len(counts))
    if node_rank is None:
        local_rank = read.below("SLURM_LOCALID", size_name, world_size)
    else:
        local_rank = read.below("SLURM_LOCALID", f"tasks on node {node_rank}", counts[node_rank])
        check_layout("slurm", rank=rank, local_rank=local_rank, first=sum(counts[:node_rank]))
    return Identity(
        source="slurm",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=None if node_rank is None else counts[node_rank],
        node_rank=node_rank,
        num_nodes=len(counts) or None,
        address=lambda: read.address(
            world_size,
            lambda: _first_host(read, world_size),
            lambda: _master_port(read) if world_size > 1 else 0,
        ),
    )


def is_daemon_step(environ: Mapping[str, str]) -> bool:
    """Whether the step is one daemon per node, started by mpirun inside an allocation.

    OpenMPI's ``mpirun`` starts its daemon with srun on every node except its own. The ranks that
    the daemon starts inherit the daemon's SLURM variables, which describe one task per node.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    return tasks is not None and tasks == environ.get("SLURM_STEP_NUM_NODES")


def _stray_task(read: Variables) -> bool:
    # A batch script has SLURM_PROCID=0 and its job's id outside any step. Any other number is a
    # task without its step variables, which must not run as a second rank 0 of 1.
    if "SLURM_PROCID" not in read:
        return False
    in_shell = read.first(*_JOB.split("|")) is not None or "SLURM_NTASKS" not in read
    return not in_shell or read.integer("SLURM_PROCID") > 0


def _tasks_per_node(read: Variables, world_size: int) -> list[int]:
    """Tasks on each node of the step: ``4(x2),3`` stands for ``[4, 4, 3]``."""
    text = read.text(_COUNTS)
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise read.error(f"{_COUNTS}={text!r}: {item!r} is not a count as 4 or 4(x2)")
        counts += [int(match[1])] * int(match[2] or 1)
    if sum(counts) != world_size:
        raise read.error(
            f"{_COUNTS}={text} sums to {sum(counts)} tasks, but SLURM_STEP_NUM_TASKS={world_size}"
        )
    return counts


def _first_host(read: Variables, world_size: int) -> str:
    """The first host of ``rack[1-2]node[08-11,20]-ib,login``, as ``scontrol show hostnames``."""
    if world_size == 1 and _NODES not in read:
        return LOOPBACK
    read.require((*TASK, f"{_NODES}|MASTER_ADDR"))
    host = _BRACKET.sub(r"\1", read.text(_NODES)).partition(",")[0]
    if not _NAME.fullmatch(host):
        raise read.error(f"{_NODES}={read.text(_NODES)!r} is not a list of hosts")
    return host


def _master_port(read: Variables) -> int:
    missing = [name for name in ("SLURM_STEP_ID", _JOB) if read.first(*name.split("|")) is None]
    if missing:
        read.require((*TASK, "|".join([*missing, "MASTER_PORT"])))
    name = "SLURM_JOB_ID" if "SLURM_JOB_ID" in read else "SLURM_JOBID"
    return port_from_ids(read.integer(name), read.integer("SLURM_STEP_ID"))
