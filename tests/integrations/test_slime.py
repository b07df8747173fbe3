"""The call sequences of slime and miles through the drop-in, with real ranks.

The actors here make the calls of the two frameworks' Megatron actors (``init``, ``sleep``,
``wake_up``, ``update_weights``), in their order, with four pipeline stages.
"""

from __future__ import annotations

import logging.handlers
import os
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.worlds import sums_right
from integrations.stand_ins import BYTES

import reloadpg
from reloadpg.integrations.slime import (
    ReloadableProcessGroup,
    destroy_process_groups,
    monkey_patch_torch_dist,
    old_new_group_dict,
    register_default_process_group,
    reload_process_groups,
)
from reloadpg.testing import simulated

pytestmark = [pytest.mark.matrix, worlds.unbound_only]

CYCLES = 3
GIVEN, REGISTERED = timedelta(minutes=30), timedelta(minutes=7)

GROUPS = {
    "TP": [[0], [1], [2], [3]],
    "PP": [[0, 1, 2, 3]],
    "EMBEDDING": [[0, 3]],
    "POSITION_EMBEDDING": [[0]],
    "DP": [[0, 2], [1, 3]],
    "DP_CP": [[0, 2], [1, 3]],
}
"""Megatron's kinds of groups for pipeline parallel 4: overlapping, and not on all ranks alike."""


def timeout_of_world() -> float | None:
    return reloadpg.status().groups[0].timeout_s


