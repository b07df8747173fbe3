"""``reloadpg.integrations.megatron``: named groups, timeouts that hold, and nothing left behind.

megatron-core is in the ``test`` extra; without it these tests fail, they are not skipped. What its
own getters, layers and schedules do through cycles is in ``tests/consumers/test_megatron.py``.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import moments
import pytest
import torch.distributed as dist
import worlds
from stand_ins import BYTES, attempt
from worlds import sums_right

import reloadpg
from reloadpg.integrations import megatron
from reloadpg.testing import run_ranks, simulated

pytestmark = worlds.unbound_only

LIMIT = 280.0  # seconds
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2 ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "hybrid cp4": {
        "context_parallel_size": 4,
        "hybrid_context_parallel": True,
        "create_gloo_process_groups": False,
    },
}
HIERARCHY = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
"""Hierarchical context parallel groups; megatron-core builds them with a package of its own
(einops), so they are put in place here."""
MEMBERS = {
    "tp2 pp2": {
        "tp": [[0, 1], [2, 3]],
        "pp": [[0, 2], [1, 3]],
        "mp": [[0, 1, 2, 3]],
        "dp": [[0], [1], [2], [3]],
        "embd": [[0, 2], [1, 3]],
        "pos_embd": [[0], [1]],
    },
    "tp2 ep2": {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]], "ep": [[0, 2], [1, 3]]},
    "hybrid cp4": {
        "cp": [[0, 1, 2, 3]],
        "hcp[0]": [[0, 1], [2, 3]],
        "hcp[1]": [[0, 2], [1, 3]],
    },
}
"""The ranks of each group, as the layout says."""

FIRST, SECOND, THIRD = timedelta(minutes=40), timedelta(minutes=11), timedelta(minutes=3)


def known() -> list[str]:
    """Names of all groups in c10d's tables, in order."""
    return list(dist.distributed_c10d._world.pg_names.values())


def in_group(group: Any) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def left() -> dict[str, Any]:
    """What there is of groups, everywhere."""
    assert sums_right(None)  # WORLD connected, as at the start
    gc.collect()
    tables: Any = dist.distributed_c10d._world
    return {
        "c10d": known(),
        "ranks": sum(isinstance(group, dist.ProcessGroup) for group in tables.pg_group_ranks),
        "tags": sum(len(groups) for groups in tables.tags_to_pg.values()),
        "status": [group.name for group in reloadpg.status().groups],
        "memory": simulated.stats().held_bytes,
        "live": simulated.stats().live,
    }


def timeouts_of(names: dict[str, dist.ProcessGroup]) -> set[float | None]:
    """The timeouts that ``status`` shows for the reloadable ones among these groups."""
    shown = {group.name: group.timeout_s for group in reloadpg.status().groups}
    return {shown[g.group_name] for g in names.values() if g.group_name in shown}


def layouts(rank: int) -> dict[str, Any]:
    """Each layout through a cycle, its groups by name, and what is left of it afterwards."""
    from megatron.core import parallel_state

    seen: dict[str, Any] = {}
    for name, options in LAYOUTS.items():
        with megatron.initialize_model_parallel(**options) as parallel:
            if name == "hybrid cp4":
                parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = [
                    next(g for g in [parallel_state.create_group(r) for r in level] if in_group(g))
                    for level in HIERARCHY
                ]
            found = parallel.groups
            right = [sums_right(*found.values())]
            reloadpg.offload()
            same = {key: group is found[key] for key, group in parallel.groups.items()}
            reloadpg.reload()
            right.append(sums_right(*found.values()))
            ranks = {key: dist.get_process_group_ranks(group) for key, group in found.items()}
            made = filter(None, parallel_state._global_process_group_list)
            watched = [weakref.ref(group) for group in made]
            del found, made
        after = left()
        seen[name] = {
            "ranks": ranks,
            "same": same,
            "right": right,
            "gone": [ref() is None for ref in watched],
            "after": after,
            "groups": megatron.groups(),
        }
    return seen


