"""The failures of ``docs/failures.md``: a test names each, and some have their tests here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.documents import ROOT
from helpers.worlds import sums_right
from integrations.stand_ins import BYTES, StandInSaver

import reloadpg
from reloadpg.integrations import MemorySaver, colocated
from reloadpg.testing import simulated

OPEN: dict[int, str] = {}
"""Failures without a test, and what it would show."""

CITED = re.compile(r"failures?[ _]((?:\d+(?:, | and | to |,? *\n *)?)+)", re.IGNORECASE)


def cited(text: str) -> Iterator[int]:
    """The numbers in ``failure 9``, ``failures 9, 10`` and ``failures 4 to 6``."""
    for match in CITED.finditer(text):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", match[1]):
            yield from range(int(first), int(last or first) + 1)


def test_each_failure_is_cited_by_a_test() -> None:
    """In words such as ``failure 9``; a number that has a test now is no longer open."""
    page = (ROOT / "docs" / "failures.md").read_text()
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)]
    assert numbers == [*range(1, len(numbers) + 1)]
    tests = [*Path(__file__).parent.rglob("test_*.py"), *Path(__file__).parent.rglob("*_*.py")]
    named = {number for path in {*tests} for number in cited(path.read_text())}
    assert [number for number in numbers if number not in named | OPEN.keys()] == []
    assert [number for number in OPEN if number in named] == []
    assert [number for number in named if number > len(numbers)] == []


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_a_library_that_caches_by_the_group_is_called_before_the_release() -> None:
    """Its entry is of a generation that has ended, also where it has no callback (failure 33)."""
    reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta(seconds=60))
    worlds.init()
    group: Any = dist.new_group([0, 1])
    cache: dict[Any, tuple[int, Any]] = {}

    def handle() -> Any:
        if group not in cache:
            cache[group] = group.generation, group._get_backend(worlds.device())
        return cache[group]

    first = handle()
    with reloadpg.offloaded():
        pass
    assert handle() is first  # object and hash are those of before
    assert first[0] != group.generation  # so this is how a library sees it
    handle_of_name = dist.distributed_c10d._resolve_process_group(group.group_name)
    assert handle_of_name is group

    remove = reloadpg.on_offload(cache.clear)
    with reloadpg.offloaded():
        assert cache == {}
    assert handle()[0] == group.generation
    assert sums_right(group)
    remove()


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_one_communicator_can_stay_alive() -> None:
    """For a runtime that breaks when its last communicator goes (failure 39): ``exclude``."""
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    reloadpg.install(exclude="anchor", timeout=timedelta(seconds=60))
    dist.init_process_group("sim")
    anchor = dist.new_group([0, 1], group_desc="anchor")
    assert sums_right(None, anchor)
    for _ in range(2):
        with reloadpg.offloaded():
            assert simulated.stats().live == 1
            assert sums_right(anchor)
        assert sums_right(None, anchor)


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_graphs_and_buffers_are_dropped_before_groups_and_memory() -> None:
    """And captured again after both have returned (failure 40), by the callbacks of an offload."""
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    reloadpg.install(timeout=timedelta(seconds=60))
    dist.init_process_group("sim")
    bare = StandInSaver()
    events: list[tuple[str, bool, bool]] = []

    def note(what: str) -> None:
        is_paused = "pause" in bare.calls[-1:]
        events.append((what, simulated.stats().held_bytes > 0, is_paused))

    with bare.preloaded():
        assert sums_right(None)
        reloadpg.on_offload(lambda: note("drop"))
        reloadpg.on_reload(lambda: (sums_right(None), note("capture")))
        saver = MemorySaver(bare)
        with colocated(saver=saver):
            note("rollout")
        saver.close()
    assert events == [
        ("drop", True, False),
        ("rollout", False, True),
        ("capture", True, False),
    ]
    assert torch.distributed.is_initialized()