@dataclass
class Actor:
    """What both frameworks' actors do with groups; miles keeps ``asleep``, slime does not."""

    rank: int
    framework: str
    groups: dict[str, Any] = field(default_factory=dict)
    asleep: bool = False

    def init(self) -> None:
        monkey_patch_torch_dist()
        monkey_patch_torch_dist()
        worlds.init("sim", timeout=GIVEN)
        new_group = getattr(dist, "old_new_group", dist.new_group)  # slime: init_gloo_group()
        self.gloo = new_group(backend="gloo")
        if self.framework == "slime":
            for _ in range(2):
                register_default_process_group(timeout=REGISTERED)
        self.world = dist.group.WORLD
        for kind, rank_lists in GROUPS.items():
            for ranks in rank_lists:
                group = dist.new_group(ranks, timeout=GIVEN, group_desc=kind)
                if self.rank in ranks:
                    self.groups[kind] = group
        monkey_patch_torch_dist()

    def sleep(self) -> Any:
        if self.framework == "miles" and self.asleep:
            return None
        report = destroy_process_groups()
        assert report is not None
        assert [text for text in report.warnings if "not reloadable" in text] == []
        self.asleep = True
        return report

    def wake_up(self) -> Any:
        report = reload_process_groups()
        if self.framework == "slime":
            dist.barrier()  # as slime primes WORLD where there are more than two stages
        self.asleep = False
        return report

    def update_weights(self) -> None:
        temporary = self.framework == "slime" or self.asleep
        if temporary:
            reload_process_groups()
        weight = torch.full((3,), float(self.rank))
        dist.broadcast(weight, 3, group=self.groups["PP"])
        dist.barrier(group=self.gloo)
        assert weight.tolist() == [3.0] * 3
        assert sums_right(self.groups["DP"])
        if temporary:
            destroy_process_groups()

    # -- what must hold -----------------------------------------------------------------------

    @property
    def kinds(self) -> list[str]:
        """The kinds of groups that this rank is a member of, also those of one rank."""
        return list(self.groups)

    def step(self) -> None:
        """A pipeline step: a neighbour exchange on WORLD of two ranks, then all sums by value."""
        tensor = torch.tensor([10.0 + self.rank])
        if self.rank < 2:
            kind = dist.isend if self.rank == 0 else dist.irecv
            for work in dist.batch_isend_irecv([dist.P2POp(kind, tensor, 1 - self.rank)]):
                work.wait()
        assert tensor.item() == (10.0 if self.rank < 2 else 10.0 + self.rank)
        assert sums_right(None, self.gloo, *self.groups.values())

    def check(self, *, asleep: bool, generation: int | None = None) -> None:
        """Memory, objects, generations and timeouts are those of this state."""
        reloadable = [g for g in self.groups.values() if isinstance(g, ReloadableProcessGroup)]
        assert [group.group_desc for group in reloadable] == self.kinds
        assert self.gloo.group is self.gloo  # it is never released
        for group in reloadable:
            assert group.group is (None if asleep else group)
            assert generation in (None, group.generation)
        single = BYTES * (len(self.groups) - len(self.kinds))
        if asleep:  # miles does not register WORLD, which keeps its memory then
            world = 0 if self.framework == "slime" else BYTES
            assert simulated.stats().held_bytes == world + single
        else:
            assert simulated.stats().held_bytes == BYTES * (1 + len(self.kinds)) + single
        assert dist.group.WORLD is self.world
        assert sums_right(self.gloo)
        expected = dict.fromkeys(self.kinds, GIVEN.total_seconds())
        if self.framework == "slime":
            expected["default_pg"] = REGISTERED.total_seconds()
        shown = {g.desc: g.timeout_s for g in reloadpg.status().groups if g.timeout_s}
        assert shown == expected


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_an_actor_trains_sleeps_and_updates_weights_through_three_cycles(
    framework: str, rank: int
) -> None:
    """Sums are right by value, and asleep no registered group holds memory.

    Groups keep their objects and timeouts (failure 9), and an update of weights reloads them for
    itself. Asleep, a collective is refused, and never runs on WORLD instead (failure 4). Repeated
    calls do nothing.
    """
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    assert destroy_process_groups() is reload_process_groups() is None  # before the patch
    with pytest.raises(reloadpg.ReloadpgError, match=r"Call it after init_process_group\(\)"):
        register_default_process_group(REGISTERED)
    actor = Actor(rank, framework)
    actor.init()
    assert not actor.wake_up().changed
    for cycle in range(CYCLES):
        actor.step()
        actor.check(asleep=False, generation=2 * cycle)
        assert len(actor.sleep().groups) == len(actor.kinds) + (framework == "slime")
        actor.check(asleep=True)
        again = actor.sleep()
        assert again is None if framework == "miles" else not again.changed
        with pytest.raises(reloadpg.GroupOffloadedError):
            dist.all_reduce(torch.ones(1), group=actor.groups["PP"])
        actor.update_weights()
        actor.check(asleep=True)
        actor.wake_up()
        assert not actor.wake_up().changed
    actor.step()
    actor.check(asleep=False, generation=2 * CYCLES)
    if framework == "miles":
        actor.update_weights()  # awake: the update leaves the groups in place
        actor.check(asleep=False)
    # The static methods are the functions; handles never become stale.
    ReloadableProcessGroup.destroy_process_groups()
    ReloadableProcessGroup.invalidate_process_groups()
    ReloadableProcessGroup.reload_process_groups()
    actor.step()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_the_calls_of_relax_are_accepted() -> None:
    """Its pauses are not needed: a line in the log names them. Its retries are attempts."""
    handler = logging.handlers.BufferingHandler(capacity=1000)
    logger = logging.getLogger("reloadpg")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    monkey_patch_torch_dist(SimpleNamespace(enable_cuda_memory_check=True), backends={"gloo"})
    worlds.init("gloo", timeout=GIVEN)
    group: Any = dist.new_group([0, 1], timeout=REGISTERED)
    destroy_process_groups(post_destroy_delay=3600.0)
    reload_process_groups(30, max_retries=3, retry_delay=3600.0)
    assert sums_right(group)
    assert reloadpg.status().groups[-1].timeout_s == REGISTERED.total_seconds()
    said = [record.getMessage() for record in handler.buffer]
    assert [line for line in said if "ignored" in line] == [
        "destroy_process_groups: ignored: post_destroy_delay=3600.0",
        "reload_process_groups: ignored: retry_delay=3600.0",
    ]
    ReloadableProcessGroup.destroy_process_groups(post_destroy_delay=0)
    ReloadableProcessGroup.reload_process_groups()
    assert sums_right(group)


