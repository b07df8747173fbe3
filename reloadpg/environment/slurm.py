"""SLURM: the task of a step, and SLURM's compressed lists.

A shell of an allocation, outside any step, is not a task. ``salloc`` and ``sbatch`` shells have
``SLURM_NTASKS`` and, in a batch script, also ``SLURM_PROCID=0``. Reading these as "rank 0 of 8"
would wait for seven missing ranks.

The lists are parsed in Python, so that compute nodes do not need ``scontrol``: host lists
(``rack[1-2]node[08-11,20]-ib,login``) and counts (``4(x2),3``). Checked against ``scontrol show
hostnames`` of SLURM 22.05, which rejects suffixes (``n[1-2]-ib``) and has a different order for
three or more brackets; the first host, where ranks meet, is always the same. Does not import torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from .model import LOOPBACK, Identity, Variables, check_layout, port_from_ids

__all__ = [
    "count_hosts",
    "expand_counts",
    "expand_hostlist",
    "first_host",
    "from_slurm",
    "is_daemon_step",
]

T = TypeVar("T")

STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
_STEP_ONLY = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

MAX_HOSTS = 1 << 20
"""Longer expansions are an error, since a list such as ``n[0-999999999]`` is a mistake."""

_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]*", re.ASCII)


def from_slurm(environ: Mapping[str, str]) -> Identity | None:
    """Return the identity of a SLURM step's task, or None outside a step. Local, pure.

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
                f"SLURM_STEP_NUM_TASKS={world_size} tasks cannot be divided equally among "
                f"{num_nodes} nodes, and {_COUNTS[0]} is missing",
                _COUNTS[0],
            )
        counts = [world_size // num_nodes] * num_nodes
    node_rank = _node_rank(read, rank, counts)
    local_rank = read.below("SLURM_LOCALID", f"tasks on node {node_rank}", counts[node_rank])
    check_layout("slurm", rank=rank, local_rank=local_rank, first=sum(counts[:node_rank]))
    return Identity(
        source="slurm",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=counts[node_rank],
        node_rank=node_rank,
        num_nodes=len(counts),
        address=lambda: read.address(
            world_size,
            lambda: _from_node_list(read, first_host, LOOPBACK, world_size),
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
    # A batch script has SLURM_PROCID=0 outside any step. Any other number is a task without its
    # step variables; it must not run as a second rank 0 of 1.
    return "SLURM_PROCID" in read and read.integer("SLURM_PROCID") > 0


def _from_node_list(read: Variables, parse: Callable[[str], T], alone: T, world_size: int) -> T:
    """Parse the step's node list; ``alone`` if a world of 1 has no list."""
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
    """Tasks on each node of the step, or None if unknown."""
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
        # SLURM_TASKS_PER_NODE describes the allocation, which may have more tasks than the step.
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


# -- compressed lists -------------------------------------------------------------------------


def expand_hostlist(text: str) -> list[str]:
    """Host names of a SLURM host list; the last bracket varies fastest.

    Local, pure.

    Raises:
        ValueError: the list is empty, malformed, or longer than :data:`MAX_HOSTS`.
    """
    total = count_hosts(text)
    if total > MAX_HOSTS:
        raise ValueError(f"host list {text!r} has {total} hosts; the maximum is {MAX_HOSTS}")
    return list(_hosts(text))


def first_host(text: str) -> str:
    """The first host of a SLURM host list, without expanding the rest. Local, pure."""
    return next(_hosts(text))


def count_hosts(text: str) -> int:
    """Number of hosts in a SLURM host list, without expanding it. Local, pure."""
    total = 0
    for entry in _entries(text):
        size = 1
        for part in _parts(entry, text):
            if isinstance(part, list):
                size *= sum(high - low + 1 for low, high, _ in part)
        total += size
    return total


def expand_counts(text: str) -> list[int]:
    """Task counts per node: ``"4(x2),3"`` gives ``[4, 4, 3]``. Local, pure.

    Raises:
        ValueError: malformed, or more than :data:`MAX_HOSTS` nodes.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} in {text!r} is not a task count such as 4 or 4(x2)")
        repeat = int(match[2] or 1)
        if repeat < 1 or len(counts) + repeat > MAX_HOSTS:
            raise ValueError(f"{item!r} in {text!r} repeats {repeat} times")
        counts.extend([int(match[1])] * repeat)
    return counts


def _hosts(text: str) -> Iterator[str]:
    for entry in _entries(text):
        choices = [
            [part] if isinstance(part, str) else _Numbers(part) for part in _parts(entry, text)
        ]
        if len(choices) == 1:
            yield from choices[0]
        else:
            yield from _product(choices)


def _product(choices: list[list[str] | _Numbers]) -> Iterator[str]:
    # Not itertools.product: it expands every operand before it yields the first host.
    for head in choices[0]:
        if len(choices) == 1:
            yield head
        else:
            for tail in _product(choices[1:]):
                yield head + tail


class _Numbers:
    """The numbers of one bracket as zero-padded text, generated one at a time."""

    def __init__(self, ranges: list[tuple[int, int, int]]) -> None:
        self._ranges = ranges

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(
            (f"{number:0{width}d}" for number in range(low, high + 1))
            for low, high, width in self._ranges
        )


def _entries(text: str) -> Iterator[str]:
    """Split at the commas that are outside brackets."""
    depth = 0
    start = 0
    for position, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        if depth not in (0, 1):
            raise ValueError(f"host list {text!r} has unbalanced or nested brackets")
        if char == "," and depth == 0:
            yield _entry(text[start:position], text)
            start = position + 1
    if depth:
        raise ValueError(f"host list {text!r} has unbalanced or nested brackets")
    yield _entry(text[start:], text)


def _entry(entry: str, text: str) -> str:
    if not entry:
        raise ValueError(f"host list {text!r} has an empty entry")
    return entry


def _parts(entry: str, text: str) -> Iterator[str | list[tuple[int, int, int]]]:
    """Literal pieces and brackets of one entry, in order."""
    for index, piece in enumerate(re.split(r"\[([^\]]*)\]", entry)):
        if index % 2:
            yield [_range(item, text) for item in piece.split(",")]
        elif not _NAME.fullmatch(piece):
            raise ValueError(f"host list {text!r}: {piece!r} is not part of a host name")
        elif piece:
            yield piece


def _range(item: str, text: str) -> tuple[int, int, int]:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"host list {text!r}: {item!r} is not a number or a range")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise ValueError(f"host list {text!r}: the range {item!r} descends")
    return low, high, len(match[1])
