"""Every collective and point-to-point of torch.distributed as a row: how to call it, what it gives.

A row is run by all members of a group. Rank ``g`` (global) contributes numbers made of
``2**g``, so a sum names the ranks that took part: a result that came from another group, or from
another stage of the same test, is no member of the expected values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dist_nn
import worlds
from early_aliases import FROM_C10D, FROM_DISTRIBUTED

Value = Any
OPS = torch.ops._c10d_functional
OPS_AUTOGRAD = torch.ops._c10d_functional_autograd

PYTHON_WAYS = ("dist", "alias", "c10d_alias")
"""How a function of torch.distributed is looked up: now, or by names bound before install."""

FUNCTIONAL_WAYS = ("object", "name")
"""How a functional collective is told its group."""


@dataclass
class Case:
    """One group as one of its ranks sees it, and how a row is to be called."""

    group: Any
    members: tuple[int, ...]
    me: int
    way: str
    mode: str
    salt: int
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        """This rank's number in the group."""
        return self.members.index(self.me)

    @property
    def root(self) -> int:
        """Global rank of the root: not the first member, so that rank and group rank differ."""
        return self.members[1]

    @property
    def is_root(self) -> bool:
        return self.me == self.root

    @property
    def is_async(self) -> bool:
        return self.mode == "async"

    @property
    def handle(self) -> Any:
        """What a functional collective gets as its group."""
        group = dist.group.WORLD if self.group is None else self.group
        return group.group_name if self.way == "name" else group

    @property
    def name(self) -> str:
        group: Any = dist.group.WORLD if self.group is None else self.group
        return str(group.group_name)

    def fn(self, name: str) -> Callable[..., Any]:
        found = {"alias": FROM_DISTRIBUTED, "c10d_alias": FROM_C10D}.get(self.way, vars(dist))
        return found[name]  # type: ignore[no-any-return]

    def numbers(self, rank: int, count: int = 2) -> list[float]:
        """What a rank contributes."""
        # Divisible by 3 and 4, so that averages are exact.
        return [float(12 * self.salt * 2**rank + 1200 * k) for k in range(count)]

    def own(self, count: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(self.numbers(self.me, count)).to(dtype)

    def each(self, count: int = 2) -> list[list[float]]:
        return [self.numbers(rank, count) for rank in self.members]

    def summed(self, count: int = 2) -> list[float]:
        return [sum(column) for column in zip(*self.each(count), strict=True)]

    def done(self, result: Any) -> None:
        """Wait for what an asynchronous call returned; note what a synchronous one returned."""
        if self.is_async:
            self.notes.append(f"async gives {kind(result)}")
            result.wait()
        else:
            self.notes.append(f"sync gives {kind(result)}")


def kind(result: Any) -> str:
    if isinstance(result, dist.Work):
        return "Work"
    return type(result).__name__


@dataclass(frozen=True)
class Row:
    """One way to use one operation.

    Attributes:
        name: name of the row.
        covers: public names that the row calls.
        run: calls the operation and returns what it gave, as plain values.
        expect: what it must give on this rank.
        ways: how the operation or its group can be looked up.
        modes: ``sync``, ``async``.
        groups: on which groups it is run: ``world``, ``sub``.
        missing: whether the installed torch, or the backend, lacks one of the functions.
    """

    name: str
    covers: tuple[str, ...]
    run: Callable[[Case], Value]
    expect: Callable[[Case], Value]
    ways: tuple[str, ...]
    modes: tuple[str, ...]
    groups: tuple[str, ...]
    missing: bool

    def __str__(self) -> str:
        return self.name


ROWS: dict[str, Row] = {}

HANG_ON_NCCL = {"recv[any source]", "irecv[any source]"}
"""NCCL cannot receive from any rank; those that send to one that tries wait for ever."""


def _has(name: str) -> bool:
    space, _, attribute = name.rpartition(".")
    if space == "":
        return hasattr(dist, attribute)
    if space in ("ops", "ops_autograd"):
        namespace = "_c10d_functional" + ("_autograd" if space == "ops_autograd" else "")
        return bool(torch._C._jit_get_schemas_for_operator(f"{namespace}::{attribute}"))
    return hasattr({"fc": fc, "nn": dist_nn}[space], attribute)


def row(
    name: str,
    *covers: str,
    expect: Callable[[Case], Value],
    ways: tuple[str, ...] = PYTHON_WAYS,
    modes: tuple[str, ...] = ("sync",),
    groups: tuple[str, ...] = ("world", "sub"),
) -> Callable[[Callable[[Case], Value]], Callable[[Case], Value]]:
    def add(run: Callable[[Case], Value]) -> Callable[[Case], Value]:
        names = covers or (name,)
        missing = not all(_has(covered) for covered in names)
        missing |= worlds.NCCL and name in HANG_ON_NCCL
        ROWS[name] = Row(name, names, run, expect, ways, modes, groups, missing)
        return run

    return add


BOTH = ("sync", "async")


def lists(tensors: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


# ---------------------------------------------------------------------------------------------
# functions of torch.distributed


def _fold(function: Callable[[float, float], float]) -> Callable[[Case], Value]:
    def expect(case: Case) -> Value:
        total = case.each()[0]
        for other in case.each()[1:]:
            total = [function(a, b) for a, b in zip(total, other, strict=True)]
        return total

    return expect


_REDUCTIONS: dict[str, tuple[torch.dtype, Callable[[Case], Value]]] = {
    "SUM": (torch.float32, lambda case: case.summed()),
    "AVG": (torch.float32, lambda case: [total / case.size for total in case.summed()]),
    "PRODUCT": (torch.float64, _fold(lambda a, b: a * b)),
    "MIN": (torch.float32, _fold(min)),
    "MAX": (torch.float32, _fold(max)),
    "BAND": (torch.int64, _fold(lambda a, b: int(a) & int(b))),
    "BOR": (torch.int64, _fold(lambda a, b: int(a) | int(b))),
    "BXOR": (torch.int64, _fold(lambda a, b: int(a) ^ int(b))),
}


def _all_reduce_rows() -> None:
    for name, (dtype, expect) in _REDUCTIONS.items():

        @row(f"all_reduce[{name}]", "all_reduce", expect=expect, modes=BOTH)
        def all_reduce(case: Case, op: str = name, dtype: torch.dtype = dtype) -> Value:
            tensor = case.own(dtype=dtype)
            case.done(
                case.fn("all_reduce")(
                    tensor, getattr(dist.ReduceOp, op), case.group, async_op=case.is_async
                )
            )
            return tensor.tolist()


_all_reduce_rows()


@row(
    "all_reduce[complex]",
    "all_reduce",
    expect=lambda case: [complex(0, total) for total in case.summed()],
    modes=BOTH,
)
def all_reduce_complex(case: Case) -> Value:
    tensor = case.own().to(torch.complex64) * 1j
    case.done(case.fn("all_reduce")(tensor, group=case.group, async_op=case.is_async))
    return tensor.tolist()


@row(
    "all_reduce[large]",
    "all_reduce",
    expect=lambda case: sum(case.salt * 2**rank for rank in case.members),
    modes=BOTH,
)
def all_reduce_large(case: Case) -> Value:
    tensor = torch.full((1 << 15,), case.salt * 2**case.me, dtype=torch.int64)
    case.done(case.fn("all_reduce")(tensor, group=case.group, async_op=case.is_async))
    assert (tensor == tensor[0]).all()
    return int(tensor[0])


@row(
    "all_reduce_coalesced",
    expect=lambda case: [case.summed(2), case.summed(3)],
    modes=BOTH,
)
def all_reduce_coalesced(case: Case) -> Value:
    tensors = [case.own(2), case.own(3)]
    case.done(case.fn("all_reduce_coalesced")(tensors, group=case.group, async_op=case.is_async))
    return lists(tensors)


@row("reduce", expect=lambda case: case.summed() if case.is_root else None, modes=BOTH)
def reduce(case: Case) -> Value:
    tensor = case.own()
    case.done(case.fn("reduce")(tensor, case.root, group=case.group, async_op=case.is_async))
    return tensor.tolist() if case.is_root else None


@row(
    "reduce[group_dst]",
    "reduce",
    expect=lambda case: case.summed() if case.is_root else None,
    modes=BOTH,
)
def reduce_group_dst(case: Case) -> Value:
    tensor = case.own()
    case.done(case.fn("reduce")(tensor, group_dst=1, group=case.group, async_op=case.is_async))
    return tensor.tolist() if case.is_root else None


@row("broadcast", expect=lambda case: case.numbers(case.root), modes=BOTH)
def broadcast(case: Case) -> Value:
    tensor = case.own()
    case.done(case.fn("broadcast")(tensor, case.root, case.group, async_op=case.is_async))
    return tensor.tolist()


@row(
    "broadcast[group_src]",
    "broadcast",
    expect=lambda case: case.numbers(case.members[-1]),
    modes=BOTH,
)
def broadcast_group_src(case: Case) -> Value:
    tensor = case.own()
    case.done(
        case.fn("broadcast")(
            tensor, group=case.group, group_src=case.size - 1, async_op=case.is_async
        )
    )
    return tensor.tolist()


@row("all_gather", expect=lambda case: case.each(), modes=BOTH)
def all_gather(case: Case) -> Value:
    parts = [torch.zeros(2) for _ in case.members]
    case.done(case.fn("all_gather")(parts, case.own(), case.group, async_op=case.is_async))
    return lists(parts)


def _flat_gather_rows() -> None:
    for name in ("all_gather_into_tensor", "_all_gather_base", "all_gather_single"):

        @row(name, expect=lambda case: list(itertools.chain(*case.each())), modes=BOTH)
        def flat(case: Case, name: str = name) -> Value:
            output = torch.zeros(2 * case.size)
            case.done(case.fn(name)(output, case.own(), case.group, async_op=case.is_async))
            return output.tolist()


_flat_gather_rows()


@row(
    "all_gather_into_tensor[stack]",
    "all_gather_into_tensor",
    expect=lambda case: case.each(),
    modes=BOTH,
)
def all_gather_into_tensor_stack(case: Case) -> Value:
    output = torch.zeros(case.size, 2)
    case.done(
        case.fn("all_gather_into_tensor")(output, case.own(), case.group, async_op=case.is_async)
    )
    return output.tolist()


@row(
    "all_gather_coalesced",
    expect=lambda case: [[a, b] for a, b in zip(case.each(2), case.each(3), strict=True)],
    modes=BOTH,
)
def all_gather_coalesced(case: Case) -> Value:
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in case.members]
    case.done(
        case.fn("all_gather_coalesced")(
            outputs, [case.own(2), case.own(3)], case.group, async_op=case.is_async
        )
    )
    return [lists(output) for output in outputs]


@row(
    "all_gather_object",
    expect=lambda case: [{"rank": rank, "salt": case.salt} for rank in case.members],
)
def all_gather_object(case: Case) -> Value:
    found: list[Any] = [None] * case.size
    case.fn("all_gather_object")(found, {"rank": case.me, "salt": case.salt}, case.group)
    return found


@row("gather", expect=lambda case: case.each() if case.is_root else None, modes=BOTH)
def gather(case: Case) -> Value:
    parts = [torch.zeros(2) for _ in case.members] if case.is_root else None
    case.done(case.fn("gather")(case.own(), parts, case.root, case.group, async_op=case.is_async))
    return lists(parts) if parts is not None else None


def _flat_root_gather_rows() -> None:
    for name in ("gather_into_tensor", "gather_single"):

        @row(
            name,
            expect=lambda case: list(itertools.chain(*case.each())) if case.is_root else None,
            modes=BOTH,
        )
        def flat(case: Case, name: str = name) -> Value:
            output = torch.zeros(2 * case.size) if case.is_root else None
            case.done(
                case.fn(name)(
                    case.own(), output, dst=case.root, group=case.group, async_op=case.is_async
                )
            )
            return output.tolist() if output is not None else None


_flat_root_gather_rows()


@row(
    "gather_object",
    expect=lambda case: (
        [("from", rank, case.salt) for rank in case.members] if case.is_root else None
    ),
)
def gather_object(case: Case) -> Value:
    found: list[Any] | None = [None] * case.size if case.is_root else None
    case.fn("gather_object")(("from", case.me, case.salt), found, case.root, case.group)
    return found


@row("scatter", expect=lambda case: case.numbers(case.me), modes=BOTH)
def scatter(case: Case) -> Value:
    output = torch.zeros(2)
    parts = [torch.tensor(part) for part in case.each()] if case.is_root else None
    case.done(case.fn("scatter")(output, parts, case.root, case.group, async_op=case.is_async))
    return output.tolist()


@row("scatter_object_list", expect=lambda case: [("to", case.me, case.salt)])
def scatter_object_list(case: Case) -> Value:
    found: list[Any] = [None]
    parts = [("to", rank, case.salt) for rank in case.members] if case.is_root else None
    case.fn("scatter_object_list")(found, parts, case.root, case.group)
    return found


@row("broadcast_object_list", expect=lambda case: [("root", case.root), case.salt])
def broadcast_object_list(case: Case) -> Value:
    objects = [("root", case.me), case.salt if case.is_root else None]
    case.fn("broadcast_object_list")(objects, case.root, case.group)
    return objects


def _ring(case: Case) -> tuple[int, int]:
    """Global ranks of the next and of the previous member."""
    return (
        case.members[(case.index + 1) % case.size],
        case.members[(case.index - 1) % case.size],
    )


def _from_previous(case: Case) -> Value:
    return case.numbers(_ring(case)[1])


@row(
    "send_object_list",
    "send_object_list",
    "recv_object_list",
    expect=lambda case: (
        None if case.index == 0 else (case.members[0], [("hop", case.index), case.salt])
    ),
)
def send_object_list(case: Case) -> Value:
    if case.index == 0:
        for index in range(1, case.size):
            case.fn("send_object_list")(
                [("hop", index), case.salt], case.members[index], case.group
            )
        return None
    objects: list[Any] = [None, None]
    source = case.fn("recv_object_list")(objects, case.members[0], case.group)
    return source, objects


@row("reduce_scatter", expect=lambda case: _scattered_sum(case), modes=BOTH)
def reduce_scatter(case: Case) -> Value:
    output = torch.zeros(2)
    parts = list(case.own(2 * case.size).chunk(case.size))
    case.done(case.fn("reduce_scatter")(output, parts, group=case.group, async_op=case.is_async))
    return output.tolist()


def _scattered_sum(case: Case, count: int = 2) -> Value:
    summed = case.summed(count * case.size)
    return summed[count * case.index : count * (case.index + 1)]


def _flat_reduce_scatter_rows() -> None:
    for name in ("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"):

        @row(name, expect=_scattered_sum, modes=BOTH)
        def flat(case: Case, name: str = name) -> Value:
            output = torch.zeros(2)
            case.done(
                case.fn(name)(
                    output, case.own(2 * case.size), group=case.group, async_op=case.is_async
                )
            )
            return output.tolist()


_flat_reduce_scatter_rows()


def _exchanged(case: Case) -> Value:
    """What the rank gets when every member sends its i-th pair of numbers to member i."""
    pairs = [case.numbers(rank, 2 * case.size) for rank in case.members]
    return [pair[2 * case.index : 2 * case.index + 2] for pair in pairs]


@row("all_to_all", expect=_exchanged, modes=BOTH)
def all_to_all(case: Case) -> Value:
    outputs = [torch.zeros(2) for _ in case.members]
    inputs = [part.clone() for part in case.own(2 * case.size).chunk(case.size)]
    case.done(case.fn("all_to_all")(outputs, inputs, case.group, async_op=case.is_async))
    return lists(outputs)


@row("all_to_all_single", expect=lambda case: list(itertools.chain(*_exchanged(case))), modes=BOTH)
def all_to_all_single(case: Case) -> Value:
    output = torch.zeros(2 * case.size)
    case.done(
        case.fn("all_to_all_single")(
            output, case.own(2 * case.size), group=case.group, async_op=case.is_async
        )
    )
    return output.tolist()


def _uneven(case: Case, index: int) -> tuple[list[int], list[int], list[float]]:
    """Split sizes of what a member gets and sends (i + j + 1 from i to j), and what it sends."""
    sizes = [index + other + 1 for other in range(case.size)]
    return sizes, sizes, case.numbers(case.members[index], sum(sizes))


def _unevenly_exchanged(case: Case) -> Value:
    found: list[float] = []
    for index in range(case.size):
        _, sizes, sent = _uneven(case, index)
        start = sum(sizes[: case.index])
        found += sent[start : start + sizes[case.index]]
    return found


@row("all_to_all_single[uneven]", "all_to_all_single", expect=_unevenly_exchanged, modes=BOTH)
def all_to_all_single_uneven(case: Case) -> Value:
    got, sent, numbers = _uneven(case, case.index)
    output = torch.zeros(sum(got))
    case.done(
        case.fn("all_to_all_single")(
            output, torch.tensor(numbers), got, sent, case.group, async_op=case.is_async
        )
    )
    return output.tolist()


@row("barrier", expect=lambda case: "passed", modes=BOTH)
def barrier(case: Case) -> Value:
    case.done(case.fn("barrier")(case.group, async_op=case.is_async))
    return "passed"


def _monitored_barrier_rows() -> None:
    for all_ranks in (False, True):

        @row(
            f"monitored_barrier[wait_all_ranks={all_ranks}]",
            "monitored_barrier",
            expect=lambda case: "passed",
        )
        def monitored_barrier(case: Case, all_ranks: bool = all_ranks) -> Value:
            case.done(
                case.fn("monitored_barrier")(
                    case.group, timedelta(seconds=20), wait_all_ranks=all_ranks
                )
            )
            return "passed"


_monitored_barrier_rows()


@row(
    "send, recv",
    "send",
    "recv",
    expect=lambda case: (_ring(case)[1], _from_previous(case)),
)
def send_recv(case: Case) -> Value:
    after, before = _ring(case)
    tensor = torch.zeros(2)

    def send() -> None:
        case.done(case.fn("send")(case.own(), after, case.group, tag=3))

    if case.index == 0:
        send()
    source = case.fn("recv")(tensor, before, case.group, tag=3)
    if case.index != 0:
        send()
    return source, tensor.tolist()


def _start_in_ring(case: Case, receive: Callable[[], Any], send: Callable[[], Any]) -> list[Any]:
    """Start both; the first member sends first.

    Where the group is bound to a device, all its NCCL operations run on one stream in the order of
    the calls, and members that all receive first would wait for each other.
    """
    return [start() for start in ((send, receive) if case.index == 0 else (receive, send))]


@row("isend, irecv", "isend", "irecv", expect=_from_previous, modes=("async",))
def isend_irecv(case: Case) -> Value:
    after, before = _ring(case)
    tensor = torch.zeros(2)
    works = _start_in_ring(
        case,
        lambda: case.fn("irecv")(tensor, before, case.group, tag=4),
        lambda: case.fn("isend")(case.own(), after, case.group, tag=4),
    )
    for work in works:
        case.done(work)
    return tensor.tolist()


@row("isend, irecv[group ranks]", "isend", "irecv", expect=_from_previous, modes=("async",))
def isend_irecv_group_ranks(case: Case) -> Value:
    tensor = torch.zeros(2)
    works = _start_in_ring(
        case,
        lambda: case.fn("irecv")(tensor, group=case.group, group_src=(case.index - 1) % case.size),
        lambda: case.fn("isend")(
            case.own(), group=case.group, group_dst=(case.index + 1) % case.size
        ),
    )
    for work in works:
        case.done(work)
    return tensor.tolist()


def _from_all_others(case: Case) -> Value:
    others = [rank for rank in case.members if rank != case.root]
    return sorted((rank, case.numbers(rank)) for rank in others) if case.is_root else None


@row("recv[any source]", "recv", "send", expect=_from_all_others)
def recv_any_source(case: Case) -> Value:
    if not case.is_root:
        case.fn("send")(case.own(), case.root, case.group, tag=5)
        dist.barrier(case.group)
        return None
    found = []
    for _ in range(case.size - 1):
        tensor = torch.zeros(2)
        found.append((case.fn("recv")(tensor, None, case.group, tag=5), tensor.tolist()))
    dist.barrier(case.group)  # what is sent for the next case must not be received for this one
    return sorted(found)


@row(
    "irecv[any source]",
    "irecv",
    "isend",
    expect=lambda case: (
        sorted(numbers for _, numbers in _from_all_others(case)) if case.is_root else None
    ),
    modes=("async",),
)
def irecv_any_source(case: Case) -> Value:
    if not case.is_root:
        case.done(case.fn("isend")(case.own(), case.root, case.group, tag=6))
        dist.barrier(case.group)
        return None
    found = []
    for _ in range(case.size - 1):
        tensor = torch.zeros(2)
        case.done(case.fn("irecv")(tensor, None, case.group, tag=6))
        found.append(tensor.tolist())
    dist.barrier(case.group)
    return sorted(found)


@row("batch_isend_irecv", "batch_isend_irecv", expect=_from_previous, modes=("async",))
def batch_isend_irecv(case: Case) -> Value:
    after, before = _ring(case)
    tensor = torch.zeros(2)
    batch = [
        dist.P2POp(case.fn("isend"), case.own(), after, case.group, tag=7),
        dist.P2POp(case.fn("irecv"), tensor, before, case.group, tag=7),
    ]
    for work in case.fn("batch_isend_irecv")(batch):
        case.done(work)
    return tensor.tolist()


@row(
    "batch_isend_irecv[partial]",
    "batch_isend_irecv",
    expect=lambda case: case.numbers(case.members[0]) if case.index == 1 else None,
    modes=("async",),
)
def batch_isend_irecv_partial(case: Case) -> Value:
    """Two of the members only: the first operation on a rebuilt group may be such a one."""
    tensor = torch.zeros(2)
    if case.index == 0:
        batch = [dist.P2POp(case.fn("isend"), case.own(), case.members[1], case.group)]
    elif case.index == 1:
        batch = [dist.P2POp(case.fn("irecv"), tensor, case.members[0], case.group)]
    else:
        return None
    for work in case.fn("batch_isend_irecv")(batch):
        case.done(work)
    return tensor.tolist() if case.index == 1 else None


def _group_of(case: Case) -> Any:
    return dist.group.WORLD if case.group is None else case.group


def _coalescing_rows() -> None:
    def all_reduce(case: Case) -> tuple[list[torch.Tensor], Callable[[], Value]]:
        tensors = [case.own(2), case.own(3)]
        for tensor in tensors:
            case.fn("all_reduce")(tensor, group=case.group)
        return tensors, lambda: lists(tensors)

    def gather(case: Case) -> tuple[list[torch.Tensor], Callable[[], Value]]:
        outputs = [torch.zeros(2 * case.size), torch.zeros(3 * case.size)]
        for count, output in zip((2, 3), outputs, strict=True):
            case.fn("all_gather_into_tensor")(output, case.own(count), case.group)
        return outputs, lambda: lists(outputs)

    def scatter(case: Case) -> tuple[list[torch.Tensor], Callable[[], Value]]:
        outputs = [torch.zeros(2), torch.zeros(3)]
        for count, output in zip((2, 3), outputs, strict=True):
            case.fn("reduce_scatter_tensor")(output, case.own(count * case.size), group=case.group)
        return outputs, lambda: lists(outputs)

    bodies: dict[str, tuple[Any, Callable[[Case], Value]]] = {
        "all_reduce": (all_reduce, lambda case: [case.summed(2), case.summed(3)]),
        "all_gather_into_tensor": (
            gather,
            lambda case: [list(itertools.chain(*case.each(count))) for count in (2, 3)],
        ),
        "reduce_scatter_tensor": (
            scatter,
            lambda case: [_scattered_sum(case, count) for count in (2, 3)],
        ),
    }
    for (name, (body, expect)), device in itertools.product(bodies.items(), (None, "cpu")):

        @row(
            f"_coalescing_manager[{name}, device={device}]",
            "_coalescing_manager",
            name,
            expect=expect,
            modes=BOTH,
        )
        def coalesced(case: Case, body: Any = body, device: str | None = device) -> Value:
            kwargs = {"device": torch.device(device)} if device else {}
            manager = case.fn("_coalescing_manager")
            try:
                with manager(case.group, async_ops=case.is_async, **kwargs) as works:
                    _, result = body(case)
            except RuntimeError:
                # Torch leaves the group in its table of coalescing groups if the backend cannot
                # start one, and every later all_reduce of the group is then silently postponed.
                dist.distributed_c10d._world.pg_coalesce_state.pop(_group_of(case), None)
                raise
            if case.is_async:
                works.wait()
            return result()


_coalescing_rows()


# ---------------------------------------------------------------------------------------------
# functional collectives: torch.distributed._functional_collectives, and the operators by name


def functional(
    name: str, *covers: str, expect: Callable[[Case], Value], modes: tuple[str, ...] = ("sync",)
) -> Callable[[Callable[[Case], Value]], Callable[[Case], Value]]:
    return row(name, *(covers or (name,)), expect=expect, ways=FUNCTIONAL_WAYS, modes=modes)


def operator(
    name: str, *covers: str, expect: Callable[[Case], Value]
) -> Callable[[Callable[[Case], Value]], Callable[[Case], Value]]:
    return row(name, *(covers or (name,)), expect=expect, ways=("name",))


def _flat(case: Case, count: int = 2) -> Value:
    return list(itertools.chain(*case.each(count)))


@functional("fc.all_reduce", expect=lambda case: case.summed())
def fc_all_reduce(case: Case) -> Value:
    return fc.wait_tensor(fc.all_reduce(case.own(), "sum", case.handle)).tolist()


@functional("fc.all_reduce[implicit wait]", "fc.all_reduce", expect=lambda case: case.summed())
def fc_all_reduce_implicit(case: Case) -> Value:
    return (fc.all_reduce(case.own(), "sum", case.handle) + 0).tolist()


@functional("fc.all_reduce[ranks]", "fc.all_reduce", expect=lambda case: case.summed())
def fc_all_reduce_ranks(case: Case) -> Value:
    return (fc.all_reduce(case.own(), "sum", list(case.members)) + 0).tolist()


@functional("fc.all_reduce[avg]", "fc.all_reduce", expect=_REDUCTIONS["AVG"][1])
def fc_all_reduce_avg(case: Case) -> Value:
    return fc.wait_tensor(fc.all_reduce(case.own(), "avg", case.handle)).tolist()


@functional("fc.all_reduce_coalesced", expect=lambda case: [case.summed(2), case.summed(3)])
def fc_all_reduce_coalesced(case: Case) -> Value:
    outputs = fc.all_reduce_coalesced([case.own(2), case.own(3)], "sum", case.handle)
    return lists(fc.wait_tensor(output) for output in outputs)


def _fc_gather_rows() -> None:
    for name in ("all_gather_tensor", "all_gather_single"):

        @functional(f"fc.{name}", expect=_flat)
        def gather(case: Case, name: str = name) -> Value:
            return fc.wait_tensor(getattr(fc, name)(case.own(), 0, case.handle)).tolist()

    for name in ("all_gather_into_tensor_coalesced", "all_gather_single_coalesced"):

        @functional(f"fc.{name}", expect=lambda case: [_flat(case, 2), _flat(case, 3)])
        def gather_coalesced(case: Case, name: str = name) -> Value:
            outputs = getattr(fc, name)([case.own(2), case.own(3)], case.handle)
            return lists(fc.wait_tensor(output) for output in outputs)

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):

        @functional(f"fc.{name}", expect=_scattered_sum)
        def scatter(case: Case, name: str = name) -> Value:
            tensor = case.own(2 * case.size)
            return fc.wait_tensor(getattr(fc, name)(tensor, "sum", 0, case.handle)).tolist()

    for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):

        @functional(
            f"fc.{name}", expect=lambda case: [_scattered_sum(case, 2), _scattered_sum(case, 3)]
        )
        def scatter_coalesced(case: Case, name: str = name) -> Value:
            tensors = [case.own(2 * case.size), case.own(3 * case.size)]
            outputs = getattr(fc, name)(tensors, "sum", [0, 0], case.handle)
            return lists(fc.wait_tensor(output) for output in outputs)


