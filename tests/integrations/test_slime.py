"""slime's and miles' calling sequences through the drop-in, with real ranks.

The actors here make the calls of the two frameworks' Megatron actors (``init``, ``sleep``,
``wake_up``, ``update_weights``), in their order, with four pipeline stages.
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from stand_ins import BYTES, attempt
from worlds import sums_right

import reloadpg
from reloadpg.integrations.slime import (
    ReloadableProcessGroup,
    destroy_process_groups,
    monkey_patch_dist_checkpointing_merge,
    monkey_patch_torch_dist,
    old_new_group_dict,
    register_default_process_group,
    reload_process_groups,
)
from reloadpg.testing import run_ranks, simulated

pytestmark = [pytest.mark.matrix, worlds.unbound_only]

CYCLES = 3
NON_GROUP_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
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


@dataclass
class Actor:
    """What both frameworks' actors do with groups; miles keeps ``asleep``, slime does not."""

    rank: int
    framework: str
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    asleep: bool = False
    seen: dict[str, list[Any]] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        self.seen.setdefault(name, []).append(value)

    def init(self) -> None:
        self.note("before", (destroy_process_groups(), reload_process_groups()))
        self.note("unregistered", attempt(lambda: register_default_process_group(REGISTERED)))
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
        self.note("updated", (weight.tolist(), sums_right(self.groups["DP"])))
        if temporary:
            destroy_process_groups()

    # -- what is looked at --------------------------------------------------------------------

    def step(self) -> bool:
        """A pipeline step: a neighbour exchange on WORLD of two ranks, then all sums by value."""
        tensor = torch.tensor([10.0 + self.rank])
        if self.rank < 2:
            kind = dist.isend if self.rank == 0 else dist.irecv
            for work in dist.batch_isend_irecv([dist.P2POp(kind, tensor, 1 - self.rank)]):
                work.wait()
        sent = tensor.item() == (10.0 if self.rank < 2 else 10.0 + self.rank)
        return sent and sums_right(None, self.gloo, *self.groups.values())

    def look(self, when: str) -> None:
        reloadable = [g for g in self.groups.values() if isinstance(g, ReloadableProcessGroup)]
        self.note(
            when,
            {
                "held": simulated.stats().held_bytes,
                "live": [group.group is group for group in reloadable],
                "gone": [group.group is None for group in reloadable],
                "kinds": [group.group_desc for group in reloadable],
                "generations": sorted({group.generation for group in reloadable}),
                "world": dist.group.WORLD is self.world,
                "gloo": sums_right(self.gloo),
                "timeouts": {g.desc: g.timeout_s for g in reloadpg.status().groups if g.timeout_s},
            },
        )


def actor_job(rank: int, size: int, framework: str) -> dict[str, list[Any]]:
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    actor = Actor(rank, framework)
    actor.init()
    actor.note("awake already", actor.wake_up().changed)
    for _ in range(CYCLES):
        actor.note("trained", actor.step())
        actor.look("awake")
        actor.note("released", len(actor.sleep().groups))
        actor.look("asleep")
        again = actor.sleep()
        actor.note("slept twice", again if again is None else again.changed)
        actor.note(
            "refused", attempt(lambda: dist.all_reduce(torch.ones(1), group=actor.groups["PP"]))
        )
        actor.update_weights()
        actor.look("asleep")
        actor.wake_up()
        actor.note("woke twice", actor.wake_up().changed)
    actor.note("trained", actor.step())
    actor.look("awake")
    if framework == "miles":
        actor.update_weights()  # awake: the groups are not its to destroy
        actor.look("updated awake")
    # The static methods are the functions; handles never go stale.
    ReloadableProcessGroup.destroy_process_groups()
    ReloadableProcessGroup.invalidate_process_groups()
    ReloadableProcessGroup.reload_process_groups()
    actor.note("trained", actor.step())
    dist.destroy_process_group()
    return actor.seen


def each_rank(framework: str) -> list[dict[str, list[Any]]]:
    return run_ranks(actor_job, 4, args=(framework,), timeout=120)


@pytest.fixture(scope="module", params=["slime", "miles"])
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def actors(framework: str) -> list[dict[str, list[Any]]]:
    return each_rank(framework)


def reloadable_kinds(rank: int) -> list[str]:
    """The kinds of groups of more than one rank that a rank is a member of."""
    return [
        kind
        for kind, rank_lists in GROUPS.items()
        if any(rank in ranks and len(ranks) > 1 for ranks in rank_lists)
    ]


