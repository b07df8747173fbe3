"""Run the body of one test on ranks: the marks, the data sent to a rank, and its execution.

A rank loads the module of the test again, with pytest's rewriting of assertions if the installed
pytest allows it, so that a failed comparison shows its values. Importing this module does not
import torch.
"""

from __future__ import annotations

import ast
import importlib
import marshal
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import pytest

from ..lifecycle.autoinstall import SWITCH
from ._plugin_marks import POINT, PhasesMark, RanksMark, failed


@dataclass(frozen=True)
class RankTest:
    """The description of a test function that is sent to its ranks.

    Attributes:
        holder: qualified name of the function's class; None for a module-level function.
        values: arguments created in the test's process.
        fixtures: by name, in order, the settings of the plugin's fixtures to create in each rank.
        arguments: those of them that the function takes as arguments.
        phases: how to reload between phases; None for the unchanged run.
        points: whether to reload only at the calls of ``reload_point``.
    """

    module: str
    file: str
    holder: str | None
    name: str
    values: Mapping[str, Any]
    fixtures: Mapping[str, dict[str, Any]]
    arguments: tuple[str, ...]
    backend: str | None
    phases: PhasesMark | None
    points: bool
    timeout: float


# ---------------------------------------------------------------------------------------------
# in the test's process


def execute(test: RankTest, mark: RanksMark) -> None:
    """Run the body of a test on ranks; raise pytest's exceptions for their result."""
    from .ranks import RanksFailedError, run_ranks

    for name, value in test.values.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise failed(
                f"the argument {name!r} of a test on ranks cannot be pickled ({error}); nothing "
                "was run. Create it in the body, or from plain values."
            ) from None
    try:
        ends: list[tuple[str, str]] = run_ranks(
            run_body,
            mark.world_size,
            args=(test, _compiled(test.file)),
            timeout=test.timeout,
            env={SWITCH: None, **(mark.env or {})},
            preload=mark.preload,
            start_method=mark.start_method,
            store=mark.store,
            standins=mark.standins,
        )
    except RanksFailedError as error:
        head, _, details = str(error).partition("\n")
        what = head.rpartition(" (")[0]  # without the advice for callers of run_ranks
        reloads = "" if test.phases is None else ", with reloads before each collective phase"
        # Not chained: otherwise pytest prints the ranks' output twice.
        raise failed(f"{what}{reloads}\n{details}") from None
    if len({how for how, _ in ends}) > 1:
        lines = [f"  rank {rank}: {how} {reason}" for rank, (how, reason) in enumerate(ends)]
        raise failed(
            "the ranks ended differently, but must have equal results:\n" + "\n".join(lines)
        )
    how, reason = ends[0]
    if how == "skipped":
        pytest.skip(reason)
    if how == "xfailed":
        pytest.xfail(reason)


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


def run_body(rank: int, world_size: int, test: RankTest, code: bytes) -> tuple[str, str]:
    """Run the test; return ``passed``, ``skipped`` or ``xfailed``, and the reason."""
    made: dict[str, Any] = {"rank": rank, "world_size": world_size, POINT: lambda: None}
    with ExitStack() as stack:
        if test.phases is not None or test.points:
            from ._plugin_checks import reloading

            # Before the module is loaded: the collectives that it imports are wrapped then.
            made[POINT] = stack.enter_context(
                reloading(test.phases, test.timeout, points=POINT in test.arguments)
            )
        function = _load(test, code)
        contexts = {}
        if test.fixtures:
            from ._plugin_checks import CONTEXTS

            contexts = {name: CONTEXTS[name](**given) for name, given in test.fixtures.items()}
        leak_check = contexts.pop("assert_no_group_leaks", None)
        for name, context in contexts.items():
            made[name] = stack.enter_context(context)
        stack.enter_context(_default_group(test.backend, test.timeout))
        if leak_check is not None:  # it ends first: the default group's end destroys all groups
            made["assert_no_group_leaks"] = stack.enter_context(leak_check)
        try:
            function(**test.values, **{name: made[name] for name in test.arguments})
        except pytest.skip.Exception as skipped:
            return "skipped", str(skipped.msg)
        except pytest.xfail.Exception as expected:
            return "xfailed", str(expected.msg)
    return "passed", ""


@contextmanager
def _default_group(backend: str | None, timeout: float) -> Iterator[None]:
    if backend is None:
        yield
        return
    import torch.distributed as dist

    from ..environment.store_barrier import leave_together

    dist.init_process_group(backend)
    # Gloo's creation returns on a fast rank before a slow one is connected. The slow rank fails
    # if the fast one then destroys the group: "Gloo connectFullMesh failed".
    leave_together(timedelta(seconds=timeout), purpose="connected")
    yield  # nothing collective after an exception: the state of other ranks is unknown
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(test: RankTest, code: bytes) -> Callable[..., Any]:
    from ._rank import execute_file, is_from

    found: Any = sys.modules.get(test.module)
    if not is_from(found, test.file):
        package = test.module.rpartition(".")[0]
        if package:  # for relative imports; test folders need not be packages
            with suppress(ImportError):
                importlib.import_module(package)
        found = execute_file(test.module, test.file, marshal.loads(code))
    for part in (test.holder or "").split("."):
        found = getattr(found, part) if part else found
    function: Callable[..., Any] = getattr(found() if test.holder else found, test.name)
    return function