_fc_gather_rows()


@functional(
    "fc.all_gather_tensor[dim 1]",
    "fc.all_gather_tensor",
    expect=lambda case: [[x] * 0 + [each[k] for each in case.each()] for k, x in enumerate((0, 1))],
)
def fc_all_gather_dim(case: Case) -> Value:
    return (fc.all_gather_tensor(case.own().view(2, 1), 1, case.handle) + 0).tolist()


@functional("fc.all_to_all_single", expect=lambda case: list(itertools.chain(*_exchanged(case))))
def fc_all_to_all_single(case: Case) -> Value:
    tensor = case.own(2 * case.size)
    return fc.wait_tensor(fc.all_to_all_single(tensor, None, None, case.handle)).tolist()


@functional("fc.all_to_all_single[uneven]", "fc.all_to_all_single", expect=_unevenly_exchanged)
def fc_all_to_all_single_uneven(case: Case) -> Value:
    got, sent, numbers = _uneven(case, case.index)
    output = fc.all_to_all_single(torch.tensor(numbers), got, sent, case.handle)
    return fc.wait_tensor(output).tolist()


@functional("fc.broadcast", expect=lambda case: case.numbers(case.root))
def fc_broadcast(case: Case) -> Value:
    return fc.wait_tensor(fc.broadcast(case.own(), 1, case.handle)).tolist()


