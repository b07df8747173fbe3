"""A rank that is interrupted in ``recover()`` does not leave the others waiting."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from fault_job import FAR, Job, attempt

import reloadpg
from reloadpg.lifecycle import recover
from reloadpg.rendezvous.round import Rendezvous

INTERRUPTED = 1
CODE = (
    Rendezvous.recover.__code__,
    recover._join.__code__,
    recover._abort_all.__code__,
)
"""Those of the functions between the request and the first barrier."""


def interrupt_at(line: int) -> list[int]:
    """Raise a KeyboardInterrupt at a line of these functions, counted from their first call."""
    left = [line]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in CODE:
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
        left = interrupt_at(line) if rank == INTERRUPTED else [1]
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