def test_collectives_are_right_in_every_cycle(actors: list[dict[str, list[Any]]]) -> None:
    """Sums over each group and WORLD, by value, before, between and after three cycles, and the
    first exchange on the rebuilt WORLD is one between two of four ranks."""
    for seen in actors:
        assert seen["trained"] == [True] * (CYCLES + 2)


def test_all_memory_is_gone_while_asleep(
    actors: list[dict[str, list[Any]]], framework: str
) -> None:
    """Asleep, before and after a weight update, no group holds memory; WORLD keeps its own where
    it was not registered, as miles expects."""
    world = 0 if framework == "slime" else BYTES
    for rank, seen in enumerate(actors):
        kinds = reloadable_kinds(rank)
        single = BYTES * sum(any(ranks == [rank] for ranks in v) for v in GROUPS.values())
        assert [look["held"] for look in seen["asleep"]] == [world + single] * (2 * CYCLES)
        for look in seen["awake"]:
            assert look["held"] == BYTES * (1 + len(kinds)) + single
        assert seen["released"] == [len(kinds) + (framework == "slime")] * CYCLES


def test_groups_are_the_drop_ins(actors: list[dict[str, list[Any]]]) -> None:
    """``isinstance`` with the drop-in's class tells reloadable groups from single-rank ones, and
    ``group`` is what slime's wrappers have there: a usable group, or None while asleep."""
    for rank, seen in enumerate(actors):
        kinds = reloadable_kinds(rank)
        for look in seen["awake"]:
            assert (look["kinds"], look["live"]) == (kinds, [True] * len(kinds))
        for look in seen["asleep"]:
            assert look["gone"] == [True] * len(kinds)


def test_generations_count_the_reloads(actors: list[dict[str, list[Any]]]) -> None:
    """Each cycle has two reloads: one for the weight update, one to wake up. Repeats add none."""
    for seen in actors:
        assert [look["generations"] for look in seen["awake"]] == [
            [2 * cycle] for cycle in range(CYCLES + 1)
        ]


def test_repeated_calls_do_nothing(actors: list[dict[str, list[Any]]], framework: str) -> None:
    """Waking before the first sleep, sleeping twice and waking twice change nothing."""
    for seen in actors:
        assert seen["awake already"] == [False]
        assert seen["slept twice"] == [None if framework == "miles" else False] * CYCLES
        assert seen["woke twice"] == [False] * CYCLES


def test_weights_are_updated_while_asleep(
    actors: list[dict[str, list[Any]]], framework: str
) -> None:
    """Groups come back for the update alone; awake, miles' update leaves them in place."""
    for rank, seen in enumerate(actors):
        assert seen["updated"] == [([3.0] * 3, True)] * (CYCLES + (framework == "miles"))
        if framework == "miles":
            assert seen["updated awake"][0]["live"] == [True] * len(reloadable_kinds(rank))


def test_world_and_gloo_stay_the_same_objects(actors: list[dict[str, list[Any]]]) -> None:
    """``dist.group.WORLD`` is one object for life, and the gloo group works asleep and awake."""
    for seen in actors:
        for look in [*seen["asleep"], *seen["awake"]]:
            assert look["world"]
            assert look["gloo"]


def test_timeouts_hold(actors: list[dict[str, list[Any]]], framework: str) -> None:
    """WORLD has the timeout that it was registered with, subgroups the one they were created
    with, after every cycle (failure 9)."""
    for rank, seen in enumerate(actors):
        expected = dict.fromkeys(reloadable_kinds(rank), GIVEN.total_seconds())
        if framework == "slime":
            expected["default_pg"] = REGISTERED.total_seconds()
        for look in [*seen["asleep"], *seen["awake"]]:
            assert look["timeouts"] == expected


def test_use_while_asleep_is_refused(actors: list[dict[str, list[Any]]]) -> None:
    """A collective on a group that sleeps says so; it never runs on WORLD instead (failure 4)."""
    for seen in actors:
        assert [kind for kind, _ in seen["refused"]] == ["GroupOffloadedError"] * CYCLES