@functional("fc.permute_tensor", expect=_from_previous)
def fc_permute_tensor(case: Case) -> Value:
    after = [(index + 1) % case.size for index in range(case.size)]
    return fc.wait_tensor(fc.permute_tensor(case.own(), after, case.handle)).tolist()


# In the backward passes each rank weighs its result with its own power of two: the gradient
# names the ranks whose weights reached it.


def _weighed(case: Case, output: torch.Tensor, tensor: torch.Tensor) -> Value:
    # Not backward(): it may copy a gradient that is still on its way (seen on torch 2.8).
    (gradient,) = torch.autograd.grad((output * float(2**case.me)).sum(), tensor)
    return output.detach().tolist(), fc.wait_tensor(gradient).tolist()


def _weight(case: Case) -> float:
    return float(sum(2**rank for rank in case.members))


def _autograd_rows() -> None:
    for name in ("all_gather_tensor_autograd", "all_gather_single_autograd"):

        @functional(f"fc.{name}", expect=lambda case: (_flat(case), [_weight(case)] * 2))
        def gather(case: Case, name: str = name) -> Value:
            tensor = case.own().requires_grad_()
            return _weighed(case, getattr(fc, name)(tensor, 0, case.handle) + 0, tensor)

    for name in ("reduce_scatter_tensor_autograd", "reduce_scatter_single_autograd"):

        @functional(
            f"fc.{name}",
            expect=lambda case: (
                _scattered_sum(case),
                [float(2**rank) for rank in case.members for _ in range(2)],
            ),
        )
        def scatter(case: Case, name: str = name) -> Value:
            tensor = case.own(2 * case.size).requires_grad_()
            return _weighed(case, getattr(fc, name)(tensor, "sum", 0, case.handle) + 0, tensor)


