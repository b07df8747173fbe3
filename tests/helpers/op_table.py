"""A table of every collective and point-to-point of torch.distributed, with the expected results.

A row is run by all members of a group. Rank ``g`` (global) contributes multiples of ``2**g``, so a
sum identifies the ranks that took part. Results of another group, or of another stage of the same
test, have other values.
"""

from __future__ import annotations

import functools
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
from torch.torch_version import TorchVersion

from helpers import worlds
from helpers.early_bindings import FROM_C10D, FROM_DISTRIBUTED

Value = Any
OPS = torch.ops._c10d_functional
OPS_AUTOGRAD = torch.ops._c10d_functional_autograd

PYTHON_WAYS = ("dist", "alias", "c10d_alias")
"""The lookup of a function of torch.distributed: at the call, or bound before install."""

FUNCTIONAL_WAYS = ("object", "name")
"""The form in which a functional collective takes the group."""


@dataclass
class Case:
    """A call of a row: a group on one of its ranks, and the form of the call."""

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
        """This rank's rank in the group."""
        return self.members.index(self.me)

    @property
    def root(self) -> int:
        """Global rank of the root, the second member, so that rank and group rank differ."""
        return self.members[1]

    @property
    def is_root(self) -> bool:
        return self.me == self.root

    @property
    def is_async(self) -> bool:
        return self.mode == "async"

    @property
    def handle(self) -> Any:
        """The group argument of a functional collective."""
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
        """The contribution of a rank."""
        # Divisible by 3 and 4, so that averages are exact.
        return [float(12 * self.salt * 2**rank + 1200 * k) for k in range(count)]

    def own(self, count: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(self.numbers(self.me, count)).to(dtype)

    def each(self, count: int = 2) -> list[list[float]]:
        return [self.numbers(rank, count) for rank in self.members]

    def summed(self, count: int = 2) -> list[float]:
        return [sum(column) for column in zip(*self.each(count), strict=True)]

    def done(self, result: Any) -> None:
        """Wait for the Work of an asynchronous call; record the type of the result."""
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
        run: calls the operation and returns its result as plain values.
        expect: the expected result on this rank.
        ways: the lookups of the operation or of its group.
        modes: ``sync``, ``async``.
        groups: the groups on which it is run: ``world``, ``sub``.
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
"""NCCL cannot receive from any rank; a rank that sends then waits indefinitely."""

SPACES: dict[str, Any] = {
    "": dist,
    "fc": fc,
    "nn": dist_nn,
    "ops": OPS,
    "ops_autograd": OPS_AUTOGRAD,
}
BOTH = ("sync", "async")


def _has(name: str) -> bool:
    space, _, attribute = name.rpartition(".")
    if space in ("ops", "ops_autograd"):
        namespace = "_c10d_functional" + ("_autograd" if space == "ops_autograd" else "")
        return bool(torch._C._jit_get_schemas_for_operator(f"{namespace}::{attribute}"))
    return hasattr(SPACES[space], attribute)


def row(
    name: str,
    run: Callable[[Case], Value],
    expect: Callable[[Case], Value],
    *covers: str,
    ways: tuple[str, ...] = PYTHON_WAYS,
    modes: tuple[str, ...] = ("sync",),
    groups: tuple[str, ...] = ("world", "sub"),
) -> None:
    """Add a row; by default it covers the function in its name, up to a bracket."""
    names = covers or (name.partition("[")[0],)
    missing = not all(_has(covered) for covered in names)
    missing |= worlds.NCCL and name in HANG_ON_NCCL
    ROWS[name] = Row(name, names, run, expect, ways, modes, groups, missing)


def plain(value: Any) -> Value:
    """Convert tensors in nested sequences to lists of numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


# -- expected results -----------------------------------------------------------------------------


def summed(case: Case) -> Value:
    return case.summed()


def two_sums(case: Case) -> Value:
    return [case.summed(2), case.summed(3)]


def average(case: Case) -> Value:
    return [total / case.size for total in case.summed()]


def each(case: Case) -> Value:
    return case.each()


def flat(case: Case, count: int = 2) -> Value:
    return list(itertools.chain(*case.each(count)))


def two_flat(case: Case) -> Value:
    return [flat(case, 2), flat(case, 3)]


def part(case: Case, count: int = 2) -> Value:
    """This rank's shard of the sums."""
    total = case.summed(count * case.size)
    return total[count * case.index : count * (case.index + 1)]


def two_parts(case: Case) -> Value:
    return [part(case, 2), part(case, 3)]


def own_part(case: Case) -> Value:
    return case.numbers(case.me)


def of_root(case: Case) -> Value:
    return case.numbers(case.root)


def passed(case: Case) -> Value:
    return "passed"


def at_root(expect: Callable[[Case], Value]) -> Callable[[Case], Value]:
    return lambda case: expect(case) if case.is_root else None


def exchanged(case: Case) -> Value:
    """The result on this rank when every member sends its i-th pair of numbers to member i."""
    pairs = [case.numbers(rank, 2 * case.size) for rank in case.members]
    return [pair[2 * case.index : 2 * case.index + 2] for pair in pairs]


def flat_exchanged(case: Case) -> Value:
    return list(itertools.chain(*exchanged(case)))


def sizes(case: Case, index: int) -> list[int]:
    """The split sizes of a member: i + j + 1 numbers from i to j."""
    return [index + other + 1 for other in range(case.size)]


def uneven(case: Case) -> torch.Tensor:
    return torch.tensor(case.numbers(case.me, sum(sizes(case, case.index))))


def unevenly_exchanged(case: Case) -> Value:
    found: list[float] = []
    for index, rank in enumerate(case.members):
        split = sizes(case, index)
        start = sum(split[: case.index])
        found += case.numbers(rank, sum(split))[start : start + split[case.index]]
    return found


def ring(case: Case) -> tuple[int, int]:
    """Global ranks of the next and of the previous member."""
    after, before = group_ring(case)
    return case.members[after], case.members[before]


def group_ring(case: Case) -> tuple[int, int]:
    """Group ranks of the next and of the previous member."""
    return (case.index + 1) % case.size, (case.index - 1) % case.size


def previous(case: Case) -> Value:
    return case.numbers(ring(case)[1])


def from_others(case: Case) -> Value:
    others = [rank for rank in case.members if rank != case.root]
    return sorted((rank, case.numbers(rank)) for rank in others)


def folded(function: Callable[[Any, Any], Any]) -> Callable[[Case], Value]:
    def expect(case: Case) -> Value:
        columns = zip(*case.each(), strict=True)
        return [functools.reduce(function, column) for column in columns]

    return expect


def weighted(expect: Callable[[Case], Value], gradient: Callable[[Case], Value]) -> Any:
    """A result, and the gradient if each rank weights its result by its own power of two.

    The gradient identifies the ranks that contributed to it.
    """
    return lambda case: (expect(case), gradient(case))


def all_weights(case: Case) -> Value:
    return [float(sum(2**rank for rank in case.members))] * 2


def each_weight(case: Case) -> Value:
    return [float(2**rank) for rank in case.members for _ in range(2)]


# -- functions of torch.distributed ---------------------------------------------------------------


def zeros(*sizes: int) -> Callable[[Case], torch.Tensor]:
    """A tensor to fill; a negative size is multiplied by the number of members."""
    return lambda case: torch.zeros(*(-size * case.size if size < 0 else size for size in sizes))


def many(make: Callable[[Case], Any]) -> Callable[[Case], list[Any]]:
    return lambda case: [make(case) for _ in case.members]


def own(case: Case) -> torch.Tensor:
    return case.own()


def twice(case: Case) -> list[torch.Tensor]:
    return [case.own(2), case.own(3)]


def parts(case: Case) -> torch.Tensor:
    """Numbers of this rank for each member."""
    return case.own(2 * case.size)


def chunks(case: Case) -> list[torch.Tensor]:
    return [chunk.clone() for chunk in parts(case).chunk(case.size)]


def collective(
    name: str,
    make: Callable[[Case], Any],
    call: Callable[..., Any],
    expect: Callable[[Case], Value],
    *,
    modes: tuple[str, ...] = BOTH,
    root: bool = False,
    all_make: bool = False,
) -> None:
    """Add a collective that fills the tensors or objects of ``make``.

    Args:
        name: of the row.
        make: creates what the collective fills.
        call: called with the function, the case, the object to fill, and keyword arguments.
        expect: the expected content.
        modes: as of a row.
        root: whether only the root has a result; that of the others is None.
        all_make: whether the others also need ``make``.
    """
    function = name.partition("[")[0]

    def run(case: Case) -> Value:
        filled = make(case) if case.is_root or not root or all_make else None
        how = {"async_op": case.is_async} if modes is BOTH else {}
        result = call(case.fn(function), case, filled, {"group": case.group, **how})
        if modes is BOTH:
            case.done(result)
        return plain(filled) if case.is_root or not root else None

    row(name, run, at_root(expect) if root else expect, modes=modes)


REDUCTIONS: dict[str, tuple[torch.dtype, Callable[[Case], Value]]] = {
    "SUM": (torch.float32, summed),
    "AVG": (torch.float32, average),
    "PRODUCT": (torch.float64, folded(lambda a, b: a * b)),
    "MIN": (torch.float32, folded(min)),
    "MAX": (torch.float32, folded(max)),
    "BAND": (torch.int64, folded(lambda a, b: int(a) & int(b))),
    "BOR": (torch.int64, folded(lambda a, b: int(a) | int(b))),
    "BXOR": (torch.int64, folded(lambda a, b: int(a) ^ int(b))),
}
for _op, (_dtype, _expect) in REDUCTIONS.items():
    collective(
        f"all_reduce[{_op}]",
        lambda c, dtype=_dtype: c.own(dtype=dtype),
        lambda f, c, t, k, op=_op: f(t, getattr(dist.ReduceOp, op), **k),
        _expect,
    )
collective(
    "all_reduce[complex]",
    lambda c: c.own().to(torch.complex64) * 1j,
    lambda f, c, t, k: f(t, **k),
    lambda c: [complex(0, total) for total in c.summed()],
)
collective(
    "all_reduce[large]",
    lambda c: torch.full((1 << 15,), c.salt * 2**c.me, dtype=torch.int64),
    lambda f, c, t, k: f(t, **k),
    lambda c: [sum(c.salt * 2**rank for rank in c.members)] * (1 << 15),
)
collective("all_reduce_coalesced", twice, lambda f, c, t, k: f(t, **k), two_sums)
collective("reduce", own, lambda f, c, t, k: f(t, c.root, **k), summed, root=True, all_make=True)
collective(
    "reduce[group_dst]",
    own,
    lambda f, c, t, k: f(t, group_dst=1, **k),
    summed,
    root=True,
    all_make=True,
)
collective("broadcast", own, lambda f, c, t, k: f(t, c.root, **k), of_root)
collective(
    "broadcast[group_src]",
    own,
    lambda f, c, t, k: f(t, group_src=c.size - 1, **k),
    lambda c: c.numbers(c.members[-1]),
)
collective("all_gather", many(zeros(2)), lambda f, c, t, k: f(t, c.own(), **k), each)
for _name in ("all_gather_into_tensor", "_all_gather_base", "all_gather_single"):
    collective(_name, zeros(-2), lambda f, c, t, k: f(t, c.own(), **k), flat)
collective(
    "all_gather_into_tensor[stack]",
    lambda c: torch.zeros(c.size, 2),
    lambda f, c, t, k: f(t, c.own(), **k),
    each,
)
collective(
    "all_gather_coalesced",
    many(lambda c: [torch.zeros(2), torch.zeros(3)]),
    lambda f, c, t, k: f(t, twice(c), **k),
    lambda c: [[a, b] for a, b in zip(c.each(2), c.each(3), strict=True)],
)
collective("gather", many(zeros(2)), lambda f, c, t, k: f(c.own(), t, c.root, **k), each, root=True)
for _name in ("gather_into_tensor", "gather_single"):
    collective(_name, zeros(-2), lambda f, c, t, k: f(c.own(), t, dst=c.root, **k), flat, root=True)
collective(
    "scatter",
    zeros(2),
    lambda f, c, t, k: f(t, [*map(torch.tensor, c.each())] if c.is_root else None, c.root, **k),
    own_part,
)
collective("reduce_scatter", zeros(2), lambda f, c, t, k: f(t, chunks(c), **k), part)
for _name in ("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"):
    collective(_name, zeros(2), lambda f, c, t, k: f(t, parts(c), **k), part)
collective("all_to_all", many(zeros(2)), lambda f, c, t, k: f(t, chunks(c), **k), exchanged)
collective("all_to_all_single", zeros(-2), lambda f, c, t, k: f(t, parts(c), **k), flat_exchanged)
collective(
    "all_to_all_single[uneven]",
    lambda c: torch.zeros(sum(sizes(c, c.index))),
    lambda f, c, t, k: f(t, uneven(c), sizes(c, c.index), sizes(c, c.index), **k),
    unevenly_exchanged,
)
collective("barrier", passed, lambda f, c, t, k: f(**k), passed)
for _all in (False, True):
    collective(
        f"monitored_barrier[wait_all_ranks={_all}]",
        passed,
        lambda f, c, t, k, all_ranks=_all: c.done(
            f(timeout=timedelta(seconds=20), wait_all_ranks=all_ranks, **k)
        ),
        passed,
        modes=("sync",),
    )

collective(
    "all_gather_object",
    lambda c: [None] * c.size,
    lambda f, c, t, k: f(t, {"rank": c.me, "salt": c.salt}, **k),
    lambda c: [{"rank": rank, "salt": c.salt} for rank in c.members],
    modes=("sync",),
)
collective(
    "gather_object",
    lambda c: [None] * c.size,
    lambda f, c, t, k: f(("from", c.me, c.salt), t, c.root, **k),
    lambda c: [("from", rank, c.salt) for rank in c.members],
    modes=("sync",),
    root=True,
)
collective(
    "scatter_object_list",
    lambda c: [None],
    lambda f, c, t, k: f(
        t, [("to", rank, c.salt) for rank in c.members] if c.is_root else None, c.root, **k
    ),
    lambda c: [("to", c.me, c.salt)],
    modes=("sync",),
)
collective(
    "broadcast_object_list",
    lambda c: [("root", c.me), c.salt if c.is_root else None],
    lambda f, c, t, k: f(t, c.root, **k),
    lambda c: [("root", c.root), c.salt],
    modes=("sync",),
)


# -- point to point -------------------------------------------------------------------------------


def _send_object_list(case: Case) -> Value:
    if case.index == 0:
        for index in range(1, case.size):
            objects = [("hop", index), case.salt]
            case.fn("send_object_list")(objects, case.members[index], case.group)
        return None
    received: list[Any] = [None, None]
    return case.fn("recv_object_list")(received, case.members[0], case.group), received


row(
    "send_object_list",
    _send_object_list,
    lambda c: None if c.index == 0 else (c.members[0], [("hop", c.index), c.salt]),
    "send_object_list",
    "recv_object_list",
)


def _send_recv(case: Case) -> Value:
    (after, before), tensor = ring(case), torch.zeros(2)

    def send() -> None:
        case.done(case.fn("send")(case.own(), after, case.group, tag=3))

    if case.index == 0:
        send()
    source = case.fn("recv")(tensor, before, case.group, tag=3)
    if case.index != 0:
        send()
    return source, tensor.tolist()


row("send, recv", _send_recv, lambda c: (ring(c)[1], previous(c)), "send", "recv")


def in_ring(
    case: Case,
    receive: Callable[[torch.Tensor], Any],
    send: Callable[[torch.Tensor], Any],
    wait: Callable[[Any], object],
) -> Value:
    """Start both, then wait for both; the first member sends first.

    If the group is bound to a device, its NCCL operations run on one stream in the order of the
    calls, so members that all receive first would deadlock.
    """
    tensor = torch.zeros(2)
    starts = [(receive, tensor), (send, case.own())]
    works = [start(given) for start, given in (starts[::-1] if case.index == 0 else starts)]
    for work in works:
        wait(work)
    return tensor.tolist()


row(
    "isend, irecv",
    lambda c: in_ring(
        c,
        lambda t: c.fn("irecv")(t, ring(c)[1], c.group, tag=4),
        lambda t: c.fn("isend")(t, ring(c)[0], c.group, tag=4),
        c.done,
    ),
    previous,
    "isend",
    "irecv",
    modes=("async",),
)
row(
    "isend, irecv[group ranks]",
    lambda c: in_ring(
        c,
        lambda t: c.fn("irecv")(t, group=c.group, group_src=group_ring(c)[1]),
        lambda t: c.fn("isend")(t, group=c.group, group_dst=group_ring(c)[0]),
        c.done,
    ),
    previous,
    "isend",
    "irecv",
    modes=("async",),
)


def from_any(case: Case) -> Value:
    send, receive = ("isend", "irecv") if case.is_async else ("send", "recv")
    tag, found = 6 if case.is_async else 5, []
    if not case.is_root:
        result = case.fn(send)(case.own(), case.root, case.group, tag=tag)
        if case.is_async:
            case.done(result)
    for _ in range(case.size - 1 if case.is_root else 0):
        tensor = torch.zeros(2)
        source = case.fn(receive)(tensor, None, case.group, tag=tag)
        if case.is_async:
            case.done(source)
        found.append(tensor.tolist() if case.is_async else (source, tensor.tolist()))
    dist.barrier(case.group)  # this case must not receive a message of the next one
    return sorted(found) if case.is_root else None


row("recv[any source]", from_any, at_root(from_others), "recv", "send")
row(
    "irecv[any source]",
    from_any,
    at_root(lambda c: sorted(numbers for _, numbers in from_others(c))),
    "irecv",
    "isend",
    modes=("async",),
)


def batched(case: Case, *partial: str) -> Value:
    """A batch with a send and a receive, or with one of them."""
    (after, before), tensor = ring(case), torch.zeros(2)
    batch = [
        dist.P2POp(case.fn("isend"), case.own(), after, case.group, tag=7),
        dist.P2POp(case.fn("irecv"), tensor, before, case.group, tag=7),
    ]
    if partial:
        batch = [one for one in batch if one.op.__name__ in partial]
    for work in case.fn("batch_isend_irecv")(batch):
        case.done(work)
    return tensor.tolist()


def partly_batched(case: Case) -> Value:
    """Only two of the members take part, which may be the first operation on a rebuilt group."""
    if case.index > 1:
        return None
    received = batched(case, ("isend", "irecv")[case.index])
    return received if case.index == 1 else None


row("batch_isend_irecv", batched, previous, modes=("async",))
row(
    "batch_isend_irecv[partial]",
    partly_batched,
    lambda c: c.numbers(c.members[0]) if c.index == 1 else None,
    modes=("async",),
)


def group_of(case: Case) -> Any:
    return dist.group.WORLD if case.group is None else case.group


Coalesced = tuple[Callable[[Case, int], torch.Tensor], Callable[..., Any], Callable[[Case], Value]]
COALESCED: dict[str, Coalesced] = {
    "all_reduce": (lambda c, n: c.own(n), lambda f, c, t, n: f(t, group=c.group), two_sums),
    "all_gather_into_tensor": (
        lambda c, n: torch.zeros(n * c.size),
        lambda f, c, t, n: f(t, c.own(n), c.group),
        two_flat,
    ),
    "reduce_scatter_tensor": (
        lambda c, n: torch.zeros(n),
        lambda f, c, t, n: f(t, c.own(n * c.size), group=c.group),
        two_parts,
    ),
}


def coalesced(case: Case, name: str, device: str | None) -> Value:
    make, call, _ = COALESCED[name]
    kwargs = {"device": torch.device(device)} if device else {}
    filled = {count: make(case, count) for count in (2, 3)}
    try:
        manager = case.fn("_coalescing_manager")(case.group, async_ops=case.is_async, **kwargs)
        with manager as works:
            for count, tensor in filled.items():
                call(case.fn(name), case, tensor, count)
    except RuntimeError:
        # If the backend cannot coalesce, torch leaves the group in its table of coalescing
        # groups, and silently postpones every later all_reduce of the group.
        dist.distributed_c10d._world.pg_coalesce_state.pop(group_of(case), None)
        raise
    if case.is_async:
        works.wait()
    return plain([*filled.values()])


for _name, _device in itertools.product(COALESCED, (None, "cpu")):
    row(
        f"_coalescing_manager[{_name}, device={_device}]",
        functools.partial(coalesced, name=_name, device=_device),
        COALESCED[_name][2],
        "_coalescing_manager",
        _name,
        modes=BOTH,
    )


# -- functional collectives, and the operators by name --------------------------------------------


def functional(
    name: str,
    call: Callable[[Any, Case], Any],
    expect: Callable[[Case], Value],
    *covers: str,
) -> None:
    """Add a function of ``fc``, or an operator; if it returns tensors, they are waited for."""
    space, _, attribute = name.partition("[")[0].rpartition(".")

    def waited(found: Any) -> Any:
        if isinstance(found, list):
            return [waited(one) for one in found]
        wait = fc.wait_tensor if space == "fc" else OPS.wait_tensor
        return wait(found) if isinstance(found, torch.Tensor) else found

    def run(case: Case) -> Value:
        return plain(waited(call(getattr(SPACES[space], attribute), case)))

    row(name, run, expect, *covers, ways=FUNCTIONAL_WAYS if space == "fc" else ("name",))


def gradient(case: Case, tensor: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> Value:
    """A result, and the gradient of its sum, which each rank weighs: see :func:`weighted`."""
    output = call(tensor.requires_grad_())
    if case.way == "name":
        OPS.wait_tensor(output.detach())
    # Not backward(): it may copy a gradient that is not complete (seen on torch 2.8).
    (found,) = torch.autograd.grad((output * float(2**case.me)).sum(), tensor)
    return output.detach().tolist(), fc.wait_tensor(found).tolist()


def filled(tensors: Any, call: Callable[[Any], object]) -> Any:
    """Tensors that a call has filled."""
    call(tensors)
    return tensors


functional("fc.all_reduce", lambda f, c: f(c.own(), "sum", c.handle), summed)
functional("fc.all_reduce[implicit wait]", lambda f, c: f(c.own(), "sum", c.handle) + 0, summed)
functional("fc.all_reduce[ranks]", lambda f, c: f(c.own(), "sum", [*c.members]) + 0, summed)
functional("fc.all_reduce[avg]", lambda f, c: f(c.own(), "avg", c.handle), average)
functional("fc.all_reduce_coalesced", lambda f, c: f(twice(c), "sum", c.handle), two_sums)
for _name in ("all_gather_tensor", "all_gather_single"):
    functional(f"fc.{_name}", lambda f, c: f(c.own(), 0, c.handle), flat)
    functional(
        f"fc.{_name}_autograd",
        lambda f, c: gradient(c, c.own(), lambda t: f(t, 0, c.handle) + 0),
        weighted(flat, all_weights),
    )
for _name in ("all_gather_into_tensor_coalesced", "all_gather_single_coalesced"):
    functional(f"fc.{_name}", lambda f, c: f(twice(c), c.handle), two_flat)
for _name in ("reduce_scatter_tensor", "reduce_scatter_single"):
    functional(f"fc.{_name}", lambda f, c: f(parts(c), "sum", 0, c.handle), part)
    functional(
        f"fc.{_name}_coalesced",
        lambda f, c: f([parts(c), c.own(3 * c.size)], "sum", [0, 0], c.handle),
        two_parts,
    )
    functional(
        f"fc.{_name}_autograd",
        lambda f, c: gradient(c, parts(c), lambda t: f(t, "sum", 0, c.handle) + 0),
        weighted(part, each_weight),
    )
functional(
    "fc.all_gather_tensor[dim 1]",
    lambda f, c: f(c.own().view(2, 1), 1, c.handle) + 0,
    lambda c: [[numbers[k] for numbers in c.each()] for k in (0, 1)],
)
functional("fc.all_to_all_single", lambda f, c: f(parts(c), None, None, c.handle), flat_exchanged)
functional(
    "fc.all_to_all_single[uneven]",
    lambda f, c: f(uneven(c), sizes(c, c.index), sizes(c, c.index), c.handle),
    unevenly_exchanged,
)
functional("fc.broadcast", lambda f, c: f(c.own(), 1, c.handle), of_root)
functional(
    "fc.permute_tensor",
    lambda f, c: f(c.own(), [(index + 1) % c.size for index in range(c.size)], c.handle),
    previous,
)
functional(
    "fc.all_to_all_single_autograd",
    lambda f, c: gradient(c, parts(c), lambda t: f(t, [2] * c.size, [2] * c.size, c.handle) + 0),
    weighted(flat_exchanged, each_weight),
)

# The forms into which torch.compile rewrites functions of torch.distributed.
functional(
    "fc.all_reduce_inplace", lambda f, c: filled(c.own(), lambda t: f(t, "sum", c.handle)), summed
)
functional(
    "fc.all_gather_tensor_inplace",
    lambda f, c: filled(zeros(-2)(c), lambda t: f(t, c.own(), c.handle)),
    flat,
)
functional(
    "fc.reduce_scatter_tensor_inplace",
    lambda f, c: filled(torch.zeros(2), lambda t: f(t, parts(c), "sum", c.handle)),
    part,
)
functional(
    "fc.reduce_scatter_inplace",
    lambda f, c: filled(torch.zeros(2), lambda t: f(t, chunks(c), "sum", c.handle)),
    part,
)
functional(
    "fc.all_to_all_inplace",
    lambda f, c: filled(zeros(-2)(c), lambda t: f(t, parts(c), group=c.handle)),
    flat_exchanged,
)
functional(
    "fc.all_gather_inplace",
    lambda f, c: filled(many(zeros(2))(c), lambda t: f(t, c.own(), c.handle)),
    each,
)
row(
    "fc.isend_inplace",
    lambda c: in_ring(
        c,
        lambda t: fc.irecv_inplace(t, ring(c)[1], 8, c.group),
        lambda t: fc.isend_inplace(t, ring(c)[0], 8, c.group),
        fc.wait_tensor,
    ),
    previous,
    "fc.isend_inplace",
    "fc.irecv_inplace",
    ways=("object",),
    # Torch 2.13 passes the global rank to an operator that takes the group rank.
    groups=("world",),
)


def p2p_batch(function: Any, case: Case, tag: int) -> Value:
    tensor = torch.zeros(2)
    tensors, peers = [case.own(), tensor], [*group_ring(case)]
    for work in function(["isend", "irecv"], peers, [tag, tag], tensors, case.handle):
        fc.wait_tensor(work)
    return tensor.tolist()


functional("fc.batch_p2p_ops_inplace", lambda f, c: p2p_batch(f, c, 9), previous)
functional("ops.batch_p2p_ops", lambda f, c: p2p_batch(f, c, 11), previous)
row(
    "ops.isend",
    lambda c: in_ring(
        c,
        lambda t: OPS.irecv(t, group_ring(c)[1], 10, c.name),
        lambda t: OPS.isend(t, group_ring(c)[0], 10, c.name),
        OPS.wait_tensor,
    ),
    previous,
    "ops.isend",
    "ops.irecv",
    ways=("name",),
)

functional(
    "ops.all_reduce",
    lambda f, c: f(c.own(), "sum", c.name),
    summed,
    "ops.all_reduce",
    "ops.wait_tensor",
)
functional(
    "ops.wait_tensors", lambda f, c: f(OPS.all_reduce_coalesced(twice(c), "sum", c.name)), two_sums
)
functional(
    "ops.all_reduce_",
    lambda f, c: filled(c.own(), lambda t: OPS.wait_tensor(f(t, "sum", c.name))),
    summed,
)
functional("ops.all_reduce_coalesced", lambda f, c: f(twice(c), "sum", c.name), two_sums)
functional("ops.all_reduce_coalesced_", lambda f, c: f(twice(c), "sum", c.name), two_sums)
functional("ops.all_gather_into_tensor", lambda f, c: f(c.own(), c.size, c.name), flat)
functional(
    "ops.all_gather_into_tensor_out",
    lambda f, c: f(c.own(), c.size, c.name, out=zeros(-2)(c)),
    flat,
)
functional(
    "ops.all_gather_into_tensor_coalesced", lambda f, c: f(twice(c), c.size, c.name), two_flat
)
functional("ops.reduce_scatter_tensor", lambda f, c: f(parts(c), "sum", c.size, c.name), part)
functional(
    "ops.reduce_scatter_tensor_out",
    lambda f, c: f(parts(c), "sum", c.size, c.name, out=torch.zeros(2)),
    part,
)
functional(
    "ops.reduce_scatter_tensor_coalesced",
    lambda f, c: f([parts(c), c.own(3 * c.size)], "sum", c.size, c.name),
    two_parts,
)
functional(
    "ops.all_to_all_single",
    lambda f, c: f(uneven(c), sizes(c, c.index), sizes(c, c.index), c.name),
    unevenly_exchanged,
)
functional("ops.broadcast", lambda f, c: f(c.own(), 1, c.name), of_root)
functional(
    "ops.broadcast_",
    lambda f, c: filled(c.own(), lambda t: OPS.wait_tensor(f(t, 1, c.name))),
    of_root,
)
functional(
    "ops_autograd.all_gather_into_tensor",
    lambda f, c: gradient(c, c.own(), lambda t: f(t, c.size, c.name)),
    weighted(flat, all_weights),
)
functional(
    "ops_autograd.reduce_scatter_tensor",
    lambda f, c: f(parts(c).requires_grad_(), "sum", c.size, c.name).detach(),
    part,  # the backward of torch 2.8 returns zeros: see the fc row
)
functional(
    "ops_autograd.all_to_all_single",
    lambda f, c: gradient(c, parts(c), lambda t: f(t, [2] * c.size, [2] * c.size, c.name)),
    weighted(flat_exchanged, each_weight),
)


# -- torch.distributed.nn.functional: the older autograd forms that torch supports on subgroups ---


def older(
    name: str, call: Callable[[Any, Case, dict[str, Any]], Value], expect: Callable[[Case], Value]
) -> None:
    function = getattr(dist_nn, name, None)
    row(
        f"nn.{name}",
        lambda c: call(function, c, {"group": group_of(c)}),
        expect,
        ways=("object",),
    )


def _reduced(function: Any, case: Case, how: dict[str, Any]) -> Value:
    output = function(case.own(), case.root, **how)
    return output.tolist() if case.is_root else None


older(
    "all_reduce",
    lambda f, c, k: gradient(c, c.own(), lambda t: f(t, **k)),
    weighted(summed, all_weights),
)
older("reduce", _reduced, at_root(summed))
older(
    "reduce_scatter",
    lambda f, c, k: gradient(c, parts(c), lambda t: f(torch.zeros(2), [*t.chunk(c.size)], **k)),
    weighted(part, each_weight),
)
older(
    "all_to_all_single",
    lambda f, c, k: gradient(c, parts(c), lambda t: f(zeros(-2)(c), t, **k)),
    weighted(flat_exchanged, each_weight),
)


# -- running the table ----------------------------------------------------------------------------

Key = tuple[str, str, str, str]
"""Row, way, group, mode."""


@dataclass(frozen=True)
class Outcome:
    """The result of a row on one rank: a value, or the type of its error."""

    value: Value = None
    error: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()
    expected: Value = None


UNSUPPORTED_BY_NCCL = {
    *(f"all_reduce[{op}]" for op in ("BAND", "BOR", "BXOR")),
    *(f"monitored_barrier[wait_all_ranks={value}]" for value in (False, True)),
    *(name for name in ROWS if "device=cpu" in name),
    "all_gather_coalesced",
    "fc.permute_tensor",  # takes no group name
    "gather_into_tensor",
    "gather_single",
}
"""Rows that stock torch refuses on NCCL."""


def asks_for_backend(name: str) -> bool:
    """Whether the operator of a row asks the C++ object of the group for its backend itself.

    A proxy's has none to give (torch cannot swap it), so it raises. Strictly expected, so that a
    torch whose operator goes through a method of the group is noticed.
    """
    if name == "ops.all_gather_into_tensor_out":
        return bool(TorchVersion(torch.__version__) < "2.15")
    return name in ("ops.batch_p2p_ops", "fc.batch_p2p_ops_inplace")


def cases(groups: dict[str, Any], me: int, salt: int) -> Iterator[tuple[Row, Key, Case]]:
    """Yield the cases in which this rank takes part, in the same order on all ranks.

    Args:
        groups: by name, the group (None means WORLD as the default argument) and its members.
        me: global rank.
        salt: distinguishes the numbers of the stages.
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
    """Run every row with each lookup on each group. Collective over all ranks."""
    return {key: run_row(item, case) for item, key, case in cases(groups, me, salt)}


def run_row(item: Row, case: Case) -> Outcome:
    try:
        value = item.run(case)
    except Exception as error:
        with suppress(IndexError):
            return Outcome(error=type(error).__name__, message=str(error).splitlines()[0], notes=())
        return Outcome(error=type(error).__name__)
    return Outcome(value, notes=tuple(case.notes), expected=item.expect(case))
