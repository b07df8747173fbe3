"""The barrier with a timeout: on the store, never by a collective."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.in_turn import variables
from helpers.watched_store import WatchedStore

import reloadpg
from reloadpg import environment
from reloadpg.testing import simulated


def untouched() -> bool:
    """Whether the simulated accelerator has not been called; its first operation connects."""
    return simulated.stats().held_bytes == 0


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("backend", "group_ranks"),
    [
        pytest.param("gloo", None, marks=pytest.mark.slow),
        ("sim", [1, 2]),
    ],
)
def test_a_missing_rank_is_named_on_all_ranks_with_reason_and_timeout(
    backend: str, group_ranks: list[int] | None, rank: int
) -> None:
    """Also on the late rank itself, and by its rank in the job where the group is a subgroup.

    Afterwards the ranks can meet again. No collective has run.
    """
    os.environ |= worlds.SILENCE
    if backend == "sim":
        simulated.register()
    timeout = [1.0, 1.0 if group_ranks else 60.0, 60.0][rank]
    server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(*server, is_master=False)
    met = threading.Event()

    def answered(method: str, key: str) -> None:
        if met.is_set() and method == "add" and key.endswith("/count"):
            shared.set(f"rank {rank} is counted", "1")

    store = WatchedStore(shared, answered=answered)
    dist.init_process_group(backend, store=store, rank=rank, world_size=3)
    group = dist.new_group(group_ranks) if group_ranks else None
    reloadpg.environment.barrier("connected", group=group)
    met.set()
    if rank == 2:
        # Comes when the others have given up: they say so in the store that all share.
        shared.wait(["gave up"], timedelta(seconds=150))
    elif rank == 0 and group is None:
        shared.wait(["rank 1 is counted"], timedelta(seconds=150))
    if group_ranks and rank not in group_ranks:
        reloadpg.environment.barrier("before the checkpoint", timeout=timeout, group=group)
        return
    with pytest.raises(TimeoutError) as caught:
        reloadpg.environment.barrier(
            "before the checkpoint", timeout=timedelta(seconds=timeout), group=group
        )
    error, message = caught.value, str(caught.value)
    assert isinstance(error, reloadpg.RendezvousTimeoutError)
    assert error.missing == (2,)
    assert f" {timeout:g} s" in message
    for words in ("'before the checkpoint'", "missing: rank 2."):
        assert words in message
    assert ("This rank arrived too late" in message) == (rank == 2)
    shared.set("gave up", "1")
    reloadpg.environment.barrier("all are here now", group=group)
    assert untouched()


@pytest.mark.ranks(1, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
def test_a_barrier_without_a_group_or_with_a_bad_timeout_is_refused() -> None:
    """The launcher has two ranks: without a group it is an error, not a barrier of one."""
    for group in ("foo", 0, [0, 1]):
        with pytest.raises(reloadpg.errors.InvalidOptionError, match=r"barrier\(group="):
            reloadpg.environment.barrier("x", timeout=1, group=group)  # type: ignore[arg-type]
    for reason in (dist.ProcessGroup(0, 1), 5, None):
        with pytest.raises(
            reloadpg.errors.InvalidOptionError, match=r"example barrier\(.*timeout=60, group=group"
        ):
            reloadpg.environment.barrier(reason)  # type: ignore[arg-type]
    for timeout in (0, -1, float("inf"), float("nan"), "5", True, timedelta(0)):
        with pytest.raises(reloadpg.errors.InvalidOptionError) as caught:
            reloadpg.environment.barrier("x", timeout=timeout)  # type: ignore[arg-type]
        assert isinstance(caught.value, ValueError)
    with pytest.raises(reloadpg.ReloadpgError, match=r"Call .*init_distributed\(\) first"):
        reloadpg.environment.barrier("x", timeout=5)


LAUNCHER = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
LAUNCHER += ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.ranks(1)
def test_a_process_alone_passes_a_barrier_without_a_group() -> None:
    """With a world of 1 from the launcher, and without a launcher."""
    for env in ({}, dict.fromkeys(LAUNCHER)):
        with variables(env):
            reloadpg.environment.barrier("alone", timeout=1)


@pytest.mark.ranks(2)
def test_a_barrier_handles_signals_while_it_waits(rank: int) -> None:
    """Ctrl-C ends it at once; torch's own store wait delays it until the timeout."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"], timedelta(seconds=150))
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    with pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        reloadpg.environment.barrier("long", timeout=300)
    store.set("interrupted", "1")


@pytest.mark.ranks(2)
def test_the_rank_is_the_launchers_before_there_is_a_group_and_then_the_groups(
    rank: int, tmp_path: Path
) -> None:
    """It is looked up at each call."""

    def check(now: int) -> None:
        assert (environment.get_rank(), environment.is_rank_zero()) == (now, now == 0)

    check(rank)
    os.environ["RANK"] = "0"  # outdated: from here on the rank of the group counts
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=1 - rank, world_size=2)
    check(1 - rank)
