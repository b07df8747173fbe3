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

CASES: dict[str, Callable[[int], object]] = {}
"""By name, a program of two ranks that provokes a message of the library."""

EVERY_RANK = {
    "nothing is reloadable": "nothing was released",
    "created before install": "created before reloadpg.install",
    "a communicator that is not reloadable": "not reloadable, keeps its communicator",
}
OF_HOST = {
    "an unknown backend": "RELOADPG_BACKENDS names nonesuch",
    "off": "torch is unchanged, and no group is reloadable",
}
"""Words of each message, in the log or as a warning."""


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
def an_unknown_backend(rank: int) -> None:
    os.environ["RELOADPG_BACKENDS"] = "nonesuch,gloo"
    reloadpg.install()
    dist.init_process_group("gloo")


@case
def off(rank: int) -> None:
    os.environ["RELOADPG"] = "off"
    for _ in range(2):
        reloadpg.install()


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [*EVERY_RANK, *OF_HOST])
def test_each_message_is_given_once(rank: int, name: str) -> None:
    """As a warning that points at the program, or as a line of the log."""
    with heard() as found:
        CASES[name](rank)
    ours = [one for one in found if "torch/" not in one[2]]
    words = {**EVERY_RANK, **OF_HOST}[name]
    copies = [one for one in ours if words in one[1]]
    assert len(copies) == (1 if name in EVERY_RANK or rank == 0 else 0), ours
    for kind, _, file in copies:
        assert kind == "log" or file == __file__, ours
    assert not [one for one in ours if one not in copies and "created before" not in one[1]], ours