@pytest.mark.ranks(2)
def test_the_default_group_is_rebuilt_with_the_timeout_registered_last() -> None:
    """Registered before the patch, or while asleep; ``status`` shows it before the reload, too.

    The patch uses an installation that exists.
    """
    dist.init_process_group("gloo", timeout=GIVEN)
    register_default_process_group(timeout=GIVEN)
    register_default_process_group(timeout=REGISTERED.total_seconds())
    assert type(dist.group.WORLD) is dist.ProcessGroup
    reloadpg.install(backends={"gloo"}, world=False)
    monkey_patch_torch_dist()
    for timeout in (REGISTERED, GIVEN):
        destroy_process_groups()
        if timeout is GIVEN:
            register_default_process_group(timeout=GIVEN)
        assert timeout_of_world() == timeout.total_seconds()
        reload_process_groups()
        assert timeout_of_world() == timeout.total_seconds()
        assert sums_right(None)


class Wrapped(dist.ProcessGroup):
    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group


@pytest.mark.ranks(2)
def test_the_tables_that_other_code_reads_are_there() -> None:
    """The unpatched function, the groups of the process, and how each was created.

    A plain group's ``group`` is the group itself; a subclass may have its own. ``uninstall``
    removes these names, but not one that another program has set.
    """
    simulated.register()
    for _ in range(2):
        monkey_patch_torch_dist()
    dist.init_process_group("sim")
    register_default_process_group(timeout=REGISTERED)
    made: list[Any] = [
        dist.new_group([0, 1], timeout=GIVEN),
        dist.new_group(ranks=[1, 0], backend="sim"),
    ]
    assert dist.old_new_group is old_new_group_dict[os.getpid()]  # type: ignore[attr-defined]
    plain = dist.old_new_group([0, 1])  # type: ignore[attr-defined]
    assert not isinstance(plain, ReloadableProcessGroup)
    assert plain.group is Wrapped(plain).group is plain
    alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    assert alone.group is alone  # type: ignore[union-attr]
    report = destroy_process_groups()
    assert report is not None
    assert [text for text in report.warnings if "not reloadable" in text] == []
    reload_process_groups()
    dist.destroy_process_group(alone)
    dist.destroy_process_group(plain)
    for _ in range(2):
        destroy_process_groups()
        groups = list(ReloadableProcessGroup.GROUPS[os.getpid()])
        assert [group is one for group, one in zip(groups, made, strict=True)] == [True] * 2
        assert [group.group for group in groups] == [None] * 2
        reload_process_groups()
    first, second = (group.group_info for group in made)
    assert (first["ranks"], first["args"], first["backend"]) == ([0, 1], ([0, 1],), "sim")
    assert first["kwargs"] == {"timeout": GIVEN}
    assert second["kwargs"] == {"ranks": [1, 0], "backend": "sim"}
    assert (second["args"], second["backend"]) == ((), "sim")
    for _ in range(2):
        reloadpg.uninstall()
        assert (hasattr(dist, "old_new_group"), hasattr(made[0], "group_info")) == (False, False)
        assert not hasattr(plain, "group")
        assert Wrapped(plain).group is plain
        assert os.getpid() not in old_new_group_dict
        monkey_patch_torch_dist()
        made[0] = dist.new_group([0, 1])
        assert (hasattr(dist, "old_new_group"), hasattr(made[0], "group_info")) == (True, True)
    dist.old_new_group = dist.new_group  # type: ignore[attr-defined]
    reloadpg.uninstall()
    assert hasattr(dist, "old_new_group")
    assert issubclass(reloadpg.ReloadableProcessGroup, ReloadableProcessGroup)
    with pytest.raises(TypeError, match=r"new_group\(\) returns them"):
        ReloadableProcessGroup()
