"""One operation is begun, ended and told by one thread, whenever its caller is interrupted."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import FAR, Job, attempt, base_store, join_operations

import reloadpg
from reloadpg import environment
from reloadpg.lifecycle.block import Block
from reloadpg.lifecycle.caller import Caller
from reloadpg.lifecycle.job import jobs
from reloadpg.lifecycle.kinds import OFFLOAD
from reloadpg.lifecycle.offload import release
from reloadpg.lifecycle.operation import Operation
from reloadpg.lifecycle.pending import Call
from reloadpg.rendezvous.round import on_barrier
from reloadpg.testing import run_ranks

INTERRUPTED = 1


@pytest.fixture(autouse=True)
def _silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only a short time for the responses of ranks that do not respond."""
    for name, seconds in worlds.SILENCE.items():
        monkeypatch.setenv(name, seconds)


# -- an operation that has ended ------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["offload", "reload"])
def test_a_late_rank_calls_no_callback_in_an_operation_that_has_ended(rank: int, name: str) -> None:
    """A callback may run a collective, in which this rank would be alone."""
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    store, called = base_store().clone(), []
    operation = getattr(reloadpg, name)
    if name == "reload":
        reloadpg.offload()
    register = (
        reloadpg.on_offload if name == "offload" else partial(reloadpg.on_reload, before=True)
    )

    def mine() -> None:
        called.append(rank)
        if rank == 0:
            raise ValueError("of rank 0")

    remove = register(mine)
    if rank == 1:
        store.wait(["rank 0 has failed"])
    seen = attempt(operation)
    if rank == 0:
        store.set("rank 0 has failed", "1")
    else:
        assert (seen.kind, seen.rank) == ("PeerFailedError", 0)
        assert "of rank 0" in seen.text
    assert called == ([0] if rank == 0 else [])
    remove()
    job.meet("ended")
    reloadpg.reload()
    job.assert_live()


@pytest.mark.ranks(2)
def test_a_job_that_a_barrier_has_begun_goes_on_after_install(rank: int) -> None:
    """The default group is then another object, and the ranks have met in that job."""
    worlds.init("gloo")
    environment.barrier()
    begun = jobs.known
    assert begun is not None
    reloadpg.install(backends={"gloo"}, timeout=FAR)
    for _ in range(2):
        reloadpg.offload()
        reloadpg.reload()
        environment.barrier()
        assert jobs.known is begun
    dist.destroy_process_group()
    assert jobs.known is None


# -- interrupts -----------------------------------------------------------------------------------