def timeouts() -> list[tuple[str, set[float | None]]]:
    """Timeouts given at creation, changed on live groups, and seen through three cycles."""
    seen: list[tuple[str, set[float | None]]] = []
    minutes = int(FIRST.total_seconds() / 60)
    with megatron.initialize_model_parallel(
        tensor_model_parallel_size=2, distributed_timeout_minutes=minutes
    ) as parallel:
        found = parallel.groups
        for changed in (None, SECOND, THIRD):
            if changed is not None:
                # What megatron-core's update_pg_timeout does after torch.cuda.synchronize().
                for group in found.values():
                    dist.distributed_c10d._set_pg_timeout(changed, group)
            reloadpg.offload()
            seen.append(("offloaded", timeouts_of(found)))
            reloadpg.reload()
            seen.append(("live", timeouts_of(found)))
    return seen


def endings(rank: int) -> dict[str, Any]:
    """Every way to end: destroyed asleep, failed half-way, raised in the block, not ours."""
    from megatron.core import parallel_state

    seen: dict[str, Any] = {}
    parallel = megatron.initialize_model_parallel(tensor_model_parallel_size=2)
    seen["second"] = attempt(lambda: megatron.initialize_model_parallel())
    reloadpg.offload()
    parallel.destroy()
    parallel.destroy()
    seen["asleep"] = known()
    seen["reloaded"] = len(reloadpg.reload().groups)

    def embedding(*args: Any) -> list[int]:
        raise KeyError("half-way")

    seen["half-way"] = attempt(
        lambda: megatron.initialize_model_parallel(
            tensor_model_parallel_size=2,
            get_embedding_ranks=embedding,
            create_gloo_process_groups=False,  # they meet in their creation, and nowhere else here
        )
    )
    seen["after half-way"] = left()

    def block() -> None:
        with megatron.initialize_model_parallel(pipeline_model_parallel_size=2):
            assert sums_right(None)  # no rank is still creating groups
            raise KeyError("body")

    seen["body"] = attempt(block)
    seen["after body"] = left()

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    before = known()
    seen["missing"] = destroyed_without_rank_3(rank)
    seen["nothing destroyed"] = known() == before
    mine = dist.new_group([0, 1, 2, 3], group_desc="a user's own")
    seen["theirs"] = megatron.destroy_model_parallel()
    seen["after theirs"] = [name for name in known() if name != mine.group_name]
    seen["users own"] = sums_right(mine)
    dist.destroy_process_group(mine)

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rest = list(filter(None, parallel_state._global_process_group_list))
    assert sums_right(None)
    parallel_state.destroy_model_parallel()
    seen["left by megatron-core alone"] = len(known()) - 1
    with ExitStack() as stack:
        for group in rest:
            if group in dist.distributed_c10d._world.pg_map:
                stack.callback(dist.destroy_process_group, group)
    return seen


def destroyed_without_rank_3(rank: int) -> tuple[str, str]:
    """Rank 3 comes when the others have given up. Only rank 0, the last of them, has a bound of a
    second, so that ranks 1 and 2 have arrived by then however slow the machine is."""
    bound = timedelta(seconds=1 if rank in (0, 3) else LIMIT)
    arrived = Path(os.environ["TMPDIR"])
    if rank == 3:
        assert sums_right(None)
    while rank == 0 and len(list(arrived.glob("arrived-*"))) < 2:
        time.sleep(0.01)
    moments.at("waiting", (arrived / f"arrived-{rank}").touch)
    ended = attempt(lambda: megatron.destroy_model_parallel(bound))
    moments.restore()
    if rank != 3:
        assert sums_right(None)
    return ended


