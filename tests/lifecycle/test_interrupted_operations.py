"""A rank that is interrupted in an operation does not leave the others waiting."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any

import pytest
from fault_job import FAR, Job, attempt, base_store

import reloadpg
from reloadpg.lifecycle import offload, recover, recreate, reload
from reloadpg.lifecycle.operation import Operation
from reloadpg.lifecycle.transaction import Transaction
from reloadpg.rendezvous.round import Rendezvous, Round
from reloadpg.rendezvous.store_client import StoreClient

INTERRUPTED = 1
EVERY = int(os.environ.get("TEST_EVERY_LINE", "4"))
"""An offload or reload is interrupted after every fourth line; 1 takes 4 minutes on 2 cores."""
RECOVERY = (
    Rendezvous.recover.__code__,
    recover._join.__code__,
    recover._abort_all.__code__,
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


def interrupt_at(line: int, code: Collection[CodeType]) -> list[int]:
    """Raise a KeyboardInterrupt at a line of these functions, counted from their first call."""
    left = [line]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in code:
            return None
        if event in ("line", "return"):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    return left


@pytest.mark.ranks(2)
def test_an_interrupt_before_the_first_barrier_is_notified_to_the_other_ranks(rank: int) -> None:
    """After any line; the rank may recover after all, once the others have got their errors."""
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    line, left = 1, [0]  # at the first line, this rank has not called for a recovery
    while left[0] <= 0:  # until the functions have fewer lines
        line += 1
        left = interrupt_at(line, RECOVERY) if rank == INTERRUPTED else [1]
        seen = attempt(lambda: reloadpg.recover("test", timeout=FAR))
        sys.settrace(None)
        job.meet(f"ended {line}")
        job.agree(f"{line}", not seen.kind)
        if seen.kind:
            assert seen.kind == ("KeyboardInterrupt" if rank else "PeerFailedError")
            assert rank or seen.rank == INTERRUPTED
            while attempt(lambda: reloadpg.recover("again", timeout=FAR)).kind:
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