_autograd_rows()


@functional(
    "fc.all_to_all_single_autograd",
    expect=lambda case: (
        list(itertools.chain(*_exchanged(case))),
        [float(2**rank) for rank in case.members for _ in range(2)],
    ),
)
def fc_all_to_all_single_autograd(case: Case) -> Value:
    tensor = case.own(2 * case.size).requires_grad_()
    sizes = [2] * case.size
    output = fc.all_to_all_single_autograd(tensor, sizes, sizes, case.handle)
    return _weighed(case, output + 0, tensor)


# The forms into which torch.compile turns the functions of torch.distributed.


@functional("fc.all_reduce_inplace", expect=lambda case: case.summed())
def fc_all_reduce_inplace(case: Case) -> Value:
    tensor = case.own()
    fc.all_reduce_inplace(tensor, "sum", case.handle)
    return tensor.tolist()


@functional("fc.all_gather_tensor_inplace", expect=_flat)
def fc_all_gather_tensor_inplace(case: Case) -> Value:
    output = torch.zeros(2 * case.size)
    fc.all_gather_tensor_inplace(output, case.own(), case.handle)
    return output.tolist()


@functional("fc.reduce_scatter_tensor_inplace", expect=_scattered_sum)
def fc_reduce_scatter_tensor_inplace(case: Case) -> Value:
    output = torch.zeros(2)
    fc.reduce_scatter_tensor_inplace(output, case.own(2 * case.size), "sum", case.handle)
    return output.tolist()


