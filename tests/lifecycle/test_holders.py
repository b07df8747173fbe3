"""Holders of communication memory that follow the offloads and reloads of a set."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg.errors import InvalidOptionError, RebuildError, ReleaseError

pytestmark = pytest.mark.matrix


class Buffer:
    """Memory that its ranks allocate and free together, by a sum over the group."""

    def __init__(self, group: Any, name: str, log: list[str]) -> None:
        self.group, self.name, self.log = group, name, log
        self.size = 100
        self.fail = ""

    def release(self) -> None:
        self._do("release", 0)

    def restore(self) -> None:
        self._do("restore", 100)

    def _do(self, what: str, size: int) -> None:
        if self.fail == what:
            self.fail = ""
            raise ValueError(f"{what} of {self.name}")
        if self.group is not None:
            total = torch.ones(1)
            dist.all_reduce(total, group=self.group)
            assert total.item() == self.group.size()
        self.log.append(f"{what} {self.name}")
        self.size = size

    def register(self, **options: Any) -> Any:
        given = {"group": self.group, "collective": self.group is not None, **options}
        return reloadpg.register_holder(
            self.name,
            release=self.release,
            restore=self.restore,
            bytes=lambda: self.size,
            **given,
        )


def start(timeout: float = 60, **options: Any) -> Any:
    reloadpg.install(backends={worlds.BACKEND}, timeout=timeout, **options)
    worlds.init()
    return dist.group.WORLD


def states() -> dict[str, str]:
    return {one.name: one.state for one in reloadpg.status().holders}


@pytest.mark.ranks(3)
def test_holders_are_released_before_their_groups_and_restored_after_them(rank: int) -> None:
    """In one order on all ranks, though each registers them in another one. The report has them."""
    world = start()
    pair = dist.new_group([1, 2])
    log: list[str] = []
    all_of_them = [Buffer(world, "b", log), Buffer(world, "a", log), Buffer(None, "local", log)]
    if rank:
        all_of_them.append(Buffer(pair, "0", log))
    removes = [one.register() for one in all_of_them[:: 1 if rank else -1]]
    reloadpg.on_offload(lambda: log.append("on_offload"))
    reloadpg.on_reload(lambda: log.append("on_reload"))
    names = ["a", "b", *["0"] * bool(rank), "local"]  # those of the default group first
    for cycle in range(2):
        log.clear()
        report = reloadpg.offload()
        assert log == ["on_offload", *[f"release {name}" for name in reversed(names)]]
        assert [(one.name, one.bytes, one.state) for one in report.holders] == [
            (name, 100, "released") for name in reversed(names)
        ]
        assert states() == dict.fromkeys(names, "released")
        log.clear()
        assert not reloadpg.offload().holders
        report = reloadpg.reload()
        assert log == [*[f"restore {name}" for name in names], "on_reload"]
        assert [(one.name, one.state) for one in report.holders] == [(n, "held") for n in names]
        assert world.generation == cycle + 1
    for remove in removes:
        remove()
    log.clear()
    reloadpg.offload()
    assert log == ["on_offload"]
    assert states() == {}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["release", "restore"])
def test_a_failure_is_named_and_the_next_reload_restores_everything(what: str, rank: int) -> None:
    """On all ranks: the groups have failed, as after any failure; ``restore`` of all is called."""
    world = start()
    log: list[str] = []
    one, other = Buffer(world, "one", log), Buffer(world, "other", log)
    for each in (one, other):
        each.register()
    if what == "restore":
        reloadpg.offload()
    if rank == 0:
        one.fail = what
    else:  # it does not wait for rank 0 in the collective
        one.group = None
    own: Any = ReleaseError if what == "release" else RebuildError
    error = own if rank == 0 else reloadpg.PeerFailedError
    with pytest.raises(error, match=f"holder one on rank 0: ValueError: {what} of one"):
        reloadpg.offload() if what == "release" else reloadpg.reload()
    assert states() == {"one": "failed", "other": "failed"}
    assert reloadpg.status().state == "failed"
    one.group = world
    log.clear()
    reloadpg.reload()
    assert log == ["restore one", "restore other"]
    assert states() == {"one": "held", "other": "held"}


@pytest.mark.ranks(2)
def test_a_rank_without_the_holder_is_named(rank: int) -> None:
    """The ranks agree on collective holders before anything is changed, and not on local ones."""
    world = start()
    log: list[str] = []
    remove = Buffer(world, "buffer", log).register() if rank == 0 else lambda: None
    if rank == 1:
        Buffer(None, "local", log).register()
    with pytest.raises(reloadpg.DisagreementError, match=r"holder buffer"):
        reloadpg.offload()
    assert log == []
    assert world.state == "live"
    remove()
    assert reloadpg.offload().changed


@pytest.mark.ranks(2, env=worlds.SILENCE)
def test_a_rank_that_hangs_in_a_holder_is_named(rank: int) -> None:
    """With what it is doing, after the timeout of the operation."""
    world = start(timeout=3)
    hold = threading.Event()
    reloadpg.register_holder(
        "stuck",
        release=lambda: hold.wait(60) if rank == 1 else None,
        restore=lambda: None,
        group=world,
        collective=True,
    )
    with pytest.raises((reloadpg.RendezvousTimeoutError, reloadpg.PeerFailedError)) as caught:
        reloadpg.offload()
    hold.set()
    assert "rank 1" in str(caught.value)
    assert "releasing holder stuck" in str(caught.value)


@pytest.mark.ranks(2)
def test_a_recovery_restores_the_holders_of_its_groups(rank: int) -> None:
    """Their communicators have ended without a release. Holders without a group are unchanged."""
    world = start(recoverable=True)
    log: list[str] = []
    Buffer(world, "buffer", log).register()
    Buffer(None, "local", log).register()
    report = reloadpg.recovery.recover("a test")
    assert log == ["restore buffer"]
    assert [one.name for one in report.holders] == ["buffer"]


@pytest.mark.ranks(2)
def test_a_holder_follows_its_set() -> None:
    start(sets={"engine": "no.module"})
    with reloadpg.region("engine"):
        engine = dist.new_group([0, 1])
    log: list[str] = []
    Buffer(engine, "of the engine", log).register()
    Buffer(None, "of the set", log).register(set="engine")
    Buffer(dist.group.WORLD, "of the trainer", log).register()
    reloadpg.offload("engine")
    assert log == ["release of the set", "release of the engine"]
    reloadpg.offload("trainer")
    reloadpg.reload()
    assert log[2] == "release of the trainer"
    dist.destroy_process_group(engine)
    assert "of the engine" not in states()


@pytest.mark.ranks(2)
def test_restore_may_destroy_and_create_groups() -> None:
    """As TransformerEngine's userbuffers do; reloadable ones, which the next offload releases."""
    world = start()
    mine = [dist.new_group([0, 1])]

    def restore() -> None:
        dist.destroy_process_group(mine.pop())
        mine.append(dist.new_group([0, 1]))
        dist.all_reduce(torch.ones(1), group=mine[-1])

    reloadpg.register_holder("owner", release=print, restore=restore, collective=True)
    for _ in range(2):
        names = {one.name for one in reloadpg.offload().groups}
        assert names == {world.group_name, mine[0].group_name}
        reloadpg.reload()
        total = torch.ones(1)
        dist.all_reduce(total, group=mine[0])
        assert total.item() == 2.0
        assert len(reloadpg.status().groups) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"name": ""}, {"name": "taken"}, {"release": None}, {"group": 3}, {"set": 3}],
    ids=str,
)
def test_wrong_holders_are_refused(wrong: dict[str, Any]) -> None:
    remove = reloadpg.register_holder("taken", release=print, restore=print)
    given: dict[str, Any] = {"name": "new", "release": print, "restore": print, **wrong}
    try:
        with pytest.raises(InvalidOptionError):
            reloadpg.register_holder(given.pop("name"), **given)
    finally:
        remove()
