"""pytest plugin: tests whose body runs on real ranks.

pytest loads it by its entry point in every project of an environment, so it imports neither torch
nor the rest of the library until a test asks for something::

    @pytest.mark.ranks(2, backend="gloo")
    def test_sum(rank, world_size):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world_size

``ranks(world_size, *, timeout, backend, env, preload, store, standins)`` runs the body in
``world_size`` processes and fails with every failed rank's traceback. ``backend`` creates a
default group before the body, which is destroyed after it (None: no group); ``timeout`` is a
timedelta or seconds (default: the ini option ``reloadpg_timeout``); ``env`` are variables of the
ranks, where None removes one; the rest are arguments of :func:`reloadpg.testing.run_ranks`.

Do not assume that the test's process takes part. On ranks, the fixtures of this plugin are created
in each rank; all other values are created once, in the test's process, and pickled. Ranks load the
test's module again, with pytest's rewriting of assertions if the installed pytest allows it, but no
``conftest.py``; ``setup_method`` and similar are not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["assert_no_group_leaks", "rank", "world_size"]

MARK = "ranks"
TIMEOUT = "reloadpg_timeout"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: the default timeout of tests on ranks, and the use of stand-ins."""
    parser.addini(TIMEOUT, "seconds that tests on ranks may take (reloadpg)", default="60")
    what = "run tests on ranks over stand-ins for CUDA and NCCL, without a GPU (reloadpg)"
    group = parser.getgroup("reloadpg")
    group.addoption("--reloadpg-standins", action="store_true", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, for ``--strict-markers``."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(world_size, *, timeout=None, backend=None, env=None, preload=(), "
        'store="parent", standins=None): run the body on this number of real rank processes',
    )
    if config.getoption("--reloadpg-standins"):
        from . import standins

        try:
            standins.enable()
        except standins.StandinsError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse the mark where it cannot be used, before any fixture is created."""
    if item.get_closest_marker(MARK) is None:
        return
    if type(item) is not pytest.Function or inspect.iscoroutinefunction(item.obj):
        pytest.fail(
            "the mark ranks needs a plain test function or a method of a plain class; nothing "
            "was run. Do not use unittest.TestCase or async.",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run the body of a marked test on ranks, with their result."""
    mark = pyfuncitem.get_closest_marker(MARK)
    if mark is None:
        return None
    from . import _body

    default = float(pyfuncitem.config.getini(TIMEOUT))
    _body.run(pyfuncitem, default, *mark.args, **mark.kwargs)
    return True


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
    the groups. The groups are then destroyed for the tests that follow. On ranks, the fixture is
    created in each rank.
    """
    from . import _body

    if request.node.get_closest_marker(MARK) is not None:
        yield _body.MadeInRanks
        return
    with _body.no_group_leaks(request.node.nodeid, destroys=True):
        yield


def _only_in_ranks(request: pytest.FixtureRequest, name: str) -> Any:
    if request.node.get_closest_marker(MARK) is None:
        pytest.fail(
            f"the fixture {name} is for tests on ranks; nothing was run. Add for example "
            "@pytest.mark.ranks(2).",
            pytrace=False,
        )
    from . import _body

    return _body.MadeInRanks