@functional("fc.reduce_scatter_inplace", expect=_scattered_sum)
def fc_reduce_scatter_inplace(case: Case) -> Value:
    output = torch.zeros(2)
    parts = list(case.own(2 * case.size).chunk(case.size))
    fc.reduce_scatter_inplace(output, parts, "sum", case.handle)
    return output.tolist()


@functional("fc.all_to_all_inplace", expect=lambda case: list(itertools.chain(*_exchanged(case))))
def fc_all_to_all_inplace(case: Case) -> Value:
    output = torch.zeros(2 * case.size)
    fc.all_to_all_inplace(output, case.own(2 * case.size), group=case.handle)
    return output.tolist()


@functional("fc.all_gather_inplace", expect=lambda case: case.each())
def fc_all_gather_inplace(case: Case) -> Value:
    outputs = [torch.zeros(2) for _ in case.members]
    fc.all_gather_inplace(outputs, case.own(), case.handle)
    return lists(outputs)


@row(
    "fc.isend_inplace",
    "fc.isend_inplace",
    "fc.irecv_inplace",
    expect=_from_previous,
    ways=("object",),
    # Torch 2.13 hands the global rank to an operator that takes the group rank.
    groups=("world",),
)
def fc_isend_inplace(case: Case) -> Value:
    tensor = torch.zeros(2)
    after, before = _ring(case)
    waits = _start_in_ring(
        case,
        lambda: fc.irecv_inplace(tensor, before, 8, case.group),
        lambda: fc.isend_inplace(case.own(), after, 8, case.group),
    )
    for wait in waits:
        fc.wait_tensor(wait)
    return tensor.tolist()


