"""Cost of a call on a reloadable group against the same call on torch's own group.

One process, the fake backend (no communication happens), tensors of a few bytes: what is left is
the path from the caller to the backend, which is all that the library can make slower.

* ``subgroup``: a native and a reloadable group of the same ranks in one process,
  measured in turn, call by call, the order changing from round to round.
* ``world``: there is one default group at a time, so the process initialises it, native and
  wrapped in turn, once a round, and measures every call in each.

A time is the median over the rounds of the CPU time per call of one block. The ratio is the
median over the rounds of proxy to native, with its quartiles: what disturbs the machine (a core
whose sibling is busy runs a third slower) mostly disturbs both sides of a round.

Python collectives are waited for by torch itself; a functional collective is timed up to its
result (``functional``: the call, and the wait that the first use of its result makes) and up to
its return (``launch``). A limit is exceeded if three quarters of the rounds exceed it: on a loaded
machine the median of a single call does not repeat.

Usage: python benchmarks/dispatch.py [--check] [--json PATH] [--rounds N] [--quick]
"""

from __future__ import annotations

import gc
import statistics
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat, starmap
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
from _output import command_line, installed, machine, write_json
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg.texts import table

WORLD_SIZE = 8
LIMITS = {"python": 1.08, "functional": 1.2, "query": 1.2}
"""Maximum ratio of a path."""
OF_CALLS = {"batch_isend_irecv": 1.2}
"""Of calls that enter the group several times: a batch does for each of its operations."""
if TorchVersion(torch.__version__) < (2, 9):
    LIMITS["functional"] = 1.3  # torch's own functional collectives take half as long there