def test_before_the_patch(actors: list[dict[str, list[Any]]]) -> None:
    """Before ``monkey_patch_torch_dist`` sleeping and waking do nothing, and registering WORLD
    before there is one says what to call."""
    for seen in actors:
        assert seen["before"] == [(None, None)]
        kind, text = seen["unregistered"][0]
        assert kind == "ReloadpgError"
        assert "Call it after init_process_group()" in text


def no_patch_job(rank: int, size: int) -> list[Any]:
    """One rank and an installation of the user's own."""
    worlds.init("gloo")
    seen: list[Any] = []
    with reloadpg.install(backends={"gloo"}, min_size=1):
        monkey_patch_torch_dist()
        seen.append(isinstance(dist.new_group([0]), ReloadableProcessGroup))
        seen.append(attempt(ReloadableProcessGroup))
        seen.append(issubclass(reloadpg.ReloadableProcessGroup, ReloadableProcessGroup))
    dist.destroy_process_group()
    return seen


def test_installations_of_others() -> None:
    """Where reloadpg is installed already, the patch uses that; the class makes no instances by
    hand."""
    own, by_hand, subclass = run_ranks(no_patch_job, 1, timeout=60)[0]
    assert own is True
    assert by_hand[0] == "TypeError"
    assert "new_group() returns them" in by_hand[1]
    assert subclass is True


def gloo_job(rank: int, size: int) -> list[Any]:
    """slime's lifecycle on gloo alone, for a job without a GPU: all groups are reloadable."""
    monkey_patch_torch_dist(backends={"gloo"}, min_size=1)
    worlds.init("gloo", timeout=GIVEN)
    register_default_process_group(timeout=REGISTERED)
    made = [dist.new_group(r, backend="gloo") for lists in GROUPS.values() for r in lists]
    groups = [group for group in made if isinstance(group, ReloadableProcessGroup)]
    seen: list[Any] = [len(groups)]
    for _ in range(CYCLES):
        destroy_process_groups()
        seen.append([group.group for group in groups])
        reload_process_groups(connect="eager")
        seen.append(all(group.group is group for group in groups) and sums_right(None, *groups))
    return seen


def test_without_a_gpu() -> None:
    """Options of the patch are install's: with ``backends`` and ``min_size``, gloo groups and those
    of one rank are released and rebuilt too, as slime's own CPU tests expect."""
    for rank, seen in enumerate(run_ranks(gloo_job, 4, timeout=60)):
        count = sum(rank in ranks for lists in GROUPS.values() for ranks in lists)
        assert seen == [count, *([[None] * count, True] * CYCLES)]


def registered_while_asleep(rank: int, size: int) -> list[float | None]:
    monkey_patch_torch_dist(backends={"gloo"})
    worlds.init("gloo", timeout=GIVEN)
    register_default_process_group(timeout=GIVEN)
    destroy_process_groups()
    register_default_process_group(timeout=REGISTERED)
    asleep = reloadpg.status().groups[0].timeout_s
    reload_process_groups()
    return [asleep, reloadpg.status().groups[0].timeout_s]


def test_a_timeout_registered_while_asleep_is_kept() -> None:
    """The rebuilt default group has it, and the status says so before."""
    seconds = REGISTERED.total_seconds()
    assert run_ranks(registered_while_asleep, 2, timeout=60) == [[seconds, seconds]] * 2


def registered_before(rank: int, size: int) -> list[Any]:
    dist.init_process_group("gloo", timeout=GIVEN)
    register_default_process_group(timeout=GIVEN)
    register_default_process_group(timeout=REGISTERED.total_seconds())
    before = type(dist.group.WORLD) is dist.ProcessGroup
    monkey_patch_torch_dist(backends={"gloo"})
    destroy_process_groups()
    reload_process_groups()
    return [before, reloadpg.status().groups[0].timeout_s, sums_right(None)]


def test_registering_before_the_patch_is_done_by_the_patch() -> None:
    """The default group goes and comes with the timeout that was given last."""
    expected = [True, REGISTERED.total_seconds(), True]
    assert run_ranks(registered_before, 2, timeout=120) == [expected] * 2