def megatron_job(rank: int, size: int) -> dict[str, Any]:
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    reloadpg.install()
    worlds.init("sim")
    before = left()
    seen: dict[str, Any] = {"before": before, "groups": megatron.groups()}
    phases: dict[str, Callable[[], Any]] = {
        "layouts": lambda: layouts(rank),
        "timeouts": timeouts,
        "endings": lambda: endings(rank),
    }
    for name, phase in phases.items():
        seen[name] = phase()
    seen["after"] = left()
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(megatron_job, 4, timeout=LIMIT, preload=["megatron.core"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_by_megatrons_names(ranks: list[dict[str, Any]], layout: str) -> None:
    """The table has the layout's groups under megatron-core's names, on their members alone, the
    same objects while offloaded, and their sums are right by value before and after a cycle."""
    for rank, seen in enumerate(ranks):
        assert seen["groups"] == {}
        found = seen["layouts"][layout]
        for name, rank_lists in MEMBERS[layout].items():
            mine = [ranks for ranks in rank_lists if rank in ranks]
            assert found["ranks"].get(name) == (mine[0] if mine else None), name
        assert set(found["same"]) == set(found["ranks"])
        assert all(found["same"].values())
        assert found["right"] == [True, True]
        assert found["groups"] == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_left_of_a_layout(ranks: list[dict[str, Any]], layout: str) -> None:
    """After the block c10d's tables, ``status`` and the device hold what they held before, and
    nobody holds a group of the layout."""
    for seen in ranks:
        assert seen["layouts"][layout]["after"] == seen["before"]
        assert seen["layouts"][layout]["gone"]
        assert all(seen["layouts"][layout]["gone"])


def test_timeouts_changed_later_survive(ranks: list[dict[str, Any]]) -> None:
    """The timeout of creation, then each one that is set on the live groups, is what ``status``
    shows while offloaded and after every reload (failure 9)."""
    for seen in ranks:
        assert seen["timeouts"] == [
            (when, {timeout.total_seconds()})
            for timeout in (FIRST, SECOND, THIRD)
            for when in ("offloaded", "live")
        ]


def test_destroyed_while_offloaded(ranks: list[dict[str, Any]]) -> None:
    """Destroyed asleep, and a second time, only WORLD is left and comes back."""
    for seen in ranks:
        assert seen["endings"]["asleep"] == seen["before"]["c10d"]
        assert seen["endings"]["reloaded"] == 1


def test_a_layout_that_fails_half_way(ranks: list[dict[str, Any]]) -> None:
    """An error in megatron-core's function, or in the block, goes on and leaves nothing."""
    for seen in ranks:
        for name in ("half-way", "body"):
            assert seen["endings"][name] == ("KeyError", repr(name))
            assert seen["endings"][f"after {name}"]["c10d"] == seen["before"]["c10d"]
            assert seen["endings"][f"after {name}"]["status"] == seen["before"]["status"]


def test_a_second_layout_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Initialized twice is an error that names the call that makes room."""
    for seen in ranks:
        kind, text = seen["endings"]["second"]
        assert kind == "ReloadpgError"
        assert "Call reloadpg.integrations.megatron.destroy_model_parallel()" in text


def test_groups_that_megatron_built_itself(ranks: list[dict[str, Any]]) -> None:
    """``destroy_model_parallel`` here ends what megatron-core's own function began, and leaves a
    user's group alone; megatron-core's leaves ten or more groups, which is why it is needed."""
    for seen in ranks:
        assert seen["endings"]["theirs"] >= 10
        assert seen["endings"]["after theirs"] == seen["before"]["c10d"]
        assert seen["endings"]["users own"]
        assert seen["endings"]["left by megatron-core alone"] >= 10


def test_ranks_meet_before_groups_are_destroyed(ranks: list[dict[str, Any]]) -> None:
    """A rank that does not come is named after the bound, nothing is destroyed, and the next call
    on all ranks goes through."""
    for seen in ranks:
        kind, text = seen["endings"]["missing"]
        assert kind == "RendezvousTimeoutError"
        assert "destroy_model_parallel" in text
        assert "missing: rank 3" in text
        assert seen["endings"]["nothing destroyed"]


def test_nothing_is_left_at_the_end(ranks: list[dict[str, Any]]) -> None:
    """After all layouts and endings the process holds what it held at the start."""
    for seen in ranks:
        assert seen["after"]["c10d"] == seen["before"]["c10d"]
        assert seen["after"]["memory"] == seen["before"]["memory"]


def absent_job(rank: int, size: int) -> tuple[str, str]:
    import sys

    sys.modules["megatron.core"] = None  # type: ignore[assignment]
    return attempt(megatron.groups)


def test_without_megatron() -> None:
    """Without megatron-core the error says what to install."""
    kind, text = run_ranks(absent_job, 1, timeout=60)[0]
    assert kind == "ImportError"
    assert "pip install 'reloadpg[megatron]'" in text


def test_a_missing_default_group_is_said() -> None:
    """Before megatron-core fails somewhere inside."""
    with pytest.raises(reloadpg.ReloadpgError, match="no default group"):
        megatron.initialize_model_parallel()
