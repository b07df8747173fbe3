"""Callbacks that users register."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import attempt, base_store

import reloadpg
from reloadpg.testing import faults, run_ranks, simulated
from reloadpg.testing.faults import Fault


@pytest.mark.parametrize("where", ["on_offload", "on_reload", "on_report"])
@pytest.mark.parametrize("callback", [None, 3, "a name"])
def test_a_callback_that_is_not_callable_is_refused(where: str, callback: Any) -> None:
    """The registration raises, not each later operation."""
    register: Callable[[Any], object] = getattr(reloadpg, where)
    with pytest.raises(
        reloadpg.errors.InvalidOptionError, match=f"{where}.*nothing was registered"
    ):
        register(callback)


def _late(rank: int, world_size: int) -> str:
    """Rank 1 raises in its callback; that of rank 0 returns after rank 1 has timed out."""
    os.environ |= worlds.SILENCE
    reloadpg.install(backends={"gloo"}, timeout=60)
    dist.init_process_group("gloo")
    store = base_store().clone()

    def callback() -> None:
        if rank == 1:
            store.wait(["in its callback"], timedelta(minutes=2))
            raise ValueError("of the callback")
        store.set("in its callback", "")
        store.wait(["left"], timedelta(minutes=2))

    reloadpg.on_offload(callback)
    seen = attempt(reloadpg.offload)
    store.set("left", "")
    return seen.text


@pytest.mark.slow
def test_a_rank_that_was_late_in_a_callback_is_named() -> None:
    """Its own error says that it arrived too late; the other rank's, that it did not respond."""
    late, first = run_ranks(_late, 2, timeout=240)
    assert "No response since then from rank 0" in first
    assert "Rank 1 failed first" in late or "rank 1 failed" in late
    assert "This rank arrived too late" in late
    assert "No response" not in late


def _reload(rank: int, size: int) -> bool:
    """Rank 1 is held in its rebuild until rank 0 has finished its own; whether it was live."""
    simulated.register()
    reloadpg.install()
    dist.init_process_group(simulated.NAME)
    store, found = base_store().clone(), []

    def held(_: Any) -> None:
        store.wait(["rank 0 is done"], timedelta(minutes=2))
        store.set("rank 1 is done", "")

    def done(_: Any = None) -> None:
        store.set("rank 0 is done", "")

    def callback() -> None:
        found.append(store.check(["rank 1 is done"]))
        done()

    reloadpg.on_reload(callback)
    reloadpg.offload()
    if rank == 1:
        faults.inject(Fault("create", "call", moment="after", call=held))
        reloadpg.reload()
    else:
        with faults.inject(
            Fault("barrier", "call", operation="reload.done", moment="before", call=done)
        ):
            reloadpg.reload()
    return found[0]


def test_a_callback_after_a_reload_runs_once_all_groups_are_live_on_all_ranks() -> None:
    assert run_ranks(_reload, 2, timeout=240) == [True, True]


def gloo(**options: Any) -> None:
    reloadpg.install(backends={worlds.BACKEND}, timeout=60, **options)
    worlds.init()


def failing(calls: list[str], name: str) -> Callable[[], None]:
    """A callback that raises in its first call."""

    def call() -> None:
        calls.append(name)
        if calls.count(name) == 1:
            raise ValueError(f"of {name}.")

    return call


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["callback", "disagreement"])
def test_a_reload_after_an_offload_that_failed_calls_its_callbacks(where: str, rank: int) -> None:
    """What ``on_offload`` has freed is created again, though no group was released."""
    gloo(sets="engine")
    calls: list[str] = []
    group = dist.new_group([0, 1])
    reloadpg.on_offload(lambda *_: calls.append("before"), group=group)  # type: ignore[arg-type]
    reloadpg.on_reload(lambda *_: calls.append("after"), group=group)  # type: ignore[arg-type]
    reloadpg.on_reload(lambda: calls.append("on_reload"))
    reloadpg.on_offload(dist.barrier)  # the other rank must have entered when one fails
    if where == "callback" and rank == 0:
        reloadpg.on_offload(failing([], "ours"))
    with pytest.raises(reloadpg.ReloadpgError, match=r"of ours|chosen sets"):
        reloadpg.offload(*(["trainer"] if where == "disagreement" and rank == 0 else []))
    assert group.state == "live"  # type: ignore[union-attr]
    called = ["before"] if where == "disagreement" or rank == 1 else []
    assert calls == called
    assert not reloadpg.reload().changed
    assert calls == [*called, "after", "on_reload"]
    calls.clear()
    reloadpg.offload()
    reloadpg.reload()
    assert calls == ["before", "after", "on_reload"]


@pytest.mark.ranks(2)
def test_the_rank_whose_callback_failed_is_told_the_state_and_the_remedy(rank: int) -> None:
    """As its peers are; a text that ends with a full stop has one."""
    gloo()
    if rank == 0:
        reloadpg.on_offload(failing([], "an offload"))
        reloadpg.on_reload(failing([], "a reload"), before=True)
    with pytest.raises(reloadpg.ReloadpgError, match="ValueError: of an offload") as failed:
        reloadpg.offload()
    assert "then call offload() again on all ranks" in str(failed.value)
    assert ".." not in str(failed.value)
    assert ("No group was changed on any rank." in str(failed.value)) or rank == 1
    reloadpg.offload()
    with pytest.raises(reloadpg.ReloadpgError, match="ValueError: of a reload") as failed:
        reloadpg.reload()
    assert "then call reload() again on all ranks" in str(failed.value)
    assert ("The groups are still offloaded on all ranks." in str(failed.value)) or rank == 1
    assert dist.group.WORLD.state == "offloaded"  # type: ignore[union-attr]
    reloadpg.reload()
    assert worlds.summed(dist.group.WORLD, rank) == 3.0


@pytest.mark.ranks(2)
def test_callbacks_of_one_rank_add_no_barrier(rank: int) -> None:
    """An operation has the same barriers on all ranks, whoever has callbacks."""
    gloo()
    if rank == 0:
        reloadpg.on_offload(lambda: None)
        reloadpg.on_reload(lambda: None)
    offload, reload = reloadpg.offload(), reloadpg.reload()
    spans = [span.name for report in (offload, reload) for span in report.spans if span.is_wait]
    assert spans == ["wait.enter", "wait.released", "wait.enter", "wait.done"]
