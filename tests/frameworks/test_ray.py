"""Ray, real: four actors that form groups, offloaded and reloaded from the driver.

Ray is in the ``test`` extra; without it these tests fail, they are not skipped.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import ray_job
from launching import activation

from reloadpg.errors import ReloadpgError
from reloadpg.integrations.ray import job_variables, offload_all
from reloadpg.testing import run_ranks

RAY = {
    # Without support for clusters Ray listens on 127.0.0.1 alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
USED = [{"same": True, "world": 15.0, "pair": pair} for pair in (5.0, 10.0, 5.0, 10.0)]
"""Sums of 2**rank over the four ranks, and over ranks 0 and 2, or 1 and 3."""
REFUSED = [
    {"same": True, "world": "GroupOffloadedError", "pair": "GroupOffloadedError"}
] * ray_job.RANKS


def at(generation: int, uses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**use, "generation": generation} for use in uses]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One Ray for everything but a replacement, since its start takes long."""
    return driven(tmp_path_factory, "loop")


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A job in which one actor dies and another one replaces it."""
    return driven(tmp_path_factory, "replace")


def driven(tmp_path_factory: pytest.TempPathFactory, part: str) -> dict[str, Any]:
    """What the driver saw. It runs as a rank, so its process tree always ends with it."""
    actors = {**activation(tmp_path_factory.mktemp("ray")), "GLOO_SOCKET_IFNAME": "lo"}
    [seen] = run_ranks(ray_job.drive, 1, args=(actors, part), timeout=540, env=RAY)
    return seen


def test_actors_have_the_variables_of_ranks_in_the_order_of_the_list(seen: dict[str, Any]) -> None:
    """Rank, world size and local rank."""
    assert seen["variables"] == [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "0",
        }
        for rank in range(4)
    ]


def test_the_groups_of_actors_sum_right_between_three_cycles(seen: dict[str, Any]) -> None:
    """While offloaded each group refuses. WORLD is the same object, and generations count."""
    expected = [at(0, USED)]
    for cycle in range(3):
        expected += [at(cycle, REFUSED), at(cycle + 1, USED)]
    assert seen["uses"] == expected


def test_reports_are_returned_in_rank_order(seen: dict[str, Any]) -> None:
    """One for each rank; each has WORLD and a pair."""
    assert seen["reports"] == [
        [("offload", True, cycle, 2)] * 4 + [("reload", True, cycle + 1, 2)] * 4
        for cycle in range(3)
    ]


def test_the_actor_that_failed_is_named(seen: dict[str, Any]) -> None:
    """All four raise, three of them because of the first. It failed before a group was touched, so
    all groups are unchanged."""
    failed = seen["failed"]
    assert (failed["type"], failed["rank"]) == ("ActorFailedError", 2)
    assert failed["errors"] == [0, 1, 2, 3]
    assert failed["text"].startswith("offload_all: actor 2 Actor(Trainer, ")
    assert "ValueError: a buffer is still in use. Also failed: 0-1, 3. " in failed["text"]
    assert seen["use after failure"] == at(3, USED)


def test_a_busy_actor_is_named_before_anything_is_touched(seen: dict[str, Any]) -> None:
    """Within the timeout. The groups of the others are live, and the next call succeeds once the
    actor is free."""
    late = seen["late"]
    assert (late["type"], late["is a TimeoutError"]) == ("ActorTimeoutError", True)
    assert (late["rank"], late["waiting"]) == (1, [1])
    assert "1 of 4 actors did not respond within 1 s: 1 Actor(Trainer, " in late["text"]
    assert "Nothing was changed in any actor" in late["text"]
    assert seen["state after delay"] == "live"
    assert seen["offload after delay"] == [True] * 4
    assert seen["use after delay"] == at(4, USED)


def test_the_same_actors_can_form_another_job_after_the_first(seen: dict[str, Any]) -> None:
    """It begins with generation 0. While they are in a job, another set-up is refused."""
    refused = seen["second set-up"]
    assert (refused["type"], refused["cause"]) == ("ActorFailedError", "ReloadpgError")
    assert "torch.distributed is already initialized in this actor" in refused["text"]
    assert seen["use in the second job"] == at(0, USED)


@pytest.mark.parametrize("when", ["died", "dead"])
def test_an_actor_that_dies_is_named(seen: dict[str, Any], when: str) -> None:
    """In the middle of an offload and at the next call, without a wait for the others' timeout."""
    died = seen[when]
    assert (died["type"], died["rank"]) == ("ActorFailedError", 3)
    assert died["cause"] == "ActorDiedError"
    assert 3 in died["errors"]
    assert 3 not in died["waiting"]
    assert ("Nothing was changed" in died["text"]) == (when == "dead")
    assert died["text"].endswith("otherwise restart all actors.")
    assert len(died["text"]) < 500


@pytest.mark.slow
def test_an_actor_that_died_is_replaced(replaced: dict[str, Any]) -> None:
    """Here rank 0, killed in the third step; the driver has the store. All weights end equal."""
    assert replaced["replaced died"] == "ActorDiedError"
    new, *others = replaced["trained"]
    assert new == {"rejoined": True, "weight": 300.0, "log": [(2, (0,)), (3, ())]}
    for other in others:
        log = [(0, ()), (1, ()), (2, ()), (2, (0,)), (3, ())]
        assert other == {"rejoined": False, "weight": 300.0, "log": log}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no rank", "not a job and one of its ranks"),
        ("same actor", "is rank 1 of the job"),
        ("no store", "its process hosts the job's store"),
    ],
)
def test_an_impossible_replacement_is_refused(
    replaced: dict[str, Any], what: str, said: str
) -> None:
    """Before anything is sent to the new actor."""
    assert replaced[what]["type"] == "InvalidOptionError"
    assert said in replaced[what]["text"]
    assert "nothing was done" in " ".join(replaced[what]["text"].split())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("none", "there are no actors"),
        ("twice", "an actor is listed twice"),
        ("numbers", "1 is not an actor"),
        ("dict", "{} is not an actor"),
        ("class", "is not an actor"),
        ("one", "actors is not a list"),
        ("timeout", "timeout='1' is not a time"),
        ("store", "setup_actors(store='Driver'): not 'rank0' or 'driver'"),
        ("connect", "reload(connect='zz')"),
    ],
)
def test_wrong_arguments_are_refused_in_the_driver(
    seen: dict[str, Any], what: str, said: str
) -> None:
    """Before anything is sent to an actor."""
    assert seen[what]["type"] == "InvalidOptionError"
    assert said in seen[what]["text"]
    assert "nothing was" in seen[what]["text"].lower()


def test_all_processes_of_ray_end_with_the_driver(seen: dict[str, Any]) -> None:
    """Servers, agents and workers, those of dead actors too."""
    assert seen["started"] > ray_job.RANKS
    assert seen["left"] == []


def test_local_ranks_are_counted_on_each_node_in_any_order_of_nodes() -> None:
    """Nodes are numbered as they appear."""
    ranks = job_variables(["b", "a", "b", "b"], "10.0.0.7", 4711)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [tuple(rank[name] for name in names) for rank in ranks] == [
        ("0", "0", "3", "0"),
        ("1", "0", "1", "1"),
        ("2", "1", "3", "0"),
        ("3", "2", "3", "0"),
    ]
    for rank in ranks:
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("10.0.0.7", "4711")
        assert (rank["WORLD_SIZE"], rank["GROUP_WORLD_SIZE"]) == ("4", "2")


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module itself can be imported without Ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ReloadpgError, match=r"nothing was done\. Run: pip install 'ray"):
        offload_all([object()])
