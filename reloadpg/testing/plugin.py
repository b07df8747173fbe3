"""pytest plugin: tests whose body runs on real ranks, on a simulated accelerator, with reloads.

pytest loads it by its entry point in every project of an environment, so it imports neither torch
nor the rest of the library until a test asks for something::

    @pytest.mark.ranks(2, backend="gloo")
    def test_sum(rank, world_size):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world_size

    @pytest.mark.ranks(2)
    @pytest.mark.reload_each_phase
    def test_training(simulated_accelerator):
        dist.init_process_group("sim")
        ...

``ranks(world_size, *, timeout, backend, env, preload, start_method, store, standins)`` runs the
body in ``world_size`` processes and fails with every failed rank's traceback.
``reload_each_phase`` runs the test twice: unchanged, and with an offload and a reload before each
collective phase (``_plugin_checks`` defines a phase and the requirements on the test).

Do not assume that the test's process takes part. On ranks, the fixtures of this plugin are created
in each rank; all other values are created once, in the test's process, and pickled. Ranks load the
test's module again but no ``conftest.py``; ``setup_method`` and similar are not called.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ..settings import as_timedelta
from ._plugin_body import RankTest, execute
from ._plugin_marks import PHASES, POINT, RANKS, PhasesMark, RanksMark, failed, mark_of

__all__ = [
    "assert_no_group_leaks",
    "rank",
    "reload_point",
    "run_ranks",
    "simulated_accelerator",
    "world_size",
]

_TIMEOUT = "reloadpg_timeout"
_STANDINS = "reloadpg_standins"
_RELOADED = "reloadpg_reloaded"
_SURVIVAL = "--reloadpg-survival"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: the default timeout of tests on ranks, and the use of stand-ins."""
    parser.addini(_TIMEOUT, "seconds that tests on ranks may take (reloadpg)", default="60")
    what = "run tests on ranks over stand-ins for CUDA and NCCL, without a GPU (reloadpg)"
    parser.addini(_STANDINS, what, type="bool", default=False)
    group = parser.getgroup("reloadpg")
    group.addoption("--reloadpg-standins", action="store_true", help=what)
    group.addoption(
        _SURVIVAL,
        metavar="MODULE:FUNCTION",
        help="test what must survive a reload, with the groups that this function creates, and "
        "nothing else (reloadpg)",
    )
    group.addoption(
        f"{_SURVIVAL}-ranks", type=int, default=2, metavar="N", help="on N ranks (default: 2)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks, for ``--strict-markers``."""
    for line in (
        f"{RANKS}(world_size, *, timeout=None, backend=None, env=None, preload=(), "
        'start_method=None, store="parent", standins=None): run the body on this number of '
        "real rank processes",
        f"{PHASES}(*, every_group=False, options=None): run the test as it is, and again with an "
        "offload and a reload before each collective phase; needs the mark ranks",
    ):
        config.addinivalue_line("markers", line)
    if config.getoption("--reloadpg-standins") or config.getini(_STANDINS):
        from . import standins

        try:
            standins.enable()
        except standins.StandinsError as error:
            raise pytest.UsageError(str(error)) from None
    if named := config.getoption(_SURVIVAL):
        _survival(config, str(named))


def _survival(config: pytest.Config, named: str) -> None:
    """Run the file of the survival tests only, with the function that the user named."""
    ranks = config.getoption(f"{_SURVIVAL}-ranks")
    if ranks < 1:
        raise pytest.UsageError(f"{_SURVIVAL}-ranks {ranks}: must be at least 1; nothing was run.")
    module, colon, name = named.partition(":")
    try:
        if not (module and colon and name):
            raise ValueError("a module and a function are separated by a colon")
        sys.path.insert(0, str(config.invocation_params.dir))  # as python -m pytest does
        function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise TypeError(f"{name} is not a function")
    except Exception as error:
        raise pytest.UsageError(
            f"{_SURVIVAL} {named}: {type(error).__name__}: {error}; nothing was run. Name a "
            "function without arguments that creates the groups of a trainer, such as "
            "mytrainer.parallel:create_groups."
        ) from None
    from . import survival

    config.stash[survival.FUNCTION] = function
    config.args[:] = [str(Path(survival.__file__))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create two tests if the mark requests reloads: unchanged, and reloaded."""
    if metafunc.definition.get_closest_marker(PHASES) is not None:
        metafunc.fixturenames.append(_RELOADED)
        metafunc.parametrize(_RELOADED, (False, True), ids=("as-is", "reloaded"), indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the marks before any fixture is created."""
    ranks, phases = mark_of(item, RanksMark), mark_of(item, PhasesMark)
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
    mark = mark_of(pyfuncitem, RanksMark)
    if mark is None:
        return None
    execute(_rank_test(pyfuncitem, mark), mark)
    return True


# ---------------------------------------------------------------------------------------------
# fixtures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shorten the line of the summary to the rank and the reason. On CI, pytest shows the whole
    message there, so the output of the ranks would appear twice.
    """
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if call.when == "call" and crash is not None and mark_of(item, RanksMark) is not None:
        crash.message = crash.message.partition("\n")[0]
    return report


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """``reloadpg.testing.run_ranks`` bound to this test.

    Temporary files of the ranks go to the test's ``tmp_path``, and the time limit is that of the
    test (the ini option ``reloadpg_timeout``) unless the call names one. Otherwise as described
    there: ``run_ranks(fn, world_size, args=..., kwargs=...)`` with a module-level function.
    """
    from .ranks import run_ranks as run

    limit = _limit(request.node, None)

    def bound(fn: Any, world_size: int, **settings: Any) -> list[Any]:
        env = {"TMPDIR": str(tmp_path), **(settings.pop("env", None) or {})}
        return run(fn, world_size, env=env, **{"timeout": limit, **settings})

    return bound


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """This rank's number, in a test on ranks."""
    return _only_in_ranks(request, "rank")


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> Any:
    """The number of ranks, in a test on ranks."""
    return _only_in_ranks(request, "world_size")


@pytest.fixture
def reload_point(request: pytest.FixtureRequest) -> Any:
    """A function that offloads and reloads; call it on all ranks, at least once.

    Without the mark ``reload_each_phase``, each call is a cycle: the plugin installs the library
    before the default group is created, with the groups of every backend, if the body does not. A
    test that has reloaded no group fails.

    With that mark, it adds phases that the mark does not detect, since C++ starts their collectives
    (the backward pass of DDP, functional collectives). In the unchanged run it does nothing.
    """
    return _only_in_ranks(request, POINT)


@pytest.fixture
def simulated_accelerator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The simulated accelerator: backend ``sim`` is registered and set up for this test.

    The value is the module ``reloadpg.testing.simulated``. At the end, faults and settings are
    removed, and a passed test fails if its communicators still exist or were dropped without being
    released. Settings of ``simulated.configure`` may be passed by indirect parametrization; the
    default is 1 MiB per communicator. On ranks, it is created in each rank.
    """
    yield from _here_or_in_ranks(request, "simulated_accelerator")


@pytest.fixture
def assert_no_group_leaks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Check that the test leaves no process group.

    Compares c10d's tables, the C++ registry of names, reloadable groups and communicators of the
    simulated accelerator before and after the test. The value is a context manager that does this
    for a block: ``with assert_no_group_leaks(): ...``. On ranks, it is created in each rank.
    """
    yield from _here_or_in_ranks(request, "assert_no_group_leaks")


@pytest.fixture
def reloadpg_reloaded(request: pytest.FixtureRequest) -> bool:
    """Whether this is the run with reloads."""
    return bool(request.param)


# ---------------------------------------------------------------------------------------------
# from a test to its ranks


def _rank_test(item: pytest.Function, mark: RanksMark) -> RankTest:
    parameters = inspect.signature(item.obj).parameters
    in_ranks = {n: v for n, v in item.funcargs.items() if isinstance(v, _MadeInRanks)}
    reloaded = hasattr(item, "callspec") and item.callspec.params.get(_RELOADED)
    return RankTest(
        module=item.module.__name__,
        file=str(item.path),
        holder=None if item.cls is None else item.cls.__qualname__,
        name=item.originalname,
        values={n: v for n, v in item.funcargs.items() if n in parameters and n not in in_ranks},
        fixtures={n: v.settings for n, v in in_ranks.items() if v.settings is not None},
        arguments=tuple(name for name in in_ranks if name in parameters),
        backend=mark.backend,
        phases=mark_of(item, PhasesMark) if reloaded else None,
        points=POINT in in_ranks and mark_of(item, PhasesMark) is None,
        timeout=_limit(item, mark.timeout),
    )


class _MadeInRanks:
    """Placeholder in the test's process for a value that each rank has or creates."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        self.settings = settings  # of its fixture; None if it is not a fixture there


def _only_in_ranks(request: pytest.FixtureRequest, name: str) -> Any:
    if request.node.get_closest_marker(RANKS) is None:
        pytest.fail(
            f"the fixture {name} is for tests on ranks; nothing was run. Add for example "
            "@pytest.mark.ranks(2).",
            pytrace=False,
        )
    return _MadeInRanks(None)


def _here_or_in_ranks(request: pytest.FixtureRequest, name: str) -> Iterator[Any]:
    settings = dict(getattr(request, "param", {}))
    if request.node.get_closest_marker(RANKS) is not None:
        yield _MadeInRanks(settings)
        return
    from ._plugin_checks import CONTEXTS

    with CONTEXTS[name](**settings) as value:
        yield value


def _limit(node: pytest.Item, named: timedelta | float | None) -> float:
    """The time limit of a test on ranks, in seconds."""
    given = str(node.config.getini(_TIMEOUT))
    try:
        value = float(given) if named is None else named
        return as_timedelta(value, _TIMEOUT if named is None else "timeout").total_seconds()
    except ValueError:
        raise failed(
            f"{_TIMEOUT} = {given} is not a number of seconds; nothing was run. Correct the ini "
            "option."
        ) from None
