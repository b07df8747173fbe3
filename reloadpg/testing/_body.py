"""The body of a test on ranks, and the groups that a test leaves: what :mod:`.plugin` does."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import marshal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import pytest

from ..settings import AUTOINSTALL, as_timedelta

MADE_IN_RANKS = object()
"""In the test's process, the value of a fixture that each rank has or creates."""

LEAKS = "assert_no_group_leaks"


@dataclass(frozen=True)
class Body:
    """A test function, as it is sent to its ranks.

    Attributes:
        holder: qualified name of the function's class; None for a module-level function.
        values: arguments created in the test's process.
        in_ranks: the plugin's fixtures that each rank creates.
        test: the id of the test.
    """

    module: str
    file: str
    holder: str | None
    name: str
    values: Mapping[str, Any]
    in_ranks: frozenset[str]
    test: str


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
    body, code = _body_of(item), _compiled(str(item.path))
    try:
        ends: list[tuple[str, str]] = run_ranks(
            run_body,
            world_size,
            args=(body, code, backend, seconds),
            timeout=seconds,
            env={AUTOINSTALL: None, **(env or {})},
            **options,
        )
    except RanksFailedError as error:
        head, _, details = str(error).partition("\n")
        what = head.rpartition(" (")[0]  # without the advice for callers of run_ranks
        # Not chained: otherwise pytest prints the ranks' output twice.
        raise _failed(f"{what}\n{details}") from None
    if len({how for how, _ in ends}) > 1:
        lines = [f"  rank {rank}: {how} {reason}" for rank, (how, reason) in enumerate(ends)]
        raise _failed(
            "the ranks ended differently, but must have equal results:\n" + "\n".join(lines)
        )
    how, reason = ends[0]
    if how == "skipped":
        pytest.skip(reason)
    if how == "xfailed":
        pytest.xfail(reason)


def _failed(message: str) -> BaseException:
    """Return pytest's exception for a failure that is one message, without source."""
    return pytest.fail.Exception(message, pytrace=False)


def _body_of(item: pytest.Function) -> Body:
    parameters, values = inspect.signature(item.obj).parameters, item.funcargs
    in_ranks = frozenset(name for name, value in values.items() if value is MADE_IN_RANKS)
    return Body(
        item.module.__name__,
        str(item.path),
        None if item.cls is None else item.cls.__qualname__,
        item.originalname,
        {n: value for n, value in values.items() if n in parameters and n not in in_ranks},
        in_ranks,
        item.nodeid,
    )


@cache
def _compiled(file: str) -> bytes:
    """The code of a test module for its ranks, with assertions rewritten by pytest."""
    with open(file, "rb") as source:
        text = source.read()
    tree = ast.parse(text, file)
    try:  # private to pytest; without it, a failed assertion shows only its line
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, text, file)
    except Exception:
        tree = ast.parse(text, file)
    return marshal.dumps(compile(tree, file, "exec", dont_inherit=True))


# ---------------------------------------------------------------------------------------------
# in a rank


def run_body(
    rank: int, world_size: int, body: Body, code: bytes, backend: str | None, seconds: float
) -> tuple[str, str]:
    """Run the test; return ``passed``, ``skipped`` or ``xfailed``, and the reason."""
    made: dict[str, Any] = {"rank": rank, "world_size": world_size}
    function = _load(body, code)
    with ExitStack() as stack:
        stack.enter_context(_default_group(backend, seconds))
        if LEAKS in body.in_ranks:  # it ends first: the default group's end destroys all groups
            made[LEAKS] = stack.enter_context(no_group_leaks(body.test))
        taken = body.in_ranks.intersection(inspect.signature(function).parameters)
        try:
            function(**body.values, **{name: made[name] for name in taken})
        except pytest.skip.Exception as skipped:
            return "skipped", str(skipped.msg)
        except pytest.xfail.Exception as expected:
            return "xfailed", str(expected.msg)
    return "passed", ""


@contextmanager
def _default_group(backend: str | None, seconds: float) -> Iterator[None]:
    if backend is None:
        yield
        return
    import torch.distributed as dist

    from ..environment.store import leave_together

    dist.init_process_group(backend)
    # Gloo's creation returns on a fast rank before a slow one is connected. The slow rank fails
    # if the fast one then destroys the group: "Gloo connectFullMesh failed".
    leave_together(timedelta(seconds=seconds), purpose="connected")
    yield  # nothing collective after an exception: the state of other ranks is unknown
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(body: Body, code: bytes) -> Callable[..., Any]:
    from ._rank import execute_file, is_from

    found: Any = sys.modules.get(body.module)
    if not is_from(found, body.file):
        package = body.module.rpartition(".")[0]
        if package:  # for relative imports; test folders need not be packages
            with suppress(ImportError):
                importlib.import_module(package)
        found = execute_file(body.module, body.file, marshal.loads(code))
    for part in (body.holder or "").split("."):
        found = getattr(found, part) if part else found
    function: Callable[..., Any] = getattr(found() if body.holder else found, body.name)
    return function


# ---------------------------------------------------------------------------------------------
# leaked groups


@contextmanager
def no_group_leaks(test: str, *, destroys: bool = False) -> Iterator[None]:
    """Check that this block, if it passes, leaves no process group. Local.

    Args:
        test: the id of the test.
        destroys: whether to destroy what was left, since other tests run in this process.
    """
    before = _existing()
    yield
    left = [text for name, text in _existing().items() if name not in before]
    if left:
        lines = "\n".join(f"  {one}" for one in left)
        done = _destroy_all_but(before) if destroys else ""
        raise AssertionError(
            f"{test} left process groups behind, in c10d's tables:\n{lines}\n{done}Destroy them "
            "with torch.distributed.destroy_process_group(group); without an argument it destroys "
            "all."
        )


def _existing() -> dict[str, str]:
    """The process groups of this process, as text by name. Runs a garbage collection."""
    from ..c10d import tables

    gc.collect()
    return {tables.name_of(group): _text(group) for group in tables.known_groups()}


def _destroy_all_but(names: Collection[str]) -> str:
    """Destroy the groups with other names, for the tests that follow; say what failed."""
    import torch.distributed as dist

    from ..c10d import tables

    failures = []
    world = tables.world()
    left = [group for group in tables.known_groups() if tables.name_of(group) not in names]
    # The default group comes last: its end destroys all others.
    for group in sorted(left, key=lambda group: group is world):
        name = tables.name_of(group)
        try:
            dist.destroy_process_group(group)
        except Exception as error:
            failures.append(f"group {name!r} could not be destroyed: {error}\n")
    return "".join(failures) or "They were destroyed, for the tests that follow. "


def _text(group: Any) -> str:
    from ..c10d import tables
    from ..groups.proxy import ReloadableProcessGroup

    kind = "reloadable, " if isinstance(group, ReloadableProcessGroup) else ""
    desc = tables.desc_of(group)
    if desc not in ("", "undefined"):
        kind = f"{desc!r}, {kind}"
    ranks = tables.ranks_of(group)
    members = list(ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    name = tables.name_of(group)
    return f"group {name!r} ({kind}{tables.backend_of(group)}, ranks {members})"
