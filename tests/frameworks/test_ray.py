"""Ray, real: four actors that form groups, offloaded and reloaded from the driver.

Ray is in the ``test`` extra; without it these tests fail, they are not skipped. The driver is a
rank, so its process tree always ends with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from frameworks.ray_job import BOUND_S, RANKS, Trainer, a_ray, fit
from helpers.launching import activation

from reloadpg.errors import InvalidOptionError, ReloadpgError
from reloadpg.integrations import ray as ours
from reloadpg.integrations.ray import ActorFailedError, ActorTimeoutError, job_variables
from reloadpg.testing import run_ranks

RAY = {
    # Without support for clusters Ray listens on 127.0.0.1 alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
driver = pytest.mark.ranks(1, timeout=540, env=RAY)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The variables of the actors."""
    return {**activation(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}


def at(generation: int, *, live: bool = True) -> list[dict[str, Any]]:
    """What each actor sees: sums of 2**rank over all ranks, and over its pair, or refusals."""
    sums = [(15.0, 5.0 if rank % 2 == 0 else 10.0) for rank in range(RANKS)]
    refused = [("GroupOffloadedError", "GroupOffloadedError")] * RANKS
    return [
        {"same": True, "world": world, "pair": pair, "generation": generation}
        for world, pair in (sums if live else refused)
    ]


def check_refused(call: Callable[..., Any], *args: Any, said: str, **options: Any) -> None:
    """Wrong arguments are refused in the driver, before anything is sent to an actor."""
    with pytest.raises(InvalidOptionError) as caught:
        call(*args, **options)
    text = " ".join(str(caught.value).split())
    assert said in text
    assert "nothing was" in text.lower()


@pytest.mark.slow
@driver
def test_actors_are_offloaded_and_reloaded_from_the_driver(variables: dict[str, str]) -> None:
    """One behaviour after the other, in one Ray, since its start takes long."""
    with a_ray(variables) as folder:
        import ray

        ours.GRACE_S = BOUND_S  # all calls end before it
        actors = [ray.remote(Trainer).options(num_cpus=1).remote() for _ in range(RANKS)]

        def everywhere(method: str) -> list[Any]:
            return ray.get([getattr(a, method).remote() for a in actors], timeout=BOUND_S)

        check_refused(ours.offload_all, [], said="there are no actors")
        check_refused(ours.offload_all, [actors[0], actors[0]], said="an actor is listed twice")
        check_refused(ours.offload_all, [1, 2], said="1 is not an actor")
        check_refused(ours.offload_all, [ray.remote(Trainer)], said="is not an actor")
        check_refused(ours.offload_all, actors[0], said="actors is not a list")
        check_refused(ours.offload_all, actors, timeout="1", said="timeout='1' is not a time")
        check_refused(ours.reload_all, actors, connect="zz", said="reload(connect='zz')")

        ours.setup_actors(actors, timeout=timedelta(seconds=2 * BOUND_S))  # includes their start
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        assert everywhere("variables") == [
            dict(zip(names, (str(rank), str(rank), "4", "4", "0"), strict=True))
            for rank in range(RANKS)
        ]
        everywhere("start")
        with pytest.raises(ActorFailedError, match="already initialized in this actor"):
            ours.setup_actors(actors, timeout=BOUND_S)

        assert everywhere("use") == at(0)
        for cycle in range(3):
            reports = ours.offload_all(actors, timeout=BOUND_S)
            assert everywhere("use") == at(cycle, live=False)
            reports += ours.reload_all(actors, timeout=BOUND_S, connect="eager")
            assert everywhere("use") == at(cycle + 1)
            seen = [(r.operation, r.rank, r.changed, r.generation, len(r.groups)) for r in reports]
            assert seen == [
                *(("offload", rank, True, cycle, 2) for rank in range(RANKS)),
                *(("reload", rank, True, cycle + 1, 2) for rank in range(RANKS)),
            ]

        # The actor that failed is named. It failed before a group was touched.
        ray.get(actors[2].refuse.remote(), timeout=BOUND_S)
        with pytest.raises(ActorFailedError) as failed:
            ours.offload_all(actors, timeout=BOUND_S)
        assert (failed.value.rank, sorted(failed.value.errors)) == (2, [0, 1, 2, 3])
        assert str(failed.value).startswith("offload_all: actor 2 Actor(Trainer, ")
        assert "ValueError: a buffer is still in use. No group was changed" in str(failed.value)
        assert "Also failed: 0-1, 3. " in str(failed.value)
        assert everywhere("use") == at(3)

        # A busy actor is named within the timeout, before anything is touched.
        pipe = folder / "pipe"
        os.mkfifo(pipe)
        busy, wait = actors[1].busy.remote(str(pipe)), ray.wait

        def wait_for_the_others(refs: list[Any], *, timeout: float) -> Any:
            """The short timeout applies only to the last actor, so the others always respond."""
            return wait(refs, timeout=BOUND_S if len(refs) > 1 else timeout)

        with (
            mock.patch.object(ray, "wait", wait_for_the_others),
            pytest.raises(ActorTimeoutError, match="Nothing was changed in any actor") as late,
        ):
            ours.offload_all(actors, timeout=1.0)
        assert (late.value.rank, late.value.waiting) == (1, (1,))
        assert "1 of 4 actors did not respond within 1 s: 1 Actor(Trainer, " in str(late.value)
        assert ray.get(actors[0].state.remote(), timeout=BOUND_S) == "live"
        pipe.write_text("continue")
        ray.get(busy, timeout=BOUND_S)
        reports = ours.offload_all(actors, timeout=BOUND_S)
        assert [report.changed for report in reports] == [True] * RANKS
        ours.reload_all(actors, timeout=BOUND_S)
        assert everywhere("use") == at(4)

        # The same actors in a new job. One of them dies: in an offload, and before the next one.
        everywhere("stop")
        ours.setup_actors(actors, timeout=BOUND_S)
        everywhere("start")
        assert everywhere("use") == at(0)
        ray.get(actors[3].die.remote(), timeout=BOUND_S)
        ours.GRACE_S = 1.0  # the test waits for it twice, since the others hang
        for dead in (False, True):
            with pytest.raises(ActorFailedError, match=r"Restart all actors\.$") as died:
                ours.offload_all(actors, timeout=BOUND_S)
            assert died.value.rank == 3
            assert 3 in died.value.errors
            assert 3 not in died.value.waiting
            cause: Any = died.value.__cause__
            assert type(getattr(cause, "cause", cause)).__name__ == "ActorDiedError"
            assert ("Nothing was changed" in str(died.value)) == dead
            assert len(str(died.value)) < 500


def fitted(variables: dict[str, str], folder: Path) -> tuple[list[Any], list[str]]:
    (result,) = run_ranks(fit, 1, args=(variables, folder), timeout=400, env=RAY)
    return result


@pytest.mark.frameworks
@pytest.mark.timeout(900)
def test_ray_train_with_a_cycle_after_every_step_is_bit_equal(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """Losses and weights of both workers. Ray creates their group before the user's function."""
    plain, errors = fitted({**variables, "RELOADPG_AUTOINSTALL": "0"}, tmp_path / "plain")
    assert (len(plain), errors) == (2, [])
    cycled, errors = fitted(variables, tmp_path / "cycled")
    assert errors == []
    cycles = [worker.pop("cycles") for worker in (*plain, *cycled)]
    assert cycles == [*[[]] * 2, *[[[1, "offloaded"]] * 8] * 2]
    assert cycled == plain


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
        ours.offload_all([object()])
