"""pytest plugin: tests whose body runs on real ranks, with reloads.

pytest loads it by its entry point in every project of an environment, so it imports neither torch
nor the rest of the library until a test asks for something::

    @pytest.mark.ranks(2, backend="gloo")
    def test_sum(rank, world_size):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world_size

    @pytest.mark.ranks(2, backend="gloo")
    @pytest.mark.reload_each_phase
    def test_training():
        ...

``ranks(world_size, *, timeout, backend, env, preload, store, standins)`` runs the
body in ``world_size`` processes and fails with every failed rank's traceback. Do not assume that
the test's process takes part. On ranks, the fixtures of this plugin are created in each rank; all
other values are created once, in the test's process, and pickled. Ranks load the test's module
again, with pytest's rewriting of assertions if the installed pytest allows it, but no
``conftest.py``; ``setup_method`` and similar are not called.

``reload_each_phase`` runs the test twice: unchanged, and with an offload and a reload before each
collective *phase*. A phase begins with a call of one of torch.distributed's collective functions
that

- comes from the thread of the body, and not from another collective (``all_gather_object`` calls
  ``all_gather``) or from a block that coalesces operations;
- is on a group of all ranks, such as WORLD;
- starts while no operation is running: ``wait()`` was called for every asynchronous one.

So a synchronous collective is a phase by itself; an asynchronous one opens a phase that lasts until
all operations started in it were waited for. Sends and receives never begin a phase.

All ranks of the test must begin the same phases in the same order, since an offload is collective.
Collectives of smaller groups, and those that C++ starts (DDP's in the backward pass, functional
collectives), begin no phase. To reload before them, call ``reloadpg.offload()`` and
``reloadpg.reload()`` there if ``reloadpg.is_installed()``. The groups of every backend are
reloadable, unless the body calls ``reloadpg.install`` itself. A rank that begins a phase alone
fails with the library's error that names the missing ranks.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import marshal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import pytest

from ..settings import AUTOINSTALL, as_timedelta

if TYPE_CHECKING:
    from torch.distributed import Work

__all__ = [
    "assert_no_group_leaks",
    "rank",
    "world_size",
]

RANKS = "ranks"
PHASES = "reload_each_phase"
LEAKS = "assert_no_group_leaks"

_TIMEOUT = "reloadpg_timeout"
_RELOADED = "reloadpg_reloaded"

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
"""Functions of torch.distributed that begin phases; some do not exist in all versions."""
_POINT_TO_POINT = ("batch_isend_irecv", "irecv", "isend")
"""Functions whose operations are waited for, but begin no phase."""
_UNUSABLE = frozenset({"fake", "undefined"})


# ---------------------------------------------------------------------------------------------
# the marks


@dataclass(frozen=True)
class RanksMark:
    """``@pytest.mark.ranks(...)``: the body of the test runs on real ranks.

    Attributes:
        world_size: number of ranks.
        timeout: time after which running ranks are ended and the test fails; a timedelta, or
            seconds.
        backend: backend of the default group that is created before the body and destroyed
            afterwards; None creates no group.
        env: variables set in the ranks; None removes one.
        preload, store, standins: as for ``reloadpg.testing.run_ranks``.
    """

    world_size: int
    timeout: timedelta | float | None = None
    backend: str | None = None
    env: Mapping[str, str | None] | None = None
    preload: Sequence[str] = ()
    store: Literal["parent", "rank0"] = "parent"
    standins: bool | None = None


def ranks_mark(node: pytest.Item) -> RanksMark | None:
    """The mark ``ranks`` of a test; None if it has none."""
    mark = node.get_closest_marker(RANKS)
    return None if mark is None else RanksMark(*mark.args, **mark.kwargs)


def failed(message: str) -> BaseException:
    """Return pytest's exception for a failure that is one message, without source."""
    return pytest.fail.Exception(message, pytrace=False)


