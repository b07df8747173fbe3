"""A table of every collective and point-to-point of torch.distributed, each with a way to call it.

A row is run by all members of a group. Rank ``g`` (global) contributes multiples of ``2**g``, so a
sum identifies the ranks that took part. Expected are the results of stock torch, or of gloo.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.torch_version import TorchVersion

from helpers import worlds

OPS = torch.ops._c10d_functional

BOTH = ("sync", "async")


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
    def object(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    @property
    def name(self) -> str:
        return str(self.object.group_name)

    @property
    def handle(self) -> Any:
        """The group argument of a functional collective."""
        return self.name if self.way == "name" else self.object

    @property
    def group_ring(self) -> tuple[int, int]:
        """Group ranks of the next and of the previous member."""
        return (self.index + 1) % self.size, (self.index - 1) % self.size

    @property
    def ring(self) -> tuple[int, int]:
        """Their global ranks."""
        after, before = self.group_ring
        return self.members[after], self.members[before]

    @property
    def splits(self) -> list[int]:
        """The uneven split sizes of this member: i + j + 1 numbers from i to j."""
        return [self.index + other + 1 for other in range(self.size)]

    def own(self, count: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The contribution of this rank."""
        # Divisible by 3 and 4, so that averages are exact.
        return (12.0 * self.salt * 2**self.me + 1200 * torch.arange(count)).to(dtype)

    def parts(self) -> torch.Tensor:
        """Numbers of this rank for each member."""
        return self.own(2 * self.size)

    def uneven(self) -> torch.Tensor:
        return self.own(sum(self.splits))

    def chunks(self) -> list[torch.Tensor]:
        return [chunk.clone() for chunk in self.parts().chunk(self.size)]

    def twice(self) -> list[torch.Tensor]:
        return [self.own(2), self.own(3)]

    def pair(self) -> torch.Tensor:
        """Room for two numbers."""
        return torch.zeros(2)

    def flat(self) -> torch.Tensor:
        """Room for two numbers of each member."""
        return torch.zeros(2 * self.size)

    def many(self) -> list[torch.Tensor]:
        return [torch.zeros(2) for _ in self.members]

    def empty(self) -> list[None]:
        """Room for an object of each member."""
        return [None] * self.size

    def at_root(self, value: Any) -> Any:
        return value if self.is_root else None

    def done(self, result: Any) -> None:
        """Wait for the Work of an asynchronous call; record the type of the result."""
        kind = "Work" if isinstance(result, dist.Work) else type(result).__name__
        self.notes.append(f"{self.mode} gives {kind}")
        if self.is_async:
            result.wait()


@dataclass(frozen=True)
class Row:
    """One way to use one operation.

    Attributes:
        name: name of the row.
        covers: public names that the row calls.
        run: calls the operation and returns its result as plain values.
        ways: the forms in which the operation takes its group.
        modes: ``sync``, ``async``.
        groups: the groups on which it is run: ``world``, ``sub``.
        missing: whether the installed torch, or the backend, lacks one of the functions.
    """

    name: str
    covers: tuple[str, ...]
    run: Callable[[Case], Any]
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
    "ops": OPS,
    "ops_autograd": torch.ops._c10d_functional_autograd,
}


def _has(name: str) -> bool:
    space, _, attribute = name.rpartition(".")
    if space in ("ops", "ops_autograd"):
        namespace = "_c10d_functional" + ("_autograd" if space == "ops_autograd" else "")
        return bool(torch._C._jit_get_schemas_for_operator(f"{namespace}::{attribute}"))
    return hasattr(SPACES[space], attribute)


def row(
    name: str,
    run: Callable[[Case], Any],
    *covers: str,
    ways: tuple[str, ...] = ("object",),
    modes: tuple[str, ...] = ("sync",),
    groups: tuple[str, ...] = ("world", "sub"),
) -> None:
    """Add a row; by default it covers the function in its name, up to a bracket."""
    names = covers or (name.partition("[")[0],)
    missing = not all(map(_has, names)) or (worlds.NCCL and name in HANG_ON_NCCL)
    ROWS[name] = Row(name, names, run, ways, modes, groups, missing)


