"""The body of one test on its ranks: what the test's process sends, and what a rank does with it.

In a rank the test's module is loaded anew, with pytest's rewriting of assertions where the
installed pytest lets it be used, so that a failed comparison shows its values.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from ..lifecycle.autoinstall import SWITCH
from ._plugin_marks import PhasesMark, RanksMark

__all__ = ["RankTest", "Verdict", "execute", "run_body"]


@dataclass(frozen=True)
class RankTest:
    """One test function as its ranks are told of it: picklable.

    Attributes:
        module, file: the test's module, and where it is.
        holder: qualified name of the class that holds the function; None for a module's own.
        name: the function.
        values: arguments made in the test's process.
        fixtures: the plugin's fixtures that each rank makes, in order.
        arguments: those of them that the function takes as arguments.
        settings: what their fixtures were given, by name.
        backend: of the default group that is made before the body; None for none.
        phases: how to reload between phases; None for the run as it is.
    """

    module: str
    file: str
    holder: str | None
    name: str
    values: Mapping[str, Any]
    fixtures: tuple[str, ...]
    arguments: tuple[str, ...]
    settings: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    backend: str | None = None
    phases: PhasesMark | None = None


@dataclass(frozen=True)
class Verdict:
    """How the body ended on one rank: ``passed``, ``skipped`` or ``xfailed``, and why."""

    outcome: str
    reason: str = ""


# ---------------------------------------------------------------------------------------------
# in the test's process


def execute(test: RankTest, mark: RanksMark, timeout: float) -> None:
    """Run the test's body on ranks and end as they did. Blocking, up to the timeout.

    Raises what pytest takes for a failed, skipped or expectedly failed test.
    """
    from .ranks import RanksFailedError, run_ranks

    for name, value in test.values.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(
                f"the argument {name!r} of a test on ranks cannot be pickled ({error}); nothing "
                "was run. Make it in the body, or from plain values.",
                pytrace=False,
            )
    size = mark.world_size
    try:
        verdicts: list[Verdict] = run_ranks(
            run_body,
            size,
            args=(test, timeout),
            timeout=timeout,
            env={SWITCH: None, **(mark.env or {})},
            start_method=mark.start_method,
            store=mark.store,
        )
    except RanksFailedError as error:
        failed = sum(not outcome.ok for outcome in error.outcomes)
        _, _, details = str(error).partition("\n")
        pytest.fail(f"{failed} of {size} ranks failed{_run_name(test)}\n{details}", pytrace=False)
    outcomes = {verdict.outcome for verdict in verdicts}
    if len(outcomes) > 1:
        lines = [f"  rank {rank}: {v.outcome} {v.reason}" for rank, v in enumerate(verdicts)]
        pytest.fail(
            "the ranks ended differently; a test ends alike on all of them:\n" + "\n".join(lines),
            pytrace=False,
        )
    if outcomes == {"skipped"}:
        pytest.skip(verdicts[0].reason)
    if outcomes == {"xfailed"}:
        pytest.xfail(verdicts[0].reason)


def _run_name(test: RankTest) -> str:
    return "" if test.phases is None else ", with reloads before each collective phase"


# ---------------------------------------------------------------------------------------------
# in a rank


def run_body(rank: int, world_size: int, test: RankTest, timeout: float) -> Verdict:
    """One rank's part: load the test, make its fixtures, run the body."""
    _install_as_told()
    with ExitStack() as stack:
        own: dict[str, Any] = {"rank": rank, "world_size": world_size}
        # Before the module is loaded, so that collectives it imports by name are seen too.
        own["reload_point"] = stack.enter_context(_reloading(test.phases, timeout))
        function = _load(test)
        for name in test.fixtures:
            if name not in own:
                from ._plugin_fixtures import made

                own[name] = stack.enter_context(made(name, test.settings.get(name, {})))
        stack.enter_context(_default_group(test.backend, timeout))
        try:
            function(**test.values, **{name: own[name] for name in test.arguments})
        except pytest.skip.Exception as skipped:
            return Verdict("skipped", str(skipped.msg))
        except pytest.xfail.Exception as expected:
            return Verdict("xfailed", str(expected.msg))
    return Verdict("passed")


def _install_as_told() -> None:
    """Be installed if this rank's environment says so.

    A forked rank is what its server is, which was told by the environment of the test's process.
    """
    if "torch" in sys.modules:
        from ..lifecycle import autoinstall
        from ..lifecycle import install as patching

        patching.uninstall()
        autoinstall.activate()


def _reloading(
    phases: PhasesMark | None, timeout: float
) -> AbstractContextManager[Callable[[], None]]:
    if phases is None:
        return nullcontext(lambda: None)
    from ._plugin_phases import reloading

    return reloading(phases, timeout)


@contextmanager
def _default_group(backend: str | None, timeout: float) -> Iterator[None]:
    if backend is None:
        yield
        return
    import torch.distributed as dist

    from ..environment.meeting import part

    dist.init_process_group(backend)
    # It returns on a fast rank before a slow one is connected (gloo), which then fails if the
    # fast one destroys the group: "Gloo connectFullMesh failed".
    part(timedelta(seconds=timeout), "connected")
    yield  # after an exception the other ranks may be anywhere: nothing collective then
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(test: RankTest) -> Callable[..., Any]:
    found: Any = _module(test.module, test.file)
    for part in (test.holder or "").split("."):
        found = getattr(found, part) if part else found
    function: Callable[..., Any] = getattr(found() if test.holder else found, test.name)
    return function


def _module(name: str, file: str) -> ModuleType:
    """The test's module: the loaded one, or a new one with rewritten assertions."""
    loaded = sys.modules.get(name)
    if loaded is not None and _same_file(getattr(loaded, "__file__", None), file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {file}")
    module = importlib.util.module_from_spec(spec)
    package, _, _ = name.rpartition(".")
    if package:  # for relative imports; test folders need not be packages
        try:
            importlib.import_module(package)
        except ImportError:
            module.__package__ = ""
    sys.modules[name] = module
    exec(_compiled(file), vars(module))
    return module


def _compiled(file: str) -> Any:
    with open(file, "rb") as source:
        text = source.read()
    tree = ast.parse(text, file)
    try:  # private to pytest; without it a failed assertion shows its line alone
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, text, file)
    except Exception:
        tree = ast.parse(text, file)
    return compile(tree, file, "exec", dont_inherit=True)


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)