@contextmanager
def raised_at_call(
    number: int, error: BaseException, after: CodeType | None = None
) -> Iterator[list[int]]:
    """Raise an error at a call of a function of the library in this block, as a handler does.

    Only in this thread; counted from the call of ``after``, if given. The list has the number of
    calls that were left; it is not positive once the error was raised.
    """
    left, begun = [number], after is None

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal begun
        if begun and frame.f_globals.get("__name__", "").startswith("reloadpg."):
            left[0] -= 1
            if left[0] == 0:
                raise error
        begun = begun or frame.f_code is after

    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(None)


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
            with raised_at_call(number, KeyboardInterrupt()):
                cycle()
        except KeyboardInterrupt as error:
            held.append(error)  # keeps the frames
        join_operations()
        reloadpg.reload()  # never "offload is running in this process"
    assert len(held) > 20
    assert (reloadpg.status().state, worlds.summed(None, 0)) == ("live", 1.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("name", ["offload", "reload"])
def test_an_interrupt_at_any_call_of_a_beginning_operation_is_told(
    rank: int, name: str, error: type[BaseException]
) -> None:
    """The other rank raises at once, and does not wait for the timeout."""
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    interrupted, number = True, 0
    while interrupted and number < 120:
        number += 1
        if name == "reload":
            reloadpg.offload()
        left, seen = [1], None
        if rank == INTERRUPTED:
            with raised_at_call(number, error("of a handler"), Call.run.__code__) as left:
                seen = attempt(getattr(reloadpg, name))
        else:
            seen = attempt(getattr(reloadpg, name))
        assert seen.kind in ("", error.__name__, "PeerFailedError"), (number, seen)
        if rank == INTERRUPTED:
            join_operations()
            base_store().set(f"interrupted/{number}", str(left[0] <= 0))
        job.meet(f"ended {number}")
        interrupted = base_store().get(f"interrupted/{number}") == b"True"
        reloadpg.reload()
        job.assert_live()
    assert number > 5


@pytest.mark.ranks(2)
def test_a_second_interrupt_while_the_first_is_handled_leaves_no_operation_running(
    rank: int,
) -> None:
    """Two signals of a user who presses Ctrl-C twice, at many distances."""
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    store, main = base_store().clone(), os.getpid()

    def second(*_: object) -> None:
        raise KeyboardInterrupt

    def first(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, distance)
        raise KeyboardInterrupt

    def hook(moment: str, *_: object) -> None:
        if moment == "waiting" and rank == INTERRUPTED and armed:
            armed.clear()
            os.kill(main, signal.SIGINT)

    signal.signal(signal.SIGINT, first)
    signal.signal(signal.SIGALRM, second)
    remove_hook = on_barrier(hook)
    for number in range(40):
        distance, armed = 10e-6 * 1.15**number, [number]
        if rank == 0:
            store.wait([f"interrupted/{number}"])
        seen = attempt(reloadpg.offload)
        if rank == INTERRUPTED:
            try:
                store.set(f"interrupted/{number}", "1")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                store.set(f"interrupted/{number}", "1")
            assert seen.kind == "KeyboardInterrupt"
            join_operations()
            assert reloadpg.status().running is None
        else:
            assert seen.kind == "PeerFailedError", (number, seen)
        job.meet(f"ended {number}")
    remove_hook()
    reloadpg.reload()
    job.assert_live()


SIGNALS = int(os.environ.get("SIGNALS", "24"))
"""Number of signals of the sweep. ``SIGNALS=600`` is a sweep of some minutes."""


class Signals:
    """Interrupts calls of this process by real signals at random moments, once or twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left = 0
        self.sent = 0
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if not self._left:
            return
        while frame is not None and frame.f_code not in ENTERED:
            frame = frame.f_back
        if frame is None:  # the call has not begun, or has ended
            signal.setitimer(signal.ITIMER_REAL, 20e-6)
            return
        self._left -= 1
        self.sent += 1
        if self._left:
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(10e-6, 1e-3))
        raise KeyboardInterrupt

    def during(self, call: Callable[[], object], seconds: float) -> str:
        """Call a function with signals within this time; return the name of its error."""
        kind = ""
        try:
            try:
                self._left = self._random.choice((1, 2))
                signal.setitimer(signal.ITIMER_REAL, self._random.uniform(20e-6, seconds))
                call()
            except BaseException as error:
                kind = type(error).__name__
            finally:
                self._left = 0
        except KeyboardInterrupt:
            kind = "KeyboardInterrupt"
        signal.setitimer(signal.ITIMER_REAL, 0)
        return kind


ENTERED = {Call.run.__code__, Block.enter.__code__}


def _sweep(rank: int, size: int, signals: int) -> tuple[int, set[str]]:
    job = Job("gloo", subgroups=([0, 1],) * 4, timeout=FAR)
    mine, kinds = Signals(signals), set()
    spinning = threading.Event()
    for register in (reloadpg.on_offload, reloadpg.on_reload):
        register(lambda: spinning.is_set() and spin())

    def block() -> None:
        with reloadpg.offloaded():
            pass

    calls = [reloadpg.offload, reloadpg.reload, block, block]
    number, usual = 0, 0.03
    while mine.sent < signals if rank == INTERRUPTED else True:
        call = calls[number % 4]
        if number % 4 == 3:
            spinning.set()
        if call is reloadpg.reload:
            reloadpg.offload()
        begun = time.monotonic()
        if rank == INTERRUPTED:
            kind = mine.during(call, usual)
        else:
            seen = attempt(call)
            # A rank that still connects to the interrupted one can fail before it has read that.
            told = "failed first: KeyboardInterrupt" in seen.text
            kind = "PeerFailedError" if seen.kind == "RebuildError" and told else seen.kind
        kinds.add(kind)
        assert time.monotonic() - begun < FAR / 2, (number, kind)
        spinning.clear()
        join_operations()
        assert reloadpg.status().running is None
        job.meet(f"ended {number}")
        if rank == INTERRUPTED:
            base_store().set(f"over/{number}", str(mine.sent >= signals))
        reloadpg.reload()
        job.assert_live()
        begun = time.monotonic()
        reloadpg.offload()
        usual = 0.8 * usual + 0.3 * (time.monotonic() - begun)  # half as long as it takes again
        reloadpg.reload()
        if base_store().get(f"over/{number}") == b"True":
            break
        number += 1
    return mine.sent, kinds


def spin() -> None:
    """Run Python code for some milliseconds."""
    end = time.monotonic() + 0.005
    while time.monotonic() < end:
        pass


def test_signals_at_random_moments_are_told_and_leave_no_operation_running() -> None:
    """In an offload, a reload, a block and its callbacks; single signals and pairs."""
    (_, peers), (sent, own) = run_ranks(_sweep, 2, args=(SIGNALS,), timeout=240 + SIGNALS)
    assert sent >= SIGNALS
    assert peers <= {"", "PeerFailedError"}
    assert "PeerFailedError" in peers
    assert "KeyboardInterrupt" in own


# -- callbacks after a reload ---------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_callbacks_after_a_reload_are_owed_until_each_has_returned(
    rank: int, error: type[BaseException]
) -> None:
    """Whatever ends the first of them, the next reload calls the rest, each once.

    An error is this rank's alone: the groups are live on all ranks.
    """
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    calls: list[str] = []

    def raises() -> None:
        calls.append("raises")
        if rank == 0 and calls.count("raises") == 1:
            raise error("of a callback.")  # the text has one full stop

    reloadpg.on_reload(lambda: calls.append("before"))
    reloadpg.on_reload(raises)
    reloadpg.on_reload(lambda: calls.append("after"))
    reloadpg.offload()
    seen = attempt(reloadpg.reload)
    assert seen.kind == ("" if rank else "ReloadpgError" if error is ValueError else error.__name__)
    if rank == 0 and error is ValueError:
        assert "raises raised ValueError: of a callback. All groups are live" in seen.text
        assert calls == ["before", "raises", "after"]
    assert calls[:2] == ["before", "raises"]
    job.assert_live()
    reloadpg.reload()
    assert sorted(calls) == sorted(["before", "raises", *["raises"] * (rank == 0), "after"])
    reloadpg.reload()
    assert len(calls) == (4 if rank == 0 else 3)


@pytest.mark.ranks(2)
def test_an_interrupt_at_a_last_barrier_that_all_have_passed_owes_the_callbacks(rank: int) -> None:
    """The reload is complete on all ranks, and its callbacks are called by the next one."""
    Job("gloo", subgroups=([0, 1],), timeout=FAR)
    calls: list[str] = []
    reloadpg.on_reload(lambda: calls.append("called"))
    reloadpg.offload()

    def hook(moment: str, operation: str, phase: str, _: int) -> None:
        if (moment, operation, phase) == ("after", "reload", "done") and rank == INTERRUPTED:
            raise KeyboardInterrupt

    remove_hook = on_barrier(hook)
    seen = attempt(reloadpg.reload)
    remove_hook()
    assert seen.kind == ("KeyboardInterrupt" if rank == INTERRUPTED else "")
    assert reloadpg.status().state == "live"
    reloadpg.reload()
    assert calls == ["called"]


def _uninstalls(rank: int, size: int) -> str:
    job = Job("gloo", subgroups=([0, 1],), timeout=FAR)
    with reloadpg.offloaded():
        reloadpg.reload()
        reloadpg.uninstall()
    assert worlds.sums_right(*job.groups.values())
    return "left"


def test_a_block_ends_after_uninstall_in_it() -> None:
    """Its groups are live by then, so nothing is to be reloaded."""
    assert run_ranks(_uninstalls, 2, timeout=240) == ["left", "left"]