@functional("fc.batch_p2p_ops_inplace", expect=_from_previous)
def fc_batch_p2p_ops_inplace(case: Case) -> Value:
    tensor = torch.zeros(2)
    after, before = (case.index + 1) % case.size, (case.index - 1) % case.size
    waits = fc.batch_p2p_ops_inplace(
        ["isend", "irecv"], [after, before], [9, 9], [case.own(), tensor], case.handle
    )
    for wait in waits:
        fc.wait_tensor(wait)
    return tensor.tolist()


@operator("ops.all_reduce", "ops.all_reduce", "ops.wait_tensor", expect=lambda case: case.summed())
def ops_all_reduce(case: Case) -> Value:
    return OPS.wait_tensor(OPS.all_reduce(case.own(), "sum", case.name)).tolist()


@operator("ops.wait_tensors", expect=lambda case: [case.summed(2), case.summed(3)])
def ops_wait_tensors(case: Case) -> Value:
    outputs = OPS.all_reduce_coalesced([case.own(2), case.own(3)], "sum", case.name)
    return lists(OPS.wait_tensors(outputs))


@operator("ops.all_reduce_", expect=lambda case: case.summed())
def ops_all_reduce_(case: Case) -> Value:
    tensor = case.own()
    OPS.wait_tensor(OPS.all_reduce_(tensor, "sum", case.name))
    return tensor.tolist()


