"""Who made the group ends it: in real processes, with real failures."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import moments
import pytest
import torch
import torch.distributed as dist

import reloadpg
from reloadpg.testing import run_ranks

BOUND_S = 60.0
"""Of waits for other ranks, and of runs in which no rank is to wait so long."""

slow = partial(pytest.param, marks=pytest.mark.slow)


def enter(kind: str, timeout: float = BOUND_S) -> Any:
    """A scope around stock bring-up, or the context of our own: the same rules for both."""
    if kind == "scope":
        return reloadpg.process_group_scope(timeout=timeout)
    return reloadpg.init_distributed(init_timeout=timeout)


def bring_up(kind: str) -> None:
    if kind == "scope":
        dist.init_process_group("gloo", timeout=timedelta(seconds=BOUND_S))


def total() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


# ---------------------------------------------------------------------------------------------
# success


def succeed(rank: int, world_size: int, kind: str) -> tuple[float, bool]:
    with enter(kind):
        bring_up(kind)
        result = total()
    return result, dist.is_initialized()


@pytest.mark.parametrize("store", ["parent", "rank0"])
@pytest.mark.parametrize("kind", ["scope", "context"])
def test_owned_and_success_ends_in_order_also_where_rank_0_holds_the_store(
    kind: str, store: Any
) -> None:
    """All ranks meet, destroy and leave; rank 0 does not take the store away from the others."""
    assert run_ranks(succeed, 4, args=(kind,), store=store) == [(4.0, False)] * 4


def leave_store_last(rank: int, world_size: int, path: str) -> bool:
    between = dist.FileStore(path, 2)

    def slow() -> None:
        with contextlib.suppress(RuntimeError):  # it does not come: rank 0 is waiting
            between.wait(["rank 0 is out"], timedelta(seconds=1))
        between.set("rank 1 knows", "1")

    if rank == 1:
        moments.at("counted", slow, barrier="exit.arrive")
    with reloadpg.process_group_scope(timeout=BOUND_S):
        dist.init_process_group("gloo")
    if rank == 0:
        knows = bool(between.check(["rank 1 knows"]))
        between.set("rank 0 is out", "1")
        return knows
    return True


def test_rank_0_which_holds_the_store_leaves_after_the_others_know_that_all_came(
    tmp_path: Any,
) -> None:
    """A slow peer still reads the outcome; rank 0 could otherwise end with the store before."""
    path = str(tmp_path / "between")
    assert run_ranks(leave_store_last, 2, args=(path,), store="rank0") == [True, True]


def leave_late(rank: int, world_size: int, kind: str, bound: float) -> str:
    try:
        with enter(kind, timeout=bound):
            bring_up(kind)
            total()
            # With gloo, a peer that ends right after a sum can still break it here.
            store = dist.distributed_c10d._get_default_store()
            if rank == 0:
                store.set("has the sum", "1")
            else:
                store.wait(["has the sum"], timedelta(seconds=BOUND_S))
                os._exit(0)  # never at the barrier, and says nothing to anyone
    except reloadpg.RendezvousTimeoutError as error:
        assert not dist.is_initialized()
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["scope", slow("context")])
def test_a_peer_that_never_reaches_the_end_is_named_and_the_groups_are_aborted(kind: str) -> None:
    """The barrier before destroy is bounded: a time-out error with the missing rank, no hang."""
    bound = 3.0 if kind == "scope" else 20.0  # that of a context is the one of bring-up too
    outcomes = run_ranks(leave_late, 2, args=(kind, bound), check=False)
    assert outcomes[0].ok
    assert "missing: rank 1" in outcomes[0].result
    assert f" {bound:g} s" in outcomes[0].result


def nothing_made(rank: int, world_size: int) -> bool:
    with reloadpg.process_group_scope(timeout=BOUND_S):
        pass
    with contextlib.suppress(ValueError), reloadpg.process_group_scope():
        raise ValueError("unrelated")
    reloadpg.destroy_distributed()
    return dist.is_initialized()


def test_a_scope_in_which_nothing_was_made_does_nothing() -> None:
    """Neither barrier nor abort, although the launcher speaks of two ranks and one is not there."""
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert run_ranks(nothing_made, 1, env=env) == [False]


# ---------------------------------------------------------------------------------------------
# failure


def raise_value_error() -> None:
    raise ValueError("the loss is NaN")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


def leave() -> None:
    sys.exit(7)


FAILURES: dict[str, tuple[Callable[[], None], str]] = {
    "exception": (raise_value_error, "ValueError"),
    "KeyboardInterrupt": (interrupt, "KeyboardInterrupt"),
    "SystemExit": (leave, "SystemExit"),
}


def fail_on(rank: int, world_size: int, kind: str, failing: int, how: str, where: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    function, expected = FAILURES[how]
    seen: list[BaseException] = []
    try:
        with enter(kind):
            bring_up(kind)
            total()
            if rank == failing:
                try:
                    function()
                except BaseException as error:
                    seen.append(error)
                    raise
            elif where == "collective":
                total()  # the failing rank never joins
    except BaseException as error:
        if rank == failing:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            assert error is seen[0], "another exception came out"
            assert type(error).__name__ == expected
            assert function.__name__ in frames
        print("ended", dist.is_initialized())
        raise
    finally:
        assert not dist.is_initialized()


SLOW_FAILURES = {
    ("scope", "exception", "rank0", "collective"),  # the store is gone: who tells it, waits for it
    *(("context", how, "parent", "exit") for how in ("KeyboardInterrupt", "SystemExit")),
    *(("context", how, "parent", "collective") for how in ("KeyboardInterrupt", "SystemExit")),
}


@pytest.mark.parametrize(
    ("kind", "how", "store", "where"),
    [
        slow(*case) if case in SLOW_FAILURES else case
        for where in ("collective", "exit")
        for case in [
            *((kind, how, "parent", where) for kind in ("scope", "context") for how in FAILURES),
            ("scope", "exception", "rank0", where),
        ]
    ],
)
def test_an_exception_on_one_rank_comes_out_as_it_is_and_ends_the_peers_within_the_bound(
    kind: str, how: str, where: str, store: Any
) -> None:
    """Same object, own traceback, logged first, exit code not 0; peers computing or at exit.

    The failing rank is 0; where it holds the store, its peer loses that too.
    """
    outcomes = run_ranks(
        fail_on, 2, args=(kind, 0, how, where), check=False, timeout=BOUND_S, store=store
    )
    failed, peer = outcomes
    assert not failed.timed_out
    assert not peer.timed_out
    assert FAILURES[how][1] in (failed.exception or "") or failed.exitcode == 7
    assert failed.exitcode != 0
    for outcome in outcomes:  # the checks inside the ranks, which end in failure either way
        assert "AssertionError" not in (outcome.exception or "") + outcome.output
    first_line = failed.output.index("rank 0 of 2 failed; its process groups are aborted")
    assert FAILURES[how][1] in failed.output[first_line:]
    assert f"in {FAILURES[how][0].__name__}" in failed.output[first_line:]
    assert failed.output.index("ended False") > first_line
    assert not peer.ok
    assert peer.exitcode != 0
    if where == "exit" and store == "parent":
        assert "rank 0 failed" in (peer.exception or "")


def fail_in_cleanup(rank: int, world_size: int) -> str:
    from reloadpg.environment import teardown

    def broken(groups: object) -> None:
        raise OSError("the abort failed too")

    teardown.abort_groups = broken
    error = ValueError("first")
    with pytest.raises(ValueError, match="first") as caught, reloadpg.process_group_scope():
        dist.init_process_group("gloo")
        raise error
    assert caught.value is error
    assert caught.value.__context__ is None
    dist.destroy_process_group()
    return "same"


def test_errors_of_the_cleanup_are_logged_never_raised_over_the_original() -> None:
    """The caller sees what went wrong first."""
    outcome = run_ranks(fail_in_cleanup, 1, check=False)[0]
    assert outcome.result == "same", outcome.exception
    assert "could not be aborted: OSError: the abort failed too" in outcome.output


# ---------------------------------------------------------------------------------------------
# adopted and nested


def stay(rank: int, world_size: int) -> list[tuple[str, bool, bool, float]]:
    dist.init_process_group("gloo")
    world, found = dist.group.WORLD, []
    for kind in ("scope", "context"):
        for fails in (False, True):
            with contextlib.suppress(ValueError), enter(kind):
                if fails:
                    raise ValueError("not the group's")
            found.append((kind, fails, dist.group.WORLD is world, total()))
    return found


def test_an_adopted_group_is_left_as_found_after_success_and_after_an_exception() -> None:
    """Who did not make it does not end it: the same object, still working."""
    ends = [(kind, fails) for kind in ("scope", "context") for fails in (False, True)]
    assert run_ranks(stay, 2) == [[(*end, True, 2.0) for end in ends]] * 2


def nest(rank: int, world_size: int) -> list[bool]:
    states = []
    with reloadpg.process_group_scope(timeout=BOUND_S):
        with (
            reloadpg.process_group_scope(timeout=BOUND_S),
            reloadpg.init_distributed(init_timeout=BOUND_S) as context,
        ):
            states.append(context.owned)
            with (
                reloadpg.process_group_scope(timeout=BOUND_S),
                reloadpg.init_distributed(init_timeout=BOUND_S) as inner,
            ):
                states.append(inner.owned)
            total()
            states.append(dist.is_initialized())
        states.append(dist.is_initialized())
    return states


def test_nested_scopes_end_the_group_once_where_it_was_made() -> None:
    """The context that made it owns it; those inside adopt it, those outside find nothing."""
    assert run_ranks(nest, 2) == [[True, False, True, False]] * 2


# ---------------------------------------------------------------------------------------------
# offloaded


def leave_offloaded(rank: int, world_size: int, kind: str, fails: bool) -> tuple[Any, ...]:
    with reloadpg.install(backends={"gloo"}):
        seen: list[BaseException] = []
        try:
            with enter(kind):
                bring_up(kind)
                group = dist.new_group([0, 1])
                world = dist.group.WORLD
                total()
                reloadpg.offload()
                reloadpg.reload()
                same = dist.group.WORLD is world and total() == world_size
                reloadpg.offload()
                reloadpg.barrier(BOUND_S, "while offloaded")
                reloadpg.barrier(BOUND_S, "while offloaded", group)
                if fails:
                    seen.append(ValueError("while offloaded"))
                    raise seen[0]
        except ValueError as error:
            assert error is seen[0]
        return same, type(world).__name__, dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["scope", "context"])
def test_ownership_holds_through_offload_and_reload_and_an_exit_while_offloaded(
    kind: str, fails: bool
) -> None:
    """WORLD is the same proxy throughout, and leaving while offloaded ends it all the same."""
    expected = (True, "ReloadableProcessGroup", False)
    assert run_ranks(leave_offloaded, 2, args=(kind, fails)) == [expected] * 2


def destroy_offloaded(rank: int, world_size: int) -> tuple[bool, float, bool]:
    with reloadpg.install(backends={"gloo"}):
        reloadpg.init_distributed(init_timeout=BOUND_S)
        reloadpg.offload()
        reloadpg.destroy_distributed()
        gone = dist.is_initialized()
        with reloadpg.init_distributed(init_timeout=BOUND_S):
            return gone, total(), isinstance(dist.group.WORLD, reloadpg.ReloadableProcessGroup)


def test_destroying_while_offloaded_works_and_the_job_can_come_up_again() -> None:
    """No group is left, and the next bring-up is reloadable like the first."""
    assert run_ranks(destroy_offloaded, 2) == [(False, 2.0, True)] * 2


# ---------------------------------------------------------------------------------------------
# groups over a default group that existed


def sizes() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def make_inside(rank: int, world_size: int, how: str, ends: str) -> tuple[Any, ...]:
    if how == "installed":
        reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    before = dist.new_group([0, 1])
    world = dist.group.WORLD
    counted = sizes()
    seen: list[BaseException] = []
    try:
        with reloadpg.process_group_scope(timeout=BOUND_S):
            if how == "taken over":
                reloadpg.install(backends={"gloo"})
            inside = dist.new_group([0, 1])
            dist.new_group([1])  # not every rank is a member
            with reloadpg.process_group_scope(timeout=BOUND_S):
                dist.new_group([1, 0])
            within = sizes() - counted
            if how != "plain":
                reloadpg.offload()
                if ends == "offloaded":
                    raise StopIteration
                reloadpg.reload()
            dist.all_reduce(torch.ones(1), group=inside)
            if ends == "exception":
                seen.append(ValueError("inside"))
                raise seen[0]
    except ValueError as error:
        assert error is seen[0]
    except StopIteration:
        reloadpg.reload()
    left = sizes() - counted
    same = how == "taken over" or dist.group.WORLD is world
    total_before = torch.ones(1)
    dist.all_reduce(total_before, group=before)
    return within, left, same, total(), total_before.item()


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("plain", "success"),
        ("plain", "exception"),
        ("installed", "success"),
        ("installed", "exception"),
        ("installed", "offloaded"),
        ("taken over", "success"),
        ("taken over", "exception"),
    ],
)
def test_groups_made_inside_a_scope_are_destroyed_and_those_of_before_are_not(
    how: str, ends: str
) -> None:
    """Over a WORLD that existed: it and its groups work on; also where install takes it over."""
    outcomes = run_ranks(make_inside, 2, args=(how, ends))
    assert outcomes == [(rank + 1, 0, True, 2.0, 2.0) for rank in range(2)]


def fail_inside(rank: int, world_size: int) -> str:
    dist.init_process_group("gloo")
    try:
        with reloadpg.process_group_scope(timeout=60):
            dist.new_group([0, 1, 2])
            reloadpg.barrier(60, "all have made it")
            if rank == 1:
                raise ValueError("inside")
    except (ValueError, reloadpg.PeerFailedError) as error:
        reloadpg.barrier(60, "all are out")
        return f"{type(error).__name__} {sizes()}"
    return ""


def test_peers_that_wait_at_the_exit_of_a_group_are_told_of_a_failure() -> None:
    """They raise at once and abort the group; WORLD works on for all."""
    outcomes = run_ranks(fail_inside, 3)
    assert outcomes == ["PeerFailedError 1", "ValueError 1", "PeerFailedError 1"]


def remake_world(rank: int, world_size: int) -> bool:
    dist.init_process_group("gloo")
    reloadpg.barrier(BOUND_S, "connected")  # a peer that still connects must not lose its other end
    with reloadpg.process_group_scope(timeout=BOUND_S):
        dist.destroy_process_group()
        reloadpg.init_distributed(init_timeout=BOUND_S)
        total()
    return dist.is_initialized()


def test_a_default_group_that_was_made_anew_inside_is_destroyed() -> None:
    """The one that existed is gone; this one was made inside."""
    assert run_ranks(remake_world, 2, store="parent") == [False] * 2


def mesh_again(rank: int, world_size: int) -> list[int]:
    dist.init_process_group("gloo")
    counts = []
    for fails in (False, True) * 2:
        with (
            contextlib.suppress(ValueError),
            reloadpg.init_distributed(
                mesh_dims={"pp": 2, "tp": 2}, adopt=True, init_timeout=60
            ) as context,
        ):
            assert context.mesh is not None
            value = torch.ones(1)
            dist.all_reduce(value, group=context.mesh.get_group("tp"))
            counts.append(sizes())
            if fails:
                raise ValueError("on all ranks")
        counts.append(sizes())
        assert total() == world_size
    return counts


def test_the_groups_of_a_mesh_over_an_existing_world_end_with_their_context() -> None:
    """Also by an exception: meshes one after the other leave nothing, and WORLD as it was."""
    assert run_ranks(mesh_again, 4) == [[4, 1] * 4] * 4