def plain(value: Any) -> Any:
    """Convert tensors in nested sequences to lists of numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


# -- functions of torch.distributed ---------------------------------------------------------------

Filled = tuple[Callable[[Case], Any], Callable[[Case, Any], tuple[Any, ...]]]
"""A function that makes what a call fills, and one that gives the arguments of the call."""

COLLECTIVES: dict[str, Filled] = {
    "all_reduce[complex]": (lambda c: c.own() * 1j, lambda c, t: (t,)),
    "all_reduce_coalesced": (Case.twice, lambda c, t: (t,)),
    "reduce": (Case.own, lambda c, t: (t, c.root)),
    "broadcast": (Case.own, lambda c, t: (t, c.root)),
    "all_gather": (Case.many, lambda c, t: (t, c.own())),
    "all_gather_into_tensor": (Case.flat, lambda c, t: (t, c.own())),
    "_all_gather_base": (Case.flat, lambda c, t: (t, c.own())),
    "all_gather_single": (Case.flat, lambda c, t: (t, c.own())),
    "all_gather_coalesced": (
        lambda c: [[torch.zeros(2), torch.zeros(3)] for _ in c.members],
        lambda c, t: (t, c.twice()),
    ),
    "gather": (Case.many, lambda c, t: (c.own(), c.at_root(t), c.root)),
    "gather_into_tensor": (Case.flat, lambda c, t: (c.own(), c.at_root(t), c.root)),
    "gather_single": (Case.flat, lambda c, t: (c.own(), c.at_root(t), c.root)),
    "scatter": (Case.pair, lambda c, t: (t, c.at_root(c.chunks()), c.root)),
    "reduce_scatter": (Case.pair, lambda c, t: (t, c.chunks())),
    "reduce_scatter_tensor": (Case.pair, lambda c, t: (t, c.parts())),
    "_reduce_scatter_base": (Case.pair, lambda c, t: (t, c.parts())),
    "reduce_scatter_single": (Case.pair, lambda c, t: (t, c.parts())),
    "all_to_all": (Case.many, lambda c, t: (t, c.chunks())),
    "all_to_all_single": (Case.flat, lambda c, t: (t, c.parts())),
    "all_to_all_single[uneven]": (
        lambda c: torch.zeros(sum(c.splits)),
        lambda c, t: (t, c.uneven(), c.splits, c.splits),
    ),
}
"""Functions that take ``async_op``."""

OBJECTS: dict[str, Filled] = {
    "all_gather_object": (Case.empty, lambda c, t: (t, {"rank": c.me, "salt": c.salt})),
    "gather_object": (Case.empty, lambda c, t: ((c.me, c.salt), c.at_root(t), c.root)),
    "scatter_object_list": (
        lambda c: [None],
        lambda c, t: (t, c.at_root([(rank, c.salt) for rank in c.members]), c.root),
    ),
    "broadcast_object_list": (lambda c: [c.me, c.at_root(c.salt)], lambda c, t: (t, c.root)),
}


def collective(name: str, make: Callable[[Case], Any], arguments: Any, **given: Any) -> None:
    """Add a collective that fills the tensors or objects of ``make``; as a reduction only the
    root's are defined.
    """
    function = name.partition("[")[0]
    takes_async = function not in OBJECTS

    def run(case: Case) -> Any:
        value = make(case)
        how = {"async_op": case.is_async} if takes_async else {}
        result = getattr(dist, function)(*arguments(case, value), group=case.group, **how, **given)
        if takes_async:
            case.done(result)
        return plain(value) if case.is_root or function != "reduce" else None

    row(name, run, modes=BOTH if takes_async else ("sync",))


for _name, (_make, _arguments) in {**COLLECTIVES, **OBJECTS}.items():
    collective(_name, _make, _arguments)
for _name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
    _op = getattr(dist.ReduceOp, _name)
    collective(f"all_reduce[{_name}]", lambda c: c.own().double(), lambda c, t: (t,), op=_op)
BITS: dict[str, Callable[[Case], torch.Tensor]] = {
    "BAND": lambda c: ~c.own().long(),  # the numbers themselves share the same bits at each stage
    "BOR": lambda c: c.own().long(),
    "BXOR": lambda c: c.own().long(),
}
for _name, _own in BITS.items():
    _op = getattr(dist.ReduceOp, _name)
    collective(f"all_reduce[{_name}]", _own, lambda c, t: (t,), op=_op)


def barrier(case: Case, name: str) -> int:
    """How many members have called it when it is over."""
    store: Any = dist.distributed_c10d._get_default_store()
    key = "-".join((name, case.name, case.mode, str(case.salt)))
    store.add(key, 1)
    if name == "barrier":
        case.done(dist.barrier(case.group, async_op=case.is_async))
    else:
        dist.monitored_barrier(case.group)
    return int(store.add(key, 0))


row("barrier", partial(barrier, name="barrier"), modes=BOTH)
row("monitored_barrier", partial(barrier, name="monitored_barrier"))


# -- point to point -------------------------------------------------------------------------------


def send_objects(case: Case) -> Any:
    if case.index == 0:
        for index in range(1, case.size):
            objects = [("hop", index), case.salt]
            dist.send_object_list(objects, case.members[index], case.group)
        return None
    received: list[Any] = [None, None]
    return dist.recv_object_list(received, case.members[0], case.group), received


def send_recv(case: Case) -> Any:
    (after, before), tensor = case.ring, torch.zeros(2)

    def send() -> None:
        case.done(dist.send(case.own(), after, case.group, tag=3))

    if case.index == 0:
        send()
    source = dist.recv(tensor, before, case.group, tag=3)
    if case.index != 0:
        send()
    return source, tensor.tolist()


def in_ring(
    case: Case,
    receive: Callable[[torch.Tensor], Any],
    send: Callable[[torch.Tensor], Any],
    wait: Callable[[Any], object],
) -> Any:
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


def from_any(case: Case) -> Any:
    send, receive = ("isend", "irecv") if case.is_async else ("send", "recv")
    tag, found = 6 if case.is_async else 5, []
    if not case.is_root:
        result = getattr(dist, send)(case.own(), case.root, case.group, tag=tag)
        if case.is_async:
            case.done(result)
    for _ in range(case.size - 1 if case.is_root else 0):
        tensor = torch.zeros(2)
        source = getattr(dist, receive)(tensor, None, case.group, tag=tag)
        if case.is_async:
            case.done(source)
        found.append(tensor.tolist() if case.is_async else (source, tensor.tolist()))
    dist.barrier(case.group)  # this case must not receive a message of the next one
    return sorted(found)


def batched(case: Case, *partly: str) -> Any:
    """A batch with a send and a receive, or with one of them."""
    (after, before), tensor = case.ring, torch.zeros(2)
    batch = [
        dist.P2POp(dist.isend, case.own(), after, case.group, tag=7),
        dist.P2POp(dist.irecv, tensor, before, case.group, tag=7),
    ]
    if partly:
        batch = [one for one in batch if one.op.__name__ in partly]
    for work in dist.batch_isend_irecv(batch):
        case.done(work)
    return tensor.tolist()


def partly_batched(case: Case) -> Any:
    """Only two of the members take part, which may be the first operation on a rebuilt group."""
    return None if case.index > 1 else batched(case, ("isend", "irecv")[case.index])


row("send_object_list", send_objects, "send_object_list", "recv_object_list")
row("send, recv", send_recv, "send", "recv")
row(
    "isend, irecv",
    lambda c: in_ring(
        c,
        lambda t: dist.irecv(t, c.ring[1], c.group, tag=4),
        lambda t: dist.isend(t, c.ring[0], c.group, tag=4),
        c.done,
    ),
    *("isend", "irecv"),
    modes=("async",),
)
row("recv[any source]", from_any, "recv", "send")
row("irecv[any source]", from_any, "irecv", "isend", modes=("async",))
row("batch_isend_irecv", batched, modes=("async",))
row("batch_isend_irecv[partial]", partly_batched, modes=("async",))


def coalesced(case: Case, name: str, device: str | None) -> Any:
    make, arguments = {
        "all_reduce": (case.own, lambda n, t: (t,)),
        "all_gather_into_tensor": (
            lambda n: torch.zeros(n * case.size),
            lambda n, t: (t, case.own(n)),
        ),
        "reduce_scatter_tensor": (torch.zeros, lambda n, t: (t, case.own(n * case.size))),
    }[name]
    kwargs = {"device": torch.device(device)} if device else {}
    filled = {count: make(count) for count in (2, 3)}
    try:
        manager = dist._coalescing_manager(case.group, async_ops=case.is_async, **kwargs)
        with manager as works:
            for count, tensor in filled.items():
                getattr(dist, name)(*arguments(count, tensor), group=case.group)
    except RuntimeError:
        # If the backend cannot coalesce, torch leaves the group in its table of coalescing
        # groups, and silently postpones every later all_reduce of the group.
        dist.distributed_c10d._world.pg_coalesce_state.pop(case.object, None)
        raise
    if case.is_async:
        works.wait()
    return plain([*filled.values()])


for _name, _device in itertools.product(
    ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"), (None, "cpu")
):
    row(
        f"_coalescing_manager[{_name}, device={_device}]",
        partial(coalesced, name=_name, device=_device),
        *("_coalescing_manager", _name),
        modes=BOTH,
    )


# -- functional collectives, and operators by name ------------------------------------------------

Arguments = Callable[[Case], tuple[Any, ...]]

FUNCTIONS: dict[str, Arguments] = {
    "fc.all_reduce": lambda c: (c.own(), "sum", c.handle),
    "fc.all_reduce[ranks]": lambda c: (c.own(), "sum", [*c.members]),
    "fc.all_reduce_coalesced": lambda c: (c.twice(), "sum", c.handle),
    "fc.all_gather_tensor": lambda c: (c.own(), 0, c.handle),
    "fc.all_gather_single": lambda c: (c.own(), 0, c.handle),
    "fc.all_gather_into_tensor_coalesced": lambda c: (c.twice(), c.handle),
    "fc.all_gather_single_coalesced": lambda c: (c.twice(), c.handle),
    "fc.reduce_scatter_tensor": lambda c: (c.parts(), "sum", 0, c.handle),
    "fc.reduce_scatter_single": lambda c: (c.parts(), "sum", 0, c.handle),
    "fc.reduce_scatter_tensor_coalesced": lambda c: ([c.parts()] * 2, "sum", [0, 0], c.handle),
    "fc.reduce_scatter_single_coalesced": lambda c: ([c.parts()] * 2, "sum", [0, 0], c.handle),
    "fc.all_to_all_single": lambda c: (c.uneven(), c.splits, c.splits, c.handle),
    "fc.broadcast": lambda c: (c.own(), 1, c.handle),
    "fc.permute_tensor": lambda c: (c.own(), [*range(1, c.size), 0], c.handle),
    "ops.all_reduce": lambda c: (c.own(), "sum", c.name),
    "ops.wait_tensor": lambda c: (OPS.all_reduce(c.own(), "sum", c.name),),
    "ops.wait_tensors": lambda c: (OPS.all_reduce_coalesced(c.twice(), "sum", c.name),),
    "ops.all_reduce_": lambda c: (c.own(), "sum", c.name),
    "ops.all_reduce_coalesced": lambda c: (c.twice(), "sum", c.name),
    "ops.all_reduce_coalesced_": lambda c: (c.twice(), "sum", c.name),
    "ops.all_gather_into_tensor": lambda c: (c.own(), c.size, c.name),
    "ops.all_gather_into_tensor_coalesced": lambda c: (c.twice(), c.size, c.name),
    "ops.reduce_scatter_tensor": lambda c: (c.parts(), "sum", c.size, c.name),
    "ops.reduce_scatter_tensor_coalesced": lambda c: ([c.parts()] * 2, "sum", c.size, c.name),
    "ops.all_to_all_single": lambda c: (c.uneven(), c.splits, c.splits, c.name),
    "ops.broadcast": lambda c: (c.own(), 1, c.name),
    "ops.broadcast_": lambda c: (c.own(), 1, c.name),
    # The backward of torch 2.8 returns zeros: see the fc row.
    "ops_autograd.reduce_scatter_tensor": lambda c: (c.parts(), "sum", c.size, c.name),
}
"""Functions of ``fc`` and operators; what they return is waited for."""

IN_PLACE: dict[str, Filled] = {
    "fc.all_reduce_inplace": (Case.own, lambda c, t: (t, "sum", c.handle)),
    "fc.all_gather_tensor_inplace": (Case.flat, lambda c, t: (t, c.own(), c.handle)),
    "fc.reduce_scatter_tensor_inplace": (Case.pair, lambda c, t: (t, c.parts(), "sum", c.handle)),
    "fc.reduce_scatter_inplace": (Case.pair, lambda c, t: (t, c.chunks(), "sum", c.handle)),
    "fc.all_to_all_inplace": (Case.flat, lambda c, t: (t, c.parts(), None, None, c.handle)),
    "fc.all_gather_inplace": (Case.many, lambda c, t: (t, c.own(), c.handle)),
}
"""The forms into which torch.compile rewrites functions of torch.distributed."""

AUTOGRAD: dict[str, tuple[Callable[[Case], torch.Tensor], Callable[[Any, Case, Any], Any]]] = {
    "fc.all_gather_tensor_autograd": (Case.own, lambda f, c, t: f(t, 0, c.handle) + 0),
    "fc.all_gather_single_autograd": (Case.own, lambda f, c, t: f(t, 0, c.handle) + 0),
    "fc.reduce_scatter_tensor_autograd": (
        *(Case.parts, lambda f, c, t: f(t, "sum", 0, c.handle) + 0),
    ),
    "fc.reduce_scatter_single_autograd": (
        *(Case.parts, lambda f, c, t: f(t, "sum", 0, c.handle) + 0),
    ),
    "fc.all_to_all_single_autograd": (
        *(Case.parts, lambda f, c, t: f(t, [2] * c.size, [2] * c.size, c.handle) + 0),
    ),
    "ops_autograd.all_gather_into_tensor": (Case.own, lambda f, c, t: f(t, c.size, c.name)),
    "ops_autograd.all_to_all_single": (
        *(Case.parts, lambda f, c, t: f(t, [2] * c.size, [2] * c.size, c.name)),
    ),
}
"""Functions that have a gradient."""


def found(name: str) -> Any:
    """A function of the table."""
    space, _, attribute = name.partition("[")[0].rpartition(".")
    return getattr(SPACES[space], attribute)


def waited(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [waited(name, one) for one in value]
    wait = fc.wait_tensor if name.startswith("fc") else OPS.wait_tensor
    return wait(value) if isinstance(value, torch.Tensor) else value


def returned(case: Case, name: str) -> Any:
    return plain(waited(name, found(name)(*FUNCTIONS[name](case))))


def in_place(case: Case, name: str) -> Any:
    make, arguments = IN_PLACE[name]
    value = make(case)
    found(name)(*arguments(case, value))
    return plain(value)


def gradient(case: Case, name: str) -> Any:
    """A result, and the gradient of its sum, which each rank weighs by its own power of two.

    The gradient identifies the ranks that contributed to it.
    """
    make, call = AUTOGRAD[name]
    tensor = make(case).requires_grad_()
    output = call(found(name), case, tensor)
    if case.way == "name":
        OPS.wait_tensor(output.detach())
    # Not backward(): it may copy a gradient that is not complete (seen on torch 2.8).
    (gradient,) = torch.autograd.grad((output * float(2**case.me)).sum(), tensor)
    return output.detach().tolist(), fc.wait_tensor(gradient).tolist()


WAYS = {"fc": ("object", "name"), "ops": ("name",), "ops_autograd": ("name",)}
"""The forms in which a function takes the group."""

for _run, _names in ((returned, FUNCTIONS), (in_place, IN_PLACE), (gradient, AUTOGRAD)):
    for _name in _names:
        row(_name, partial(_run, name=_name), ways=WAYS[_name.partition(".")[0]])


def p2p_batch(case: Case) -> Any:
    tensor = torch.zeros(2)
    tensors, peers = [case.own(), tensor], [*case.group_ring]
    for work in OPS.batch_p2p_ops(["isend", "irecv"], peers, [9, 9], tensors, case.name):
        OPS.wait_tensor(work)
    return tensor.tolist()


def gathered_out(case: Case) -> Any:
    given = case.own(), case.size, case.name
    return plain(OPS.wait_tensor(OPS.all_gather_into_tensor_out(*given, out=case.flat())))


def scattered_out(case: Case) -> Any:
    out, given = torch.zeros(2), (case.parts(), "sum", case.size, case.name)
    return plain(OPS.wait_tensor(OPS.reduce_scatter_tensor_out(*given, out=out)))


row("ops.all_gather_into_tensor_out", gathered_out, ways=("name",))
row("ops.reduce_scatter_tensor_out", scattered_out, ways=("name",))
row("ops.batch_p2p_ops", p2p_batch, ways=("name",))
row(
    "ops.isend",
    lambda c: in_ring(
        c,
        lambda t: OPS.irecv(t, c.group_ring[1], 10, c.name),
        lambda t: OPS.isend(t, c.group_ring[0], 10, c.name),
        OPS.wait_tensor,
    ),
    *("ops.isend", "ops.irecv"),
    ways=("name",),
)


# -- running the table ----------------------------------------------------------------------------

Key = tuple[str, str, str, str]
"""Row, way, group, mode."""


@dataclass(frozen=True)
class Outcome:
    """The result of a row on one rank: a value, or the type of its error."""

    value: Any = None
    error: str = ""
    message: str = ""
    notes: tuple[str, ...] = ()


UNSUPPORTED_BY_NCCL = {
    *(f"all_reduce[{op}]" for op in ("BAND", "BOR", "BXOR")),
    "monitored_barrier",
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
    return name == "ops.batch_p2p_ops"


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
            return Outcome(error=type(error).__name__, message=str(error).splitlines()[0])
        return Outcome(error=type(error).__name__)
    return Outcome(value, notes=tuple(case.notes))
