"""The caller that created a group ends it: in real processes, with real failures."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import meet

import reloadpg
from reloadpg.testing import faults, run_ranks

LIMIT_S = 240.0
"""Timeout of waits for other ranks, and of runs in which no rank waits that long."""

slow = partial(pytest.param, marks=pytest.mark.slow)


def enter(kind: str, timeout: float = LIMIT_S) -> Any:
    """A scope around stock bring-up, or the library's own context: the same rules for both."""
    if kind == "scope":
        return reloadpg.environment.process_group_scope(timeout=timeout)
    return reloadpg.environment.init_distributed(init_timeout=timeout)


def bring_up(kind: str) -> None:
    if kind == "scope":
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))


def summed(value: float, group: Any = None) -> float:
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def total() -> float:
    return summed(1)


def all_have_summed() -> None:
    """Meet without the library. A rank that aborts right after a sum can break it on a peer, and
    ends a barrier that a peer has not left yet."""
    store = dist.FileStore(os.path.join(os.environ["TMPDIR"], "sums"), -1)
    meet(f"all have summed {next(numbers)}", dist.get_world_size(), LIMIT_S, store)


numbers = itertools.count()


# ---------------------------------------------------------------------------------------------
# success


@pytest.mark.ranks(2, store="rank0")
def test_rank_0_with_the_store_leaves_after_the_others_know_that_all_came(rank: int) -> None:
    """A slow peer still reads the decision; rank 0 could otherwise end before, with the store."""
    between = dist.FileStore(os.path.join(os.environ["TMPDIR"], "between"), 2)

    def slow() -> None:
        with contextlib.suppress(RuntimeError):  # it does not come: rank 0 is waiting
            between.wait(["rank 0 is out"], timedelta(seconds=1))
        between.set("rank 1 knows", "1")

    if rank == 1:
        faults.inject(
            faults.Fault(
                "barrier", "call", operation="exit.arrive", moment="after", call=lambda _: slow()
            )
        )
    with reloadpg.environment.process_group_scope(timeout=LIMIT_S):
        dist.init_process_group("gloo")
    if rank == 0:
        assert between.check(["rank 1 knows"])
        between.set("rank 0 is out", "1")


def leave_late(rank: int, world_size: int, kind: str, bound: float, dies: bool) -> str:
    os.environ |= worlds.SILENCE
    server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(*server, is_master=False)
    try:
        with enter(kind, timeout=bound):
            bring_up(kind)
            total()
            # With gloo, a peer that ends right after a sum can still break it here.
            if rank == 0:
                shared.set("has the sum", "1")
            else:
                shared.wait(["has the sum" if dies else "is out"], timedelta(seconds=LIMIT_S))
                os._exit(0)  # it never reaches the barrier, and notifies no rank
    except reloadpg.ReloadpgError as error:
        assert not dist.is_initialized()
        shared.set("is out", "1")
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("kind", ["scope", slow("context")])
def test_a_peer_that_never_reaches_the_end_is_named_in_the_timeout_error(kind: str) -> None:
    """The groups are aborted; the barrier before their end does not hang."""
    bound = 1.5 if kind == "scope" else 20.0  # that of a context is the one of bring-up too
    outcomes = run_ranks(leave_late, 2, args=(kind, bound, False), check=False, timeout=240)
    assert outcomes[0].ok
    assert outcomes[0].result.startswith("RendezvousTimeoutError: exit")
    assert "missing: rank 1" in outcomes[0].result
    assert f" {bound:g} s" in outcomes[0].result


def test_a_peer_whose_process_has_ended_is_named_at_the_end_before_the_timeout() -> None:
    """The processes of a host have met in bring-up."""
    outcomes = run_ranks(leave_late, 2, args=("context", LIMIT_S, True), check=False, timeout=240)
    assert outcomes[0].ok
    assert "exit: rank 1 died before phase 'arrive'" in outcomes[0].result