def tables_job(rank: int, size: int) -> dict[str, Any]:
    simulated.register()
    for _ in range(2):
        monkey_patch_torch_dist()
    dist.init_process_group("sim")
    register_default_process_group(timeout=REGISTERED)
    made = [dist.new_group([0, 1], timeout=GIVEN), dist.new_group(ranks=[1, 0], backend="sim")]
    plain = dist.old_new_group([0, 1])
    sizes = []
    for _ in range(2):
        destroy_process_groups()
        sizes.append([group.group is None for group in ReloadableProcessGroup.GROUPS[os.getpid()]])
        reload_process_groups()
    return {
        "original": dist.old_new_group is old_new_group_dict[os.getpid()],
        "plain": isinstance(plain, ReloadableProcessGroup),
        "groups": [
            [group is one for group, one in zip(groups, made, strict=True)]
            for pid, groups in ReloadableProcessGroup.GROUPS.items()
            if pid == os.getpid()
        ],
        "info": [group.group_info for group in made],
        "asleep": sizes,
    }


def test_tables_of_theirs_that_other_code_reads() -> None:
    """The unpatched function, the groups of the process, and how each was created."""
    for seen in run_ranks(tables_job, 2, timeout=120):
        assert seen["original"]
        assert not seen["plain"]
        assert seen["groups"] == [[True, True]]
        assert seen["asleep"] == [[True, True]] * 2
        first, second = seen["info"]
        assert (first["ranks"], first["args"], first["backend"]) == ([0, 1], ([0, 1],), "sim")
        assert first["kwargs"] == {"timeout": GIVEN}
        assert second["kwargs"] == {"ranks": [1, 0], "backend": "sim"}
        assert (second["args"], second["backend"]) == ((), "sim")


def stages_job(rank: int, size: int) -> list[Any]:
    """slime's own check of a pipeline's groups, singletons among them, on gloo."""
    monkey_patch_torch_dist(backends={"gloo"}, min_size=1)
    dist.init_process_group("gloo", timeout=GIVEN)
    register_default_process_group(timeout=GIVEN)
    made = {kind: [dist.new_group(r) for r in lists] for kind, lists in GROUPS.items()}
    mine = [one for some in made.values() for one in some if one is not NON_GROUP_MEMBER]
    stages = made["PP"][0]
    seen = []
    for _ in range(2):
        destroy_process_groups()
        seen.append([one.group is None for one in mine])
        reload_process_groups()
        seen.append([one.group is not None for one in mine])
        dist.barrier(group=stages)
        seen.append([dist.get_world_size(stages)])
    dist.destroy_process_group()
    return [len(mine), seen]


def test_a_pipelines_groups_survive_repeated_reloads_of_world_and_subgroups() -> None:
    """Every group, of one rank too, is gone while asleep and back afterwards; PP works."""
    for rank, (count, seen) in enumerate(run_ranks(stages_job, 4, timeout=150)):
        assert count == (6 if rank == 0 else 5 if rank == 3 else 4)
        assert seen == [[True] * count, [True] * count, [4]] * 2


def without_registration(rank: int, size: int) -> list[bool]:
    simulated.register()
    monkey_patch_torch_dist()
    dist.init_process_group("sim")
    world, group = dist.group.WORLD, dist.new_group([0, 1])
    destroy_process_groups()
    asleep = [group.group is None, dist.group.WORLD is world, sums_right(None)]
    reload_process_groups()
    return [*asleep, sums_right(None, group)]


def test_a_default_group_that_is_not_registered_is_left_alone() -> None:
    """Only the subgroups go: WORLD works throughout."""
    assert run_ranks(without_registration, 2, timeout=120) == [[True] * 4] * 2


def failing_job(rank: int, size: int) -> dict[str, Any]:
    simulated.register()
    before = dist.all_reduce, vars(reloadpg.ReloadableProcessGroup).get("allreduce")
    for _ in range(2):
        monkey_patch_torch_dist()
    dist.init_process_group("sim")
    register_default_process_group(timeout=REGISTERED)
    group, plain = dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")
    seen: dict[str, Any] = {
        "unwrapped": before == (dist.all_reduce, vars(type(group)).get("allreduce"))
    }

    def notes(function: Any, *args: Any, **kwargs: Any) -> list[str]:
        try:
            function(*args, **kwargs)
        except Exception as error:
            return getattr(error, "__notes__", [])
        raise AssertionError("no error")

    tensor = torch.ones(1)
    with simulated.inject(simulated.Fault("collective", message="out of memory")):
        seen["all_reduce"] = notes(dist.all_reduce, tensor, group=group)
    with simulated.inject(simulated.Fault("collective", message="out of memory")):
        seen["nested"] = notes(dist.broadcast_object_list, [1], src=0, group=group)
    seen["plain"] = notes(dist.broadcast, tensor, src=7, group=plain)
    destroy_process_groups()
    seen["asleep"] = notes(dist.all_reduce, tensor, group=group)
    reload_process_groups()
    seen["given"] = hasattr(dist, "old_new_group"), hasattr(group, "group_info")
    reloadpg.uninstall()
    seen["taken back"] = (
        hasattr(dist, "old_new_group"),
        hasattr(group, "group_info"),
        os.getpid() in old_new_group_dict,
    )
    for name, call in (("all_reduce", dist.all_reduce), ("method", group.allreduce)):
        with simulated.inject(simulated.Fault("collective", message="out of memory")):
            seen[f"uninstalled, {name}"] = notes(call, tensor)
    monkey_patch_torch_dist()
    seen["again"] = hasattr(dist, "old_new_group"), hasattr(group, "group_info")
    dist.old_new_group = dist.new_group  # type: ignore[attr-defined]
    reloadpg.uninstall()
    seen["theirs"] = hasattr(dist, "old_new_group")
    return seen