@operator("ops.all_reduce_coalesced", expect=lambda case: [case.summed(2), case.summed(3)])
def ops_all_reduce_coalesced(case: Case) -> Value:
    outputs = OPS.all_reduce_coalesced([case.own(2), case.own(3)], "sum", case.name)
    return lists(OPS.wait_tensor(output) for output in outputs)


@operator("ops.all_reduce_coalesced_", expect=lambda case: [case.summed(2), case.summed(3)])
def ops_all_reduce_coalesced_(case: Case) -> Value:
    tensors = [case.own(2), case.own(3)]
    for output in OPS.all_reduce_coalesced_(tensors, "sum", case.name):
        OPS.wait_tensor(output)
    return lists(tensors)


@operator("ops.all_gather_into_tensor", expect=_flat)
def ops_all_gather_into_tensor(case: Case) -> Value:
    return OPS.wait_tensor(OPS.all_gather_into_tensor(case.own(), case.size, case.name)).tolist()


@operator("ops.all_gather_into_tensor_out", expect=_flat)
def ops_all_gather_into_tensor_out(case: Case) -> Value:
    output = torch.zeros(2 * case.size)
    OPS.wait_tensor(OPS.all_gather_into_tensor_out(case.own(), case.size, case.name, out=output))
    return output.tolist()


@operator(
    "ops.all_gather_into_tensor_coalesced",
    expect=lambda case: [_flat(case, 2), _flat(case, 3)],
)
def ops_all_gather_into_tensor_coalesced(case: Case) -> Value:
    outputs = OPS.all_gather_into_tensor_coalesced([case.own(2), case.own(3)], case.size, case.name)
    return lists(OPS.wait_tensor(output) for output in outputs)


@operator("ops.reduce_scatter_tensor", expect=_scattered_sum)
def ops_reduce_scatter_tensor(case: Case) -> Value:
    tensor = case.own(2 * case.size)
    output = OPS.reduce_scatter_tensor(tensor, "sum", case.size, case.name)
    return OPS.wait_tensor(output).tolist()


@operator("ops.reduce_scatter_tensor_out", expect=_scattered_sum)
def ops_reduce_scatter_tensor_out(case: Case) -> Value:
    output = torch.zeros(2)
    tensor = case.own(2 * case.size)
    OPS.wait_tensor(OPS.reduce_scatter_tensor_out(tensor, "sum", case.size, case.name, out=output))
    return output.tolist()


@operator(
    "ops.reduce_scatter_tensor_coalesced",
    expect=lambda case: [_scattered_sum(case, 2), _scattered_sum(case, 3)],
)
def ops_reduce_scatter_tensor_coalesced(case: Case) -> Value:
    tensors = [case.own(2 * case.size), case.own(3 * case.size)]
    outputs = OPS.reduce_scatter_tensor_coalesced(tensors, "sum", case.size, case.name)
    return lists(OPS.wait_tensor(output) for output in outputs)


@operator("ops.all_to_all_single", expect=_unevenly_exchanged)
def ops_all_to_all_single(case: Case) -> Value:
    got, sent, numbers = _uneven(case, case.index)
    output = OPS.all_to_all_single(torch.tensor(numbers), got, sent, case.name)
    return OPS.wait_tensor(output).tolist()


@operator("ops.broadcast", expect=lambda case: case.numbers(case.root))
def ops_broadcast(case: Case) -> Value:
    return OPS.wait_tensor(OPS.broadcast(case.own(), 1, case.name)).tolist()


@operator("ops.broadcast_", expect=lambda case: case.numbers(case.root))
def ops_broadcast_(case: Case) -> Value:
    tensor = case.own()
    OPS.wait_tensor(OPS.broadcast_(tensor, 1, case.name))
    return tensor.tolist()