@pytest.mark.ranks(1, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
def test_a_scope_in_which_no_group_is_created_does_nothing() -> None:
    """Neither barrier nor abort, although the launcher has two ranks and one is absent."""
    with reloadpg.environment.process_group_scope(timeout=LIMIT_S):
        pass
    with contextlib.suppress(ValueError), reloadpg.environment.process_group_scope():
        raise ValueError("unrelated")
    reloadpg.environment.destroy_distributed()
    assert not dist.is_initialized()


# ---------------------------------------------------------------------------------------------
# failure


def raise_value_error() -> None:
    raise ValueError("the loss is NaN")


def interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


def leave() -> None:
    sys.exit(7)


def fail_on_rank_0(
    rank: int, world_size: int, kind: str, function: Callable[[], None], where: str
) -> None:
    os.environ |= worlds.SILENCE  # of a store that ends with rank 0
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    seen: list[BaseException] = []
    try:
        with enter(kind):
            bring_up(kind)
            total()
            all_have_summed()
            try:
                if rank == 0:
                    function()
                elif where == "collective":
                    total()  # rank 0 never joins
            except BaseException as error:
                seen.append(error)
                raise
    except BaseException as error:
        assert rank == 1 or error is seen[0], "another exception came out"
        print("ended")
        raise
    finally:
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("function", "error", "kind", "where", "store"),
    [
        (raise_value_error, "ValueError", "scope", "collective", "parent"),
        (raise_value_error, "ValueError", "context", "exit", "parent"),
        (interrupt, "KeyboardInterrupt", "scope", "exit", "parent"),
        (leave, "SystemExit", "scope", "exit", "parent"),
        (raise_value_error, "ValueError", "scope", "exit", "rank0"),
        # The store is gone: notifying it waits.
        slow(raise_value_error, "ValueError", "scope", "collective", "rank0"),
    ],
)
def test_an_exception_on_one_rank_is_raised_unchanged_and_ends_the_peers(
    function: Callable[[], None], error: str, kind: str, where: str, store: Any
) -> None:
    """It is logged before the cleanup, with its line; the traceback is printed once, where it is
    caught. The peers are in a collective or at their exit, and end before their timeout.

    The failing rank is 0; where it holds the store, its peer loses that too.
    """
    outcomes = run_ranks(
        *(fail_on_rank_0, 2),
        args=(kind, function, where),
        check=False,
        timeout=LIMIT_S,
        store=store,
    )
    failed, peer = outcomes
    for outcome in outcomes:
        assert not outcome.ok
        assert not outcome.killed
        assert outcome.exitcode not in (0, None)
        assert "AssertionError" not in (outcome.exception or "") + outcome.output
    assert error in (failed.exception or "")
    _, _, logged = failed.output.partition("rank 0 of 2 failed, and its process groups")
    assert error in logged
    assert f" ({function.__name__}, " in logged
    assert "ended" in logged
    assert "Traceback" not in failed.output
    if where == "exit" and store == "parent":
        assert "rank 0 failed" in (peer.exception or "")


def fail_in_cleanup(rank: int, world_size: int) -> str:
    from reloadpg.environment import teardown

    def broken(groups: object) -> None:
        raise OSError("the abort failed too")

    teardown.abort_groups = broken
    error = ValueError("first")
    with (
        pytest.raises(ValueError, match="first") as caught,
        reloadpg.environment.process_group_scope(),
    ):
        dist.init_process_group("gloo")
        raise error
    assert caught.value is error
    assert caught.value.__context__ is None
    dist.destroy_process_group()
    return "same"


def test_an_error_of_the_cleanup_is_logged_and_does_not_replace_the_original() -> None:
    """The caller sees the first error."""
    outcome = run_ranks(fail_in_cleanup, 1, check=False, timeout=240)[0]
    assert outcome.result == "same", outcome.exception
    assert "could not be aborted: OSError: the abort failed too" in outcome.output