WARM_UP = 5

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One thing to call. ``bind`` makes it a call without arguments on a given group."""

    path: str
    name: str
    bind: Callable[[Any], Call]


@dataclass
class Row:
    """Times of one case on one kind of group, in microseconds a call, one value a round."""

    case: Case
    group: str
    native: list[float] = field(default_factory=list)
    proxy: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(map(_divide, self.proxy, self.native))

    @property
    def limit(self) -> float | None:
        return OF_CALLS.get(self.case.name, LIMITS.get(self.case.path))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(map(_divide, self.proxy, self.native), n=4)
        return low, high

    @property
    def ok(self) -> bool:
        return self.limit is None or self.quartiles[0] <= self.limit

    def to_dict(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "path": self.case.path,
            "group": self.group,
            "call": self.case.name,
            "native_us": statistics.median(self.native),
            "proxy_us": statistics.median(self.proxy),
            "ratio": self.ratio,
            "ratio_q1": low,
            "ratio_q3": high,
            "limit": self.limit,
            "ok": self.ok,
        }


def _divide(a: float, b: float) -> float:
    return a / b


# ---------------------------------------------------------------------------------------------
# what is called


def cases() -> list[Case]:
    """Every collective that the fake backend can do, the functional ones, and the queries."""
    return [*_python_cases(), *_functional_cases(), *_query_cases()]


def _python_cases() -> Iterator[Case]:
    small, big = torch.ones(4), torch.ones(4 * WORLD_SIZE)
    parts = [torch.ones(4) for _ in range(WORLD_SIZE)]
    others = [torch.ones(4) for _ in range(WORLD_SIZE)]
    calls: dict[str, tuple[Any, ...]] = {
        "all_reduce": (small,),
        "broadcast": (small, 0),
        "reduce": (small, 0),
        "all_gather": (parts, small),
        "all_gather_into_tensor": (big, small),
        "all_gather_single": (big, small),
        "gather": (small, parts, 0),
        "gather_single": (big, small, 0),
        "scatter": (small, parts, 0),
        "reduce_scatter": (small, parts),
        "reduce_scatter_tensor": (small, big),
        "reduce_scatter_single": (small, big),
        "all_to_all": (parts, others),
        "all_to_all_single": (big, torch.ones_like(big)),
        "barrier": (),
        "send": (small, 1),
        "recv": (small, 1),
        "isend": (small, 1),
        "irecv": (small, 1),
    }
    for name, args in calls.items():
        function = getattr(dist, name, None)
        if function is None:
            continue  # all_gather_single and its like came after torch 2.8
        yield Case("python", name, _on_group(function, *args))
        if name not in ("send", "recv", "isend", "irecv"):
            yield Case("python", f"{name} async", _on_group(function, *args, async_op=True))
    for name, tensors in {
        "all_reduce_coalesced": ([small],),
        "all_gather_coalesced": ([[part] for part in parts], [small]),
    }.items():
        # Deprecated; they say so at every call.
        yield Case("python", name, _on_group(getattr(dist, name), *tensors))
    yield Case("python", "batch_isend_irecv", partial(_batch, small))
    # The other object collectives unpickle what they receive, and here nothing arrives.
    nothing: list[Any] = [None] * WORLD_SIZE
    yield Case("python", "all_gather_object", _on_group(dist.all_gather_object, nothing, 1))
    yield Case("python", "broadcast_object_list", _on_group(dist.broadcast_object_list, [1], 0))
    yield Case("python", "send_object_list", _on_group(dist.send_object_list, [1], 1))


def _on_group(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Any], Call]:
    return lambda group: partial(function, *args, group=group, **kwargs)


def _batch(tensor: torch.Tensor, group: Any) -> Call:
    def call() -> Any:
        there = dist.P2POp(dist.isend, tensor, 1, group)
        back = dist.P2POp(dist.irecv, tensor, 1, group)
        return dist.batch_isend_irecv([there, back])

    return call


def _functional_cases() -> Iterator[Case]:
    small, big = torch.ones(4), torch.ones(4 * WORLD_SIZE)
    counts = [4] * WORLD_SIZE
    calls: dict[str, tuple[Any, ...]] = {
        "all_reduce": (small, "sum"),
        "all_reduce_coalesced": ([small], "sum"),
        "broadcast": (small, 0),
        "all_gather_tensor": (small, 0),
        "all_gather_single": (small, 0),
        "all_gather_into_tensor_coalesced": ([small],),
        "all_gather_single_coalesced": ([small],),
        "reduce_scatter_tensor": (big, "sum", 0),
        "reduce_scatter_single": (big, "sum", 0),
        "reduce_scatter_tensor_coalesced": ([big], "sum", [0]),
        "reduce_scatter_single_coalesced": ([big], "sum", [0]),
        "all_to_all_single": (big, counts, counts),
        "permute_tensor": (big, list(range(WORLD_SIZE))),
    }
    for name, args in calls.items():
        function = getattr(funcol, name, None)
        if function is None:
            continue
        ways: dict[str, Callable[[Any], Any]] = {"group": _group_itself, "name": _name_of}
        if name == "permute_tensor":
            del ways["name"]  # it takes none
        for way, of in ways.items():
            yield Case("launch", f"{name} by {way}", _last(of, function, *args))
            yield Case("functional", f"{name} by {way}", _last(of, _to_result, function, *args))


def _last(
    of: Callable[[Any], Any], function: Callable[..., Any], *args: Any
) -> Callable[[Any], Call]:
    return lambda group: partial(function, *args, of(group))


def _group_itself(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _name_of(group: Any) -> str:
    return str(_group_itself(group).group_name)


def _to_result(function: Callable[..., Any], *args: Any) -> None:
    _wait(function(*args))


def _wait(result: Any) -> None:
    for one in result if isinstance(result, list) else (result,):
        if isinstance(one, funcol.AsyncCollectiveTensor):
            one.wait()


def _query_cases() -> Iterator[Case]:
    for name in ("get_rank", "get_world_size", "get_process_group_ranks", "get_backend"):
        yield Case("query", name, partial(partial, getattr(dist, name)))


# ---------------------------------------------------------------------------------------------
# how it is measured


def block(case: Case, group: Any, calls: int) -> float:
    """Microseconds of this thread's CPU time a call, over one block.

    All that is measured happens in this thread, so what else the machine does stays out of it.
    What was only launched is waited for outside of the time.
    """
    call = case.bind(group)
    for _ in range(WARM_UP):
        _wait(call())
    spent = 0.0
    while spent <= 0.0:  # seen on a virtual machine, rarely: the clock stood still
        launched: deque[Any] = deque(maxlen=None if case.path == "launch" else 0)
        begun = thread_time()
        launched.extend(starmap(call, repeat((), calls)))
        spent = thread_time() - begun
        for result in launched:
            _wait(result)
    return spent / calls * 1e6


@contextmanager
def initialised(*, wrapped: bool | None) -> Iterator[None]:
    """A default group; native (None: without the library in place), or wrapped."""
    store = FakeStore()
    if wrapped is None:
        dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=store)
        try:
            yield
        finally:
            dist.destroy_process_group()
        return
    with installed(backends={"fake"}, world=wrapped), initialised(wrapped=None):
        is_proxy = isinstance(dist.group.WORLD, reloadpg.ReloadableProcessGroup)
        if is_proxy is not wrapped:
            raise RuntimeError(f"WORLD wrapped is {is_proxy}, not {wrapped} as asked for")
        yield


def measure_subgroup(todo: Sequence[Case], rounds: int, calls: int) -> list[Row]:
    """Both groups in one process; the two sides of a case directly after one another."""
    ranks = list(range(WORLD_SIZE))
    rows = [Row(case, "subgroup") for case in todo]
    with initialised(wrapped=None):
        native = dist.new_group(ranks)
        with installed(backends={"fake"}, world=False):
            proxy = dist.new_group(ranks)
            if type(native) is not dist.ProcessGroup or not isinstance(
                proxy, reloadpg.ReloadableProcessGroup
            ):
                raise RuntimeError(f"not a native and a reloadable group: {native!r}, {proxy!r}")
            for number in range(rounds):
                for row in rows:
                    sides = [(native, row.native), (proxy, row.proxy)]
                    for group, samples in sides if number % 2 else sides[::-1]:
                        samples.append(block(row.case, group, calls))
    return rows


def measure_world(todo: Sequence[Case], rounds: int, calls: int) -> list[Row]:
    """One default group after the other, native and wrapped; every case in each."""
    rows = [Row(case, "world") for case in todo]
    for number in range(rounds):
        for wrapped in (None, True) if number % 2 else (True, None):
            with initialised(wrapped=wrapped):
                for row in rows:
                    samples = row.proxy if wrapped else row.native
                    samples.append(block(row.case, _argument(row.case), calls))
    return rows


def _argument(case: Case) -> Any:
    """None stands for WORLD wherever torch takes it."""
    needs_object = case.name in ("get_process_group_ranks", "batch_isend_irecv")
    return dist.group.WORLD if needs_object else None


def usable(todo: Sequence[Case]) -> tuple[list[Case], dict[str, str]]:
    """The cases that work on the fake backend of this torch, and why others do not."""
    works, fails = [], {}
    with initialised(wrapped=None):
        for case in todo:
            try:
                for _ in range(2):
                    _wait(case.bind(dist.group.WORLD)())
                works.append(case)
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0]
                fails[f"{case.path} {case.name}"] = f"{type(error).__name__}: {reason}"
    return works, fails


# ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=120, help="blocks of each side of a case")
    parser.add_argument("--calls", type=int, default=30, help="calls of a block")
    options = parser.parse_args(arguments)
    rounds, calls = (2, 5) if options.quick else (max(2, options.rounds), options.calls)

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    todo, left_out = usable(cases())
    gc.disable()
    rows = measure_subgroup(todo, rounds, calls) + measure_world(todo, rounds, calls)
    result = {
        "benchmark": "dispatch",
        "machine": machine(),
        "settings": {"world_size": WORLD_SIZE, "rounds": rounds, "calls": calls},
        "limits": LIMITS | OF_CALLS,
        "left_out": left_out,
        "rows": [row.to_dict() for row in rows],
        "ok": all(row.ok for row in rows),
    }
    _print(result)
    write_json(options.json, result)
    return 1 if options.check and not result["ok"] else 0


def _print(result: dict[str, Any]) -> None:
    header = ("path", "group", "call", "native us", "proxy us", "ratio", "q1", "q3", "limit", "")
    keys = ("path", "group", "call", "native_us", "proxy_us", "ratio", "ratio_q1", "ratio_q3")
    print(
        table(
            header,
            [
                (*(row[k] for k in keys), row["limit"], "" if row["ok"] else "OVER")
                for row in sorted(result["rows"], key=lambda r: (r["path"], r["group"]))
            ],
        )
    )
    print()
    worst = []
    for path in dict.fromkeys(row["path"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["path"] == path]
        ratios = [row["ratio"] for row in rows]
        top = max(rows, key=lambda row: row["ratio"])
        worst.append(
            (path, len(rows), statistics.median(ratios), max(ratios), top["call"], top["limit"])
        )
    print(table(("path", "calls", "median ratio", "worst", "of", "limit"), worst))
    for name, reason in result["left_out"].items():
        print(f"left out: {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
