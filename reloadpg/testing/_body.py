"""The body of a test on ranks, and the groups that a test leaves: what :mod:`.plugin` does."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import marshal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ..settings import AUTOINSTALL, as_timedelta

LEAKS = "assert_no_group_leaks"


class MadeInRanks:
    """The class itself is, in the test's process, the value of a fixture that each rank creates."""


@dataclass(frozen=True)
class Body:
    """A test function, as it is sent to its ranks.

    Attributes:
        name: qualified name in its module.
        values: its arguments, and the plugin's fixtures that each rank creates.
        test: the id of the test.
        code: the compiled module.
        backend: of the default group; None for no group.
        seconds: the timeout of the run.
    """

    module: str
    file: str
    name: str
    values: Mapping[str, Any]
    test: str
    code: bytes
    backend: str | None
    seconds: float


def run(
    item: pytest.Function,
    default_timeout: float,
    world_size: int,
    *,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    **options: Any,
) -> None:
    """Run the body of a test on ranks; raise pytest's exceptions for their result.

    The arguments from ``world_size`` on are the mark's; ``options`` are passed on to
    ``run_ranks``.
    """
    from .ranks import RanksFailedError, run_ranks

    given = default_timeout if timeout is None else timeout
    seconds = as_timedelta(given, "timeout of the test").total_seconds()
    variables, args = {AUTOINSTALL: None, **(env or {})}, (_body_of(item, backend, seconds),)
    try:
        ends = run_ranks(run_body, world_size, args=args, timeout=seconds, env=variables, **options)
    except RanksFailedError as error:
        head, _, details = str(error).partition("\n")
        what = head.rpartition(" (")[0]  # without the advice for callers of run_ranks
        # Not chained: pytest would print the output twice.
        raise pytest.fail.Exception(f"{what}\n{details}", pytrace=False) from None
    if len({how for how, _ in ends}) > 1:
        lines = [f"  rank {rank}: {how} {reason}" for rank, (how, reason) in enumerate(ends)]
        text = "the ranks ended differently, but must have equal results:"
        pytest.fail("\n".join([text, *lines]), pytrace=False)
    how, reason = ends[0]
    if how == "skipped":
        pytest.skip(reason)
    if how == "xfailed":
        pytest.xfail(reason)


def _body_of(item: pytest.Function, backend: str | None, seconds: float) -> Body:
    takes = inspect.signature(item.obj).parameters
    values = {n: v for n, v in item.funcargs.items() if n in takes or v is MadeInRanks}
    name = item.originalname if item.cls is None else f"{item.cls.__qualname__}.{item.originalname}"
    file, code = str(item.path), _compiled(str(item.path))
    return Body(item.module.__name__, file, name, values, item.nodeid, code, backend, seconds)


@cache
def _compiled(file: str) -> bytes:
    """The code of a test module for its ranks, with assertions rewritten by pytest."""
    text = Path(file).read_bytes()
    tree = ast.parse(text, file)
    try:  # private to pytest; without it, a failed assertion shows only its line
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, text, file)
    except Exception:
        tree = ast.parse(text, file)
    return marshal.dumps(compile(tree, file, "exec", dont_inherit=True))


def run_body(rank: int, world_size: int, body: Body) -> tuple[str, str]:
    """Run the test; return ``passed``, ``skipped`` or ``xfailed``, and the reason."""
    made = {"rank": rank, "world_size": world_size, LEAKS: None}
    function = _load(body)
    takes, given = inspect.signature(function).parameters, body.values
    arguments = {n: made[n] if v is MadeInRanks else v for n, v in given.items() if n in takes}
    with ExitStack() as stack:
        stack.enter_context(_default_group(body))
        if given.get(LEAKS) is MadeInRanks:  # ends first: the default group's end destroys all
            stack.enter_context(no_group_leaks(body.test))
        try:
            function(**arguments)
        except pytest.skip.Exception as skipped:
            return "skipped", str(skipped.msg)
        except pytest.xfail.Exception as expected:
            return "xfailed", str(expected.msg)
    return "passed", ""


@contextmanager
def _default_group(body: Body) -> Iterator[None]:
    if body.backend is None:
        yield
        return
    import torch.distributed as dist

    from ..environment.store import leave_together

    dist.init_process_group(body.backend)
    # Gloo's creation returns on a fast rank before a slow one is connected. The slow rank fails
    # if the fast one then destroys the group: "Gloo connectFullMesh failed".
    leave_together(timedelta(seconds=body.seconds), purpose="connected")
    yield  # nothing collective after an exception: the state of other ranks is unknown
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(body: Body) -> Callable[..., Any]:
    from ._rank import execute_file, is_from

    found: Any = sys.modules.get(body.module)
    if not is_from(found, body.file):
        package = body.module.rpartition(".")[0]
        if package:  # for relative imports; test folders need not be packages
            with suppress(ImportError):
                importlib.import_module(package)
        found = execute_file(body.module, body.file, marshal.loads(body.code))
    *holders, name = body.name.split(".")
    for part in holders:
        found = getattr(found, part)
    function: Callable[..., Any] = getattr(found() if holders else found, name)
    return function


@contextmanager
def no_group_leaks(test: str, *, destroys: bool = False) -> Iterator[None]:
    """Check that this block, if it passes, leaves no process group. Local.

    Args:
        test: the id of the test.
        destroys: whether to destroy what was left, since other tests run in this process.
    """
    from ..c10d import tables

    def groups() -> dict[str, Any]:
        gc.collect()
        return {tables.name_of(group): group for group in tables.known_groups()}

    before = {*groups()}
    yield
    if left := [group for name, group in groups().items() if name not in before]:
        lines = "\n".join(f"  group {tables.label_of(one)}" for one in left)
        done = _destroy(left) if destroys else ""
        raise AssertionError(
            f"{test} left process groups behind, in c10d's tables:\n{lines}\n{done}Destroy them "
            "with torch.distributed.destroy_process_group(group); without an argument it destroys "
            "all."
        )


def _destroy(groups: Sequence[Any]) -> str:
    """Destroy groups, for the tests that follow; say what failed."""
    import torch.distributed as dist

    from ..c10d import tables

    failures, world = [], tables.world()
    # The default group comes last: its end destroys all others.
    for group in sorted(groups, key=lambda group: group is world):
        label = tables.label_of(group)
        try:
            dist.destroy_process_group(group)
        except Exception as error:
            failures.append(f"group {label} could not be destroyed: {error}\n")
    return "".join(failures) or "They were destroyed, for the tests that follow. "
