"""The barrier with a timeout: on the store, never by a collective."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg import environment
from reloadpg.testing import simulated


@pytest.mark.ranks(3)
def test_a_missing_rank_is_named_on_all_ranks_with_reason_and_timeout(rank: int) -> None:
    """Also on the late rank itself, and by its rank in the job where the group is a subgroup.

    Afterwards the ranks can meet again. No collective has run.
    """
    os.environ |= worlds.SILENCE
    simulated.register()
    dist.init_process_group("sim")
    group = dist.new_group([1, 2])
    store = dist.distributed_c10d._get_default_store()
    environment.barrier("connected", group=group)
    if rank == 0:
        environment.barrier("before the checkpoint", timeout=1, group=group)  # not a member
        return
    if rank == 2:
        store.wait(["gave up"], timedelta(seconds=150))
    timeout = 1.0 if rank == 1 else 60.0
    with pytest.raises(TimeoutError) as caught:
        environment.barrier(
            "before the checkpoint", timeout=timedelta(seconds=timeout), group=group
        )
    error, message = caught.value, str(caught.value)
    assert isinstance(error, reloadpg.RendezvousTimeoutError)
    assert error.missing == (2,)
    for words in ("'before the checkpoint'", f" {timeout:g} s", "missing: rank 2."):
        assert words in message
    assert ("This rank arrived too late" in message) == (rank == 2)
    store.set("gave up", "1")
    environment.barrier("all are here now", group=group)
    assert simulated.stats().held_bytes == 0  # its first operation connects


@pytest.mark.ranks(1, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
def test_a_barrier_without_a_group_or_with_a_bad_argument_is_refused() -> None:
    """The launcher has two ranks: without a group it is an error, not a barrier of one."""
    for group in ("foo", 0, [0, 1]):
        with pytest.raises(reloadpg.errors.InvalidOptionError, match=r"barrier\(group="):
            environment.barrier("x", timeout=1, group=group)  # type: ignore[arg-type]
    for reason in (dist.ProcessGroup(0, 1), 5, None):
        with pytest.raises(
            reloadpg.errors.InvalidOptionError, match=r"example barrier\(.*timeout=60, group=group"
        ):
            environment.barrier(reason)  # type: ignore[arg-type]
    with pytest.raises(reloadpg.ReloadpgError, match=r"Call .*init_distributed\(\) first"):
        environment.barrier("x", timeout=5)


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
        environment.barrier("long", timeout=300)
    store.set("interrupted", "1")
