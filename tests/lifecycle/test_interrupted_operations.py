"""A rank that is interrupted in an operation does not leave the others waiting."""

from __future__ import annotations

import os
import sys
import warnings

import pytest
from helpers import worlds
from helpers.fault_job import FAR, Job, attempt, base_store, join_operations
from helpers.interrupting import interrupt_at, interrupted_at_call

import reloadpg
from reloadpg.lifecycle import offload, recreate, reload
from reloadpg.lifecycle.operation import Operation
from reloadpg.lifecycle.transaction import Transaction
from reloadpg.recovery import recovering
from reloadpg.rendezvous.round import Rendezvous, Round
from reloadpg.rendezvous.store_client import StoreClient

INTERRUPTED = 1
EVERY = int(os.environ.get("TEST_EVERY_LINE", "4"))
"""An offload or reload is interrupted after every fourth line; 1 takes 4 minutes on 2 cores."""
RECOVERY = (
    Rendezvous.recover.__code__,
    recovering._join.__code__,
    recovering._abort_all.__code__,
)
"""The functions between the request of a recovery and its first barrier."""

BARRIERS = tuple(
    function.__code__
    for function in (
        *(Operation.agree, Operation.barrier, Operation.do, Operation.each, Operation.complete),
        *(Round.agree, Round.barrier, Round.run, Round._abandon, Round._conclude, Round._close),
        *(Rendezvous.drive, StoreClient.ask, Transaction.commit),
    )
)
CYCLE = {
    "offload": (offload._release.__code__, offload._quiesce.__code__, *BARRIERS),
    "reload": (reload._restore.__code__, recreate.rebuild.__code__, *BARRIERS),
}
"""The functions that an operation passes in the caller's thread once its barriers are known."""
COMMIT = Operation.complete.__code__, Transaction.commit.__code__


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_an_interrupt_before_the_first_barrier_is_notified_to_the_other_ranks(rank: int) -> None:
    """After any line; the rank may recover after all, once the others have got their errors."""
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    line, left = 1, [0]  # at the first line, this rank has not called for a recovery
    while left[0] <= 0:  # until the functions have fewer lines
        line += 1
        left = interrupt_at(line, RECOVERY) if rank == INTERRUPTED else [1]
        seen = attempt(lambda: reloadpg.recovery.recover("test", timeout=FAR))
        sys.settrace(None)
        job.meet(f"ended {line}")
        job.agree(f"{line}", not seen.kind)
        if seen.kind:
            assert seen.kind == ("KeyboardInterrupt" if rank else "PeerFailedError")
            assert rank or seen.rank == INTERRUPTED
            while attempt(lambda: reloadpg.recovery.recover("again", timeout=FAR)).kind:
                pass  # the rank that was interrupted may first join the end of that recovery
            left = [0]
        job.assert_live()
        job.meet(f"live {line}")
    assert line > 10


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["offload", "reload"])
def test_an_interrupt_ends_the_operation_alike_on_all_ranks(rank: int, name: str) -> None:
    """After any line: the groups are in the same state on all ranks, and a reload restores them."""
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    line, interrupted = 1 - EVERY, True
    while interrupted:  # until the functions have fewer lines
        line += EVERY
        if name == "reload":
            reloadpg.offload()
        left = interrupt_at(line, CYCLE[name]) if rank == INTERRUPTED else [1]
        seen = attempt(getattr(reloadpg, name))
        sys.settrace(None)
        job.meet(f"ended {line}")
        assert seen.kind == ("KeyboardInterrupt" if left[0] <= 0 else seen.kind), (line, seen)
        assert seen.kind in ("", "KeyboardInterrupt", "PeerFailedError"), (line, seen)
        job.agree(f"state {line}", sorted(job.states()))
        if rank == INTERRUPTED:
            base_store().set(f"interrupted/{line}", str(left[0] <= 0))
        interrupted = base_store().get(f"interrupted/{line}") == b"True"
        reloadpg.reload()
        job.assert_live()
        job.meet(f"live {line}")
    assert line > 50


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "state", "counts"),
    [("offload", "offloaded", (1, 0)), ("reload", "live", (0, 1)), ("recover", "live", (0, 1))],
)
def test_an_interrupted_commit_is_completed(name: str, state: str, counts: tuple[int, int]) -> None:
    """The other ranks have completed the operation, so this one does, after any line."""
    worlds.start("unbound", min_size=1)
    line, left = 0, [0]
    while left[0] <= 0:  # until the commit has fewer lines
        line += 1
        if name == "reload":
            reloadpg.offload()
        before = reloadpg.status()
        left = interrupt_at(line, COMMIT)
        attempt(reloadpg.recovery.recover if name == "recover" else getattr(reloadpg, name))
        sys.settrace(None)
        after = reloadpg.status()
        assert after.state == state
        assert (after.cycles - before.cycles, after.generation - before.generation) == counts
        reloadpg.reload()
    assert line > 6
    assert worlds.summed(None, 0) == 1.0


@pytest.mark.ranks(1)
@pytest.mark.parametrize("pending", [False, True])
def test_an_interrupt_at_any_call_leaves_no_operation_running(pending: bool) -> None:
    """The operation ends even if the traceback, and so its frames, is kept.

    A pending one has not started, or completes without a handle.
    """
    worlds.start("unbound", min_size=1)
    warnings.simplefilter("ignore")  # deleted handles warn
    held = []

    def cycle() -> None:
        if pending:
            reloadpg.offload(wait=False).result()
            reloadpg.reload(wait=False).result()
        else:
            with reloadpg.offloaded():
                pass

    for number in range(1, 200, 3) if pending else range(0, 400, 7):
        try:
            with interrupted_at_call(number):
                cycle()
        except KeyboardInterrupt as error:
            held.append(error)  # keeps the frames
        join_operations()
        reloadpg.reload()  # never "offload is running in this process"
    assert len(held) > 20
    assert (reloadpg.status().state, worlds.summed(None, 0)) == ("live", 1.0)
