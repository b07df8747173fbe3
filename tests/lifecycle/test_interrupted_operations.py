"""A rank that is interrupted in an operation does not leave the others waiting."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from helpers import worlds
from helpers.fault_job import FAR, Job, attempt, base_store, join_operations
from helpers.interrupting import interrupt_at, interrupted_at_call

import reloadpg
from reloadpg.lifecycle.caller import Caller
from reloadpg.lifecycle.kinds import OFFLOAD
from reloadpg.lifecycle.offload import release
from reloadpg.lifecycle.operation import Operation
from reloadpg.lifecycle.pending import Call
from reloadpg.rendezvous.round import on_barrier

INTERRUPTED = 1
CALLER = tuple(
    function.__code__
    for function in (
        Call.run,
        Call._start,
        Caller.wait,
    )
)
"""The functions in which a caller starts an operation and waits for it."""

MOMENTS = [
    ("offload", "enter"),
    ("offload", "released"),
    ("reload", "enter"),
    ("reload", "done"),
    ("recover", "enter"),
    ("recover", "done"),
]


@pytest.mark.ranks(2)
def test_an_interrupt_before_a_callback_is_told_as_such(rank: int) -> None:
    """The caller waits no more, and the callback is not called, so it is not blamed."""
    Job("gloo", subgroups=([0, 1],), timeout=FAR)

    def mine() -> None:
        """Do nothing."""

    reloadpg.on_offload(mine)

    class Leaving(Caller):
        def call(self, function: object) -> None:
            self.tell(KeyboardInterrupt())
            self.check()

    if rank == INTERRUPTED:
        op = Operation.begin(OFFLOAD, frozenset(), Leaving())
        assert op is not None
        with pytest.raises(KeyboardInterrupt), op:
            release(op)
    else:
        seen = attempt(reloadpg.offload)
        assert seen.kind == "PeerFailedError"
        assert "KeyboardInterrupt" in seen.text
        assert "mine" not in seen.text


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["offload", "reload", "recover"])
def test_an_interrupt_ends_the_operation_alike_on_all_ranks(rank: int, name: str) -> None:
    """After any line of the caller: the groups are in one state, and a reload restores them."""
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    line, interrupted = 0, True
    while interrupted and line < 60:  # until the functions have fewer lines
        line += 1
        if name == "reload":
            reloadpg.offload()
        left = interrupt_at(line, CALLER) if rank == INTERRUPTED else [1]
        seen = attempt(getattr(reloadpg, name, None) or reloadpg.recovery.recover)
        sys.settrace(None)
        job.meet(f"ended {line}")
        assert seen.kind == ("KeyboardInterrupt" if left[0] <= 0 else seen.kind), (line, seen)
        assert seen.kind in ("", "KeyboardInterrupt", "PeerFailedError"), (line, seen)
        if rank == INTERRUPTED:
            join_operations()
            base_store().set(f"interrupted/{line}", str(left[0] <= 0))
        interrupted = base_store().get(f"interrupted/{line}") == b"True"
        job.meet(f"settled {line}")
        if attempt(reloadpg.reload).kind:  # a recovery was requested
            reloadpg.recovery.recover("again", timeout=FAR)
        job.assert_live()
        job.meet(f"live {line}")
    assert line > 10


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "phase"), MOMENTS)
def test_a_signal_while_an_operation_waits_ends_it_on_all_ranks(
    rank: int, name: str, phase: str
) -> None:
    """It reaches the caller. The other rank, which arrives later, is notified."""
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    if name == "reload":
        reloadpg.offload()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store, begun = base_store(), []

    def hook(moment: str, operation: str, at: str, _: int) -> None:
        mine = "waiting" if rank == INTERRUPTED else "before"
        if (moment, operation, at) == (mine, name, phase) and not begun:
            begun.append(at)
            if rank == INTERRUPTED:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                store.wait(["interrupted"])

    remove_hook = on_barrier(hook)
    seen = attempt(getattr(reloadpg, name, None) or reloadpg.recovery.recover)
    assert seen.kind == ("KeyboardInterrupt" if rank == INTERRUPTED else "PeerFailedError"), seen
    assert seen.seconds < FAR / 2
    if rank == INTERRUPTED:
        store.set("interrupted", "1")
    remove_hook()
    job.meet("ended")
    touched = (name, phase) not in (("offload", "enter"), ("reload", "enter"))
    states = {"failed"} if touched else {"offloaded"} if name == "reload" else {"live"}
    assert job.states() == states
    reloadpg.reload()
    job.assert_live()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("pending", [False, True])
def test_an_interrupt_at_any_call_leaves_no_operation_running(pending: bool) -> None:
    """The operation ends even if the traceback, and so its frames, is kept.

    A pending one has not started, or completes without a handle.
    """
    worlds.start("unbound", min_size=1)
    held = []

    def cycle() -> None:
        if pending:
            reloadpg.offload(wait=False).result()
            reloadpg.reload(wait=False).result()
        else:
            with reloadpg.offloaded():
                pass

    for number in range(0, 200, 2):
        try:
            with interrupted_at_call(number):
                cycle()
        except KeyboardInterrupt as error:
            held.append(error)  # keeps the frames
        join_operations()
        reloadpg.reload()  # never "offload is running in this process"
    assert len(held) > 20
    assert (reloadpg.status().state, worlds.summed(None, 0)) == ("live", 1.0)
