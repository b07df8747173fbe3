"""Each message once: one copy a rank, at the line of the program; one a host where all say it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg.testing import simulated

CASES: dict[str, Callable[[int], object]] = {}
"""By name, a program of two ranks that provokes a message of the library."""

EVERY_RANK = {
    "nothing is reloadable": "nothing was released",
    "nothing is reloadable in a block": "nothing was released",
    "created before install": "created before reloadpg.install",
    "a dropped handle": "result() was never called",
    "a communicator that is not reloadable": "not reloadable, keeps its communicator",
}
OF_HOST = {
    "an unknown backend": "RELOADPG_BACKENDS names nonesuch",
    "an untested torch": "is not supported",
    "off": "torch is unchanged, and no group is reloadable",
}
AS_EXCEPTION = {
    "ranks that disagree": "the ranks do not agree",
    "an offloaded group": "the group is offloaded and has no communicator",
    "a release that fails": "failed at",
    "a misspelt set": "declares no such set",
}
"""Words of each message: in the log or as a warning, and as an exception."""


def case(function: Callable[[int], object]) -> Callable[[int], object]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


@case
def nothing_is_reloadable(rank: int) -> None:
    worlds.init()
    reloadpg.install()
    for _ in range(3):
        reloadpg.offload()
        reloadpg.reload()


@case
def nothing_is_reloadable_in_a_block(rank: int) -> None:
    worlds.init()
    reloadpg.install()
    for _ in range(3):
        with reloadpg.offloaded():
            pass


@case
def created_before_install(rank: int) -> None:
    worlds.init()
    kept = dist.new_group()
    reloadpg.install(backends={"gloo"})
    for _ in range(3):
        reloadpg.offload()
        reloadpg.reload()
    del kept


@case
def a_communicator_that_is_not_reloadable(rank: int) -> None:
    reloadpg.install(backends={"gloo"})
    worlds.init()
    world = dist.group.WORLD
    assert world is not None
    kept = dist.new_group()
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, torch.distributed.default_pg_timeout)
    assert alone.size() == 1
    store = dist.PrefixStore("by hand", dist.distributed_c10d._get_default_store())
    made, _ = dist.distributed_c10d._new_process_group_helper(
        2, rank, [0, 1], "gloo", store, "by hand", timeout=torch.distributed.default_pg_timeout
    )
    for _ in range(3):
        reloadpg.offload()
        reloadpg.reload()
    del kept, made


@case
def a_dropped_handle(rank: int) -> None:
    reloadpg.install(backends={"gloo"})
    worlds.init()
    handle = reloadpg.offload(wait=False)
    while not handle.done():
        pass
    handle = None
    reloadpg.reload()


@case
def an_unknown_backend(rank: int) -> None:
    os.environ["RELOADPG_BACKENDS"] = "nonesuch,gloo"
    reloadpg.install()
    dist.init_process_group("gloo")


@case
def an_untested_torch(rank: int) -> None:
    torch.__version__ = "2.99.0"
    reloadpg.install(backends={"gloo"})


@case
def off(rank: int) -> None:
    os.environ["RELOADPG"] = "off"
    for _ in range(2):
        reloadpg.install()


@case
def ranks_that_disagree(rank: int) -> None:
    reloadpg.install(backends={"gloo"})
    worlds.init()
    (reloadpg.offload if rank else reloadpg.reload)()


@case
def an_offloaded_group(rank: int) -> None:
    reloadpg.install(backends={"gloo"})
    worlds.init()
    reloadpg.offload()
    dist.all_reduce(torch.ones(1))


@case
def a_release_that_fails(rank: int) -> None:
    simulated.register()
    reloadpg.install()
    dist.init_process_group("sim")
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        simulated.inject(simulated.Fault("release"))
    reloadpg.offload()


@case
def a_misspelt_set(rank: int) -> None:
    reloadpg.install(backends={"gloo"}, sets={"engine": "vllm.*"})
    worlds.init()
    reloadpg.offload("engin")


@contextmanager
def heard() -> Iterator[list[tuple[str, str, str]]]:
    """Each message of the library at WARNING and above: where from, its text, its file."""
    found: list[tuple[str, str, str]] = []

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(("log", record.getMessage(), ""))

    handler = Log(logging.WARNING)
    logging.getLogger("reloadpg").addHandler(handler)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    logging.getLogger("reloadpg").removeHandler(handler)
    found += [("warning", str(one.message), one.filename) for one in seen]


def messages_of(rank: int, name: str) -> list[tuple[str, str, str]]:
    """What one rank says in a case, with the exception, as its user reads them."""
    with heard() as found:
        try:
            CASES[name](rank)
        except Exception as error:
            found.append(("exception", str(error), ""))
    return [one for one in found if "torch/" not in one[2]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [*EVERY_RANK, *OF_HOST, *AS_EXCEPTION])
def test_each_message_is_given_once(rank: int, name: str) -> None:
    """As a warning that points at the program, as a line of the log, or as an exception."""
    found = messages_of(rank, name)
    if name in AS_EXCEPTION:
        assert [kind for kind, *_ in found] == ["exception"], found
        if rank == 1 or name != "a release that fails":
            assert AS_EXCEPTION[name] in found[0][1], found
        return
    words = {**EVERY_RANK, **OF_HOST}[name]
    copies = [one for one in found if words in one[1]]
    assert len(copies) == (1 if name in EVERY_RANK or rank == 0 else 0), found
    for kind, _, file in copies:
        assert kind == "log" or file == __file__, found
    assert not [one for one in found if one not in copies and "created before" not in one[1]], found


def test_every_case_has_its_words() -> None:
    assert set(CASES) == {*EVERY_RANK, *OF_HOST, *AS_EXCEPTION}