# ---------------------------------------------------------------------------------------------
# offloaded


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["scope", "context"])
def test_an_owned_group_is_ended_by_an_exit_while_offloaded(kind: str, fails: bool) -> None:
    """Barriers work while offloaded. The next bring-up is reloadable like the first, and
    ``destroy_distributed`` ends it while offloaded.
    """
    error = ValueError("while offloaded")
    reloadpg.install(backends={"gloo"})
    with pytest.raises(ValueError) if fails else contextlib.nullcontext() as caught, enter(kind):
        bring_up(kind)
        group = dist.new_group([0, 1])
        assert total() == 2
        reloadpg.offload()
        reloadpg.environment.barrier("while offloaded", timeout=LIMIT_S)
        reloadpg.environment.barrier("while offloaded", timeout=LIMIT_S, group=group)
        if fails:
            all_have_summed()
            raise error
    assert not fails or caught.value is error
    assert not dist.is_initialized()
    with reloadpg.environment.init_distributed(init_timeout=LIMIT_S):
        assert total() == 2
        reloadpg.offload()
        with pytest.raises(reloadpg.GroupOffloadedError):
            total()
        reloadpg.environment.destroy_distributed()
        assert not dist.is_initialized()


# ---------------------------------------------------------------------------------------------
# groups over a default group that existed


def sizes() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("plain", "success"),
        ("plain", "exception"),
        ("installed", "exception"),
        ("installed", "offloaded"),
        ("taken over", "success"),
    ],
)
def test_a_scope_destroys_the_groups_created_inside_and_no_earlier_ones(
    how: str, ends: str, rank: int
) -> None:
    """Over a WORLD that existed: it and its groups work on; also where install takes it over."""
    if how == "installed":
        reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    before = dist.new_group([0, 1])
    world, counted = dist.group.WORLD, sizes()
    raised = contextlib.nullcontext() if ends == "success" else pytest.raises(ValueError)
    with raised, reloadpg.environment.process_group_scope(timeout=LIMIT_S):
        if how == "taken over":
            reloadpg.install(backends={"gloo"})
        inside = dist.new_group([0, 1])
        dist.new_group([1])  # not every rank is a member
        with reloadpg.environment.process_group_scope(timeout=LIMIT_S):
            dist.new_group([1, 0])
        assert sizes() == counted + rank + 1
        if how != "plain":
            reloadpg.offload()
            if ends == "offloaded":
                raise ValueError("while offloaded")
            reloadpg.reload()
        assert summed(1, inside) == 2
        all_have_summed()
        if ends == "exception":
            raise ValueError("inside")
    if ends == "offloaded":
        reloadpg.reload()
    assert sizes() == counted
    assert how == "taken over" or dist.group.WORLD is world
    assert total() == 2
    assert summed(1, before) == 2


@pytest.mark.ranks(3)
def test_peers_that_wait_at_the_exit_of_a_group_are_notified_of_a_failure(rank: int) -> None:
    """They raise at once and abort the group; WORLD works on for all ranks.

    Each group has a barrier: the rank that fails is not in the first one.
    """
    dist.init_process_group("gloo")
    with (
        pytest.raises(ValueError if rank == 1 else reloadpg.PeerFailedError),
        reloadpg.environment.process_group_scope(timeout=60),
    ):
        dist.new_group([0, 2])
        dist.new_group([0, 1, 2])
        reloadpg.environment.barrier("all have created it")
        if rank == 1:
            raise ValueError("inside")
    reloadpg.environment.barrier("all are out")
    assert sizes() == 1


@pytest.mark.ranks(4)
def test_the_groups_of_a_mesh_over_an_existing_world_end_with_their_context(rank: int) -> None:
    """Also by an exception: consecutive meshes leave nothing behind, and WORLD is unchanged.

    Sums are right by value in each dimension, and the pipeline stages have different seeds.
    """
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    stage, place = divmod(rank, 2)
    expected = {"pp": 2 * place + 2, "dp_shard": rank, "tp": 4 * stage + 1}
    for fails in (False, True) * 2:
        context = reloadpg.environment.init_distributed(
            mesh_dims={"tp": 2, "pp": -1}, init_timeout=60, seed=3
        )
        with contextlib.suppress(ValueError), context:
            mesh: Any = context.mesh
            assert mesh.mesh_dim_names == tuple(expected)
            assert {n: summed(rank, mesh.get_group(n)) for n in expected} == expected
            assert torch.initial_seed() == 3 + stage
            assert sizes() == 4
            all_have_summed()
            if fails:
                raise ValueError("on all ranks")
        assert sizes() == 1
        assert dist.group.WORLD is world
        assert total() == 4