# ---------------------------------------------------------------------------------------------
# hooks of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: the default timeout of tests on ranks, and the use of stand-ins."""
    parser.addini(_TIMEOUT, "seconds that tests on ranks may take (reloadpg)", default="60")
    what = "run tests on ranks over stand-ins for CUDA and NCCL, without a GPU (reloadpg)"
    group = parser.getgroup("reloadpg")
    group.addoption("--reloadpg-standins", action="store_true", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks, for ``--strict-markers``."""
    for line in (
        f"{RANKS}(world_size, *, timeout=None, backend=None, env=None, preload=(), "
        'store="parent", standins=None): run the body on this number of real rank processes',
        f"{PHASES}: run the test as it is, and again with an offload and a reload before each "
        "collective phase; needs the mark ranks",
    ):
        config.addinivalue_line("markers", line)
    if config.getoption("--reloadpg-standins"):
        from . import standins

        try:
            standins.enable()
        except standins.StandinsError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create two tests if the mark requests reloads: unchanged, and reloaded."""
    if metafunc.definition.get_closest_marker(PHASES) is not None:
        metafunc.fixturenames.append(_RELOADED)
        metafunc.parametrize(_RELOADED, (False, True), ids=("as-is", "reloaded"), indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the marks before any fixture is created."""
    ranks, phases = ranks_mark(item), item.get_closest_marker(PHASES)
    if phases is not None and (phases.args or phases.kwargs):
        raise failed(f"the mark {PHASES} takes no arguments; nothing was run")
    if phases is not None and ranks is None:
        pytest.fail(
            f"the mark {PHASES} needs the mark ranks: an offload is collective. Nothing was run. "
            "Add for example @pytest.mark.ranks(2).",
            pytrace=False,
        )
    if ranks is None:
        return
    function = getattr(item, "obj", None)
    if type(item) is not pytest.Function or inspect.iscoroutinefunction(function):
        pytest.fail(
            "the mark ranks needs a plain test function or a method of a plain class; nothing "
            "was run. Do not use unittest.TestCase or async.",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run the body of a marked test on ranks, with their result."""
    mark = ranks_mark(pyfuncitem)
    if mark is None:
        return None
    execute(_rank_test(pyfuncitem, mark), mark)
    return True


# ---------------------------------------------------------------------------------------------
# fixtures


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """This rank's number, in a test on ranks."""
    return _only_in_ranks(request, "rank")


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> Any:
    """The number of ranks, in a test on ranks."""
    return _only_in_ranks(request, "world_size")


@pytest.fixture
def assert_no_group_leaks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Check that the test leaves no process group.

    Compares the groups in c10d's tables before and after the test. The failure names the test and
    the groups, which are then destroyed, so that the tests that follow can run. On ranks, it is
    created in each rank.
    """
    if request.node.get_closest_marker(RANKS) is not None:
        yield _MADE_IN_RANKS
        return
    with _assert_no_group_leaks(request.node.nodeid, destroys=True):
        yield


@pytest.fixture
def reloadpg_reloaded(request: pytest.FixtureRequest) -> bool:
    """Whether this is the run with reloads."""
    return bool(request.param)


# ---------------------------------------------------------------------------------------------
# from a test to its ranks


@dataclass(frozen=True)
class RankTest:
    """The description of a test function that is sent to its ranks.

    Attributes:
        holder: qualified name of the function's class; None for a module-level function.
        values: arguments created in the test's process.
        test: the id of the test.
        checks_leaks: whether to check that no group is left.
        arguments: the plugin's fixtures that the function takes as arguments.
        phases: whether to reload between phases; False for the unchanged run.
    """

    module: str
    file: str
    holder: str | None
    name: str
    values: Mapping[str, Any]
    test: str
    checks_leaks: bool
    arguments: tuple[str, ...]
    backend: str | None
    phases: bool
    timeout: float


def _rank_test(item: pytest.Function, mark: RanksMark) -> RankTest:
    parameters = inspect.signature(item.obj).parameters
    in_ranks = [name for name, value in item.funcargs.items() if value is _MADE_IN_RANKS]
    reloaded = hasattr(item, "callspec") and item.callspec.params.get(_RELOADED)
    return RankTest(
        module=item.module.__name__,
        file=str(item.path),
        holder=None if item.cls is None else item.cls.__qualname__,
        name=item.originalname,
        values={n: v for n, v in item.funcargs.items() if n in parameters and n not in in_ranks},
        test=item.nodeid,
        checks_leaks=LEAKS in in_ranks,
        arguments=tuple(name for name in in_ranks if name in parameters),
        backend=mark.backend,
        phases=bool(reloaded),
        timeout=_limit(item, mark.timeout),
    )


_MADE_IN_RANKS = object()
"""In the test's process, the value of a fixture that each rank has or creates."""


def _only_in_ranks(request: pytest.FixtureRequest, name: str) -> Any:
    if request.node.get_closest_marker(RANKS) is None:
        pytest.fail(
            f"the fixture {name} is for tests on ranks; nothing was run. Add for example "
            "@pytest.mark.ranks(2).",
            pytrace=False,
        )
    return _MADE_IN_RANKS


def _limit(node: pytest.Item, named: timedelta | float | None) -> float:
    """The time limit of a test on ranks, in seconds."""
    given = float(node.config.getini(_TIMEOUT)) if named is None else named
    return as_timedelta(given, _TIMEOUT if named is None else "timeout").total_seconds()


def execute(test: RankTest, mark: RanksMark) -> None:
    """Run the body of a test on ranks; raise pytest's exceptions for their result."""
    from .ranks import RanksFailedError, run_ranks

    try:
        ends: list[tuple[str, str]] = run_ranks(
            run_body,
            mark.world_size,
            args=(test, _compiled(test.file)),
            timeout=test.timeout,
            env={AUTOINSTALL: None, **(mark.env or {})},
            preload=mark.preload,
            store=mark.store,
            standins=mark.standins,
        )
    except RanksFailedError as error:
        head, _, details = str(error).partition("\n")
        what = head.rpartition(" (")[0]  # without the advice for callers of run_ranks
        reloads = ", with reloads before each collective phase" if test.phases else ""
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
    made: dict[str, Any] = {"rank": rank, "world_size": world_size}
    with ExitStack() as stack:
        if test.phases:
            # Before the module is loaded: the collectives that it imports are wrapped then.
            stack.enter_context(_reloading(test.timeout))
        function = _load(test, code)
        stack.enter_context(_default_group(test.backend, test.timeout))
        if test.checks_leaks:  # it ends first: the default group's end destroys all groups
            made[LEAKS] = stack.enter_context(_assert_no_group_leaks(test.test))
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


# ---------------------------------------------------------------------------------------------
# leaked groups


def _existing() -> dict[str, str]:
    """The process groups of this process, as text by name. Runs a garbage collection."""
    from ..c10d import tables

    gc.collect()
    return {tables.name_of(group): _text(group) for group in tables.known_groups()}


@contextmanager
def _assert_no_group_leaks(test: str, *, destroys: bool = False) -> Iterator[None]:
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


# ---------------------------------------------------------------------------------------------
# reloads between phases


@contextmanager
def _reloading(timeout: float) -> Iterator[None]:
    """Reload before each phase within this block. The patches remain for the life of the process.

    Raises ``AssertionError`` if the block passed but nothing was offloaded.
    """
    import reloadpg

    offloads: list[bool] = []
    reloadpg.on_report(lambda report: offloads.append(report.changed))
    phases = _Phases(timeout)
    yield
    if not any(offloads):
        why = "there is no reloadable group" if phases.points else "no phase began"
        raise AssertionError(
            f"the mark {PHASES} had nothing to reload: {why}, so this run was the same as one "
            "without reloads. Use a collective of torch.distributed on all ranks, wait for "
            "asynchronous ones, or call reloadpg.offload() and reload()."
        )


class _Phases:
    """The phases of one rank: points at which it reloads."""

    def __init__(self, timeout: float) -> None:
        self.points = 0
        self._timeout = timedelta(seconds=timeout / 2)
        self._thread = threading.get_ident()
        self._depth = 0
        self._pending: set[Any] = set()
        self._watch()

    def _watch(self) -> None:
        """Wrap the functions and the bring-up, for the life of the process."""
        import torch.distributed as dist
        import wrapt

        from ..c10d import creation

        for name in (*_COLLECTIVES, *_POINT_TO_POINT, "init_process_group"):
            original = getattr(dist, name, None)
            if original is None:
                continue
            around = self._initialize if name == "init_process_group" else self._call
            wrapper = wrapt.FunctionWrapper(original, around)
            for module in creation.creator_modules():
                if vars(module).get(name) is original:
                    setattr(module, name, wrapper)

    def _reload(self) -> None:
        """Offload and reload here. Collective over all ranks."""
        import reloadpg

        self.points += 1
        self._depth += 1
        try:
            reloadpg.offload()
            reloadpg.reload()
        finally:
            self._depth -= 1

    def _initialize(
        self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        import torch.distributed as dist

        import reloadpg

        from ..c10d import tables

        if reloadpg.is_installed():
            return wrapped(*args, **kwargs)
        backends = tables.known_backends() - _UNUSABLE
        reloadpg.install(timeout=self._timeout, backends=backends)
        return dist.init_process_group(*args, **kwargs)  # calls the installed wrapper

    def _call(
        self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from torch.distributed import Work

        if self._depth or threading.get_ident() != self._thread:
            return wrapped(*args, **kwargs)
        if wrapped.__name__ in _COLLECTIVES and self._begins(_group_of(wrapped, args, kwargs)):
            self._reload()
        self._depth += 1
        try:
            result = wrapped(*args, **kwargs)
        finally:
            self._depth -= 1
        if isinstance(result, Work):
            return self._watched(result)
        if isinstance(result, list):
            return [self._watched(one) if isinstance(one, Work) else one for one in result]
        return result

    def _begins(self, group: Any) -> bool:
        import torch.distributed as dist

        from ..c10d import tables

        if self._pending or not dist.is_initialized():
            return False
        world = tables.world()
        if tables.is_coalescing(world if group is None else group):
            return False
        if group is None or group is world:
            return True
        return isinstance(group, dist.ProcessGroup) and group.size() == dist.get_world_size()

    def _watched(self, work: Work) -> Any:
        watched = _watched_work()(work, self._pending.discard)
        self._pending.add(watched)
        return watched


def _group_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "group" in kwargs:
        return kwargs["group"]
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments.get("group")
    except TypeError:
        return None  # torch raises the error


@cache
def _watched_work() -> type[Any]:
    """The class of a Work with a callback for its ``wait()``."""
    import wrapt

    class WatchedWork(wrapt.ObjectProxy):  # type: ignore[type-arg]
        def __init__(self, work: Work, waited: Callable[[Any], object]) -> None:
            super().__init__(work)
            self._self_waited = waited

        def wait(self, *args: Any, **kwargs: Any) -> Any:
            result = self.__wrapped__.wait(*args, **kwargs)
            self._self_waited(self)
            return result

        def synchronize(self) -> None:
            self.__wrapped__.synchronize()
            self._self_waited(self)

    return WatchedWork