@operator("ops.isend", "ops.isend", "ops.irecv", expect=_from_previous)
def ops_isend(case: Case) -> Value:
    tensor = torch.zeros(2)
    after, before = (case.index + 1) % case.size, (case.index - 1) % case.size
    waits = _start_in_ring(
        case,
        lambda: OPS.irecv(tensor, before, 10, case.name),
        lambda: OPS.isend(case.own(), after, 10, case.name),
    )
    for wait in waits:
        OPS.wait_tensor(wait)
    return tensor.tolist()


@operator("ops.batch_p2p_ops", expect=_from_previous)
def ops_batch_p2p_ops(case: Case) -> Value:
    tensor = torch.zeros(2)
    after, before = (case.index + 1) % case.size, (case.index - 1) % case.size
    waits = OPS.batch_p2p_ops(
        ["isend", "irecv"], [after, before], [11, 11], [case.own(), tensor], case.name
    )
    for wait in waits:
        OPS.wait_tensor(wait)
    return tensor.tolist()


@operator(
    "ops_autograd.all_gather_into_tensor",
    expect=lambda case: (_flat(case), [_weight(case)] * 2),
)
def ops_autograd_all_gather(case: Case) -> Value:
    tensor = case.own().requires_grad_()
    output = OPS_AUTOGRAD.all_gather_into_tensor(tensor, case.size, case.name)
    OPS.wait_tensor(output.detach())
    return _weighed(case, output, tensor)


@operator(
    "ops_autograd.reduce_scatter_tensor",
    expect=_scattered_sum,  # the backward of stock torch 2.8 gives zeros: see the fc row for it
)
def ops_autograd_reduce_scatter(case: Case) -> Value:
    tensor = case.own(2 * case.size).requires_grad_()
    output = OPS_AUTOGRAD.reduce_scatter_tensor(tensor, "sum", case.size, case.name)
    return OPS.wait_tensor(output.detach()).tolist()


@operator(
    "ops_autograd.all_to_all_single",
    expect=lambda case: (
        list(itertools.chain(*_exchanged(case))),
        [float(2**rank) for rank in case.members for _ in range(2)],
    ),
)
def ops_autograd_all_to_all(case: Case) -> Value:
    tensor = case.own(2 * case.size).requires_grad_()
    sizes = [2] * case.size
    output = OPS_AUTOGRAD.all_to_all_single(tensor, sizes, sizes, case.name)
    OPS.wait_tensor(output.detach())
    return _weighed(case, output, tensor)


# ---------------------------------------------------------------------------------------------
# torch.distributed.nn.functional: the older autograd forms, as far as stock torch
# has them right on a subgroup


def older(
    name: str, expect: Callable[[Case], Value]
) -> Callable[[Callable[[Case], Value]], Callable[[Case], Value]]:
    return row(name, name, expect=expect, ways=("object",))


@older("nn.all_reduce", lambda case: (case.summed(), [_weight(case)] * 2))
def nn_all_reduce(case: Case) -> Value:
    tensor = case.own().requires_grad_()
    return _weighed(case, dist_nn.all_reduce(tensor, group=_group_of(case)), tensor)


@older("nn.reduce", lambda case: case.summed() if case.is_root else None)
def nn_reduce(case: Case) -> Value:
    output = dist_nn.reduce(case.own(), case.root, group=_group_of(case))
    return output.tolist() if case.is_root else None


@older(
    "nn.reduce_scatter",
    lambda case: (
        _scattered_sum(case),
        [float(2**rank) for rank in case.members for _ in range(2)],
    ),
)
def nn_reduce_scatter(case: Case) -> Value:
    tensor = case.own(2 * case.size).requires_grad_()
    parts = list(tensor.chunk(case.size))
    output = dist_nn.reduce_scatter(torch.zeros(2), parts, group=_group_of(case))
    return _weighed(case, output, tensor)


@older(
    "nn.all_to_all_single",
    lambda case: (
        list(itertools.chain(*_exchanged(case))),
        [float(2**rank) for rank in case.members for _ in range(2)],
    ),
)
def nn_all_to_all_single(case: Case) -> Value:
    tensor = case.own(2 * case.size).requires_grad_()
    output = dist_nn.all_to_all_single(torch.zeros(2 * case.size), tensor, group=_group_of(case))
    return _weighed(case, output, tensor)


# ---------------------------------------------------------------------------------------------
# running the table

Key = tuple[str, str, str, str]
"""Row, way, group, mode."""


@dataclass(frozen=True)
class Outcome:
    """What one row gave on one rank: a value, or the type of the error that it raised."""

    value: Value = None
    error: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()
    expected: Value = None

    @property
    def comparable(self) -> tuple[Value, str, tuple[str, ...]]:
        return self.value, self.error, self.notes


def cases(groups: dict[str, Any], me: int, salt: int) -> Iterator[tuple[Row, Key, Case]]:
    """All that this rank takes part in, in an order that all ranks share.

    Args:
        groups: by name, the group (None means WORLD as the default argument) and its members.
        me: global rank.
        salt: makes the numbers of one stage differ from those of another.
    """
    for item in ROWS.values():
        if item.missing:
            continue
        for way, (label, (group, members)), mode in itertools.product(
            item.ways, groups.items(), item.modes
        ):
            if me in members and label in item.groups:
                case = Case(group, tuple(members), me, way, mode, salt)
                yield item, (item.name, way, label, mode), case


def run_table(groups: dict[str, Any], me: int, salt: int) -> dict[Key, Outcome]:
    """Run every row in every way on every group. Collective over all ranks."""
    return {key: run_row(item, case) for item, key, case in cases(groups, me, salt)}


def run_row(item: Row, case: Case) -> Outcome:
    try:
        value = item.run(case)
    except Exception as error:
        with suppress(IndexError):
            return Outcome(error=type(error).__name__, message=str(error).splitlines()[0], notes=())
        return Outcome(error=type(error).__name__)
    return Outcome(value, notes=tuple(case.notes), expected=item.expect(case))