@pytest.fixture(scope="module")
def failing() -> list[Any]:
    return run_ranks(failing_job, 2, timeout=120)


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11"
)
def test_an_error_in_a_collective_notes_the_memory_and_nothing_is_wrapped_for_it(
    failing: Any,
) -> None:
    """Once, also where one collective calls another; an error of ours says what to do by itself."""
    for seen in failing:
        assert seen["unwrapped"]
        for kind in ("all_reduce", "nested", "plain"):
            [note] = seen[kind]
            assert note.startswith("memory after the error (GiB in use): simulated 0.0")
            assert ", rss " in note
        assert seen["asleep"] == []


def test_uninstall_takes_back_what_the_patch_has_given(failing: Any) -> None:
    """The names in torch.distributed and in the groups, and the notes; not what is another's."""
    for seen in failing:
        assert seen["given"] == seen["again"] == (True, True)
        assert seen["taken back"] == (False, False, False)
        assert seen["uninstalled, all_reduce"] == seen["uninstalled, method"] == []
        assert seen["theirs"]


def merge_job(rank: int, size: int) -> dict[str, Any]:
    pytest.importorskip("megatron.core")
    from megatron.core.dist_checkpointing import dict_utils, serialization, tensor_aware_state_dict

    def merged(mine: list[Any], loaded: list[Any], *path: str) -> Any:
        x1: Any = {path[-1]: [{"here": one} for one in mine]}
        x2: Any = {path[-1]: [{"disk": one} for one in loaded]}
        for name in reversed(path[:-1]):
            x1, x2 = {name: x1}, {name: x2}
        found = serialization.merge(x1, x2)
        for name in path:
            found = found[name]
        return found

    optimizer = ("optimizer", "param_state", "float32")
    both = attempt(lambda: merged([1], [2, 3], *optimizer))
    for _ in range(2):
        monkey_patch_dist_checkpointing_merge()
    return {
        "before": both[0],
        "names": serialization.merge is dict_utils.merge is tensor_aware_state_dict.merge,
        "depth": isinstance(dict_utils.merge.__wrapped__, types.FunctionType),
        "longer": merged([1], [2, 3], *optimizer),
        "shorter": merged([1, 2], [3], *optimizer),
        "equal": merged([1], [2], *optimizer),
        "elsewhere": attempt(lambda: merged([1], [2, 3], "args", "list"))[0],
    }


def test_optimizer_states_of_another_parallel_layout_are_merged() -> None:
    """miles' patch: the padding at the end of a longer list is cut off, on either side."""
    pytest.importorskip("megatron.core")
    [seen] = run_ranks(merge_job, 1, timeout=150)
    assert seen["before"] == "ValueError"  # with a later megatron-core too, which cuts one side
    assert seen["names"]
    assert seen["depth"]
    assert seen["longer"] == [{"here": 1, "disk": 2}]
    assert seen["shorter"] == [{"here": 1, "disk": 3}]
    assert seen["equal"] == [{"here": 1, "disk": 2}]
    assert seen["elsewhere"] == "ValueError"


def test_signatures() -> None:
    """The functions can be called as slime and miles call them: with nothing, and one timeout."""
    for function in (monkey_patch_torch_dist, destroy_process_groups, reload_process_groups):
        inspect.signature(function).bind()
    inspect.signature(register_default_process_group).bind(timeout=GIVEN)
