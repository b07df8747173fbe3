"""Barriers, decisions and keys on real stores, with a thread and a store client for each rank.

``test_protocol.py`` checks all interleavings; these tests add stores, threads and clocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from helpers.rank_threads import FAR, PLAN, SOON, Job, two_barriers, work
from helpers.watched_store import Watch, WatchedStore
from helpers.worlds import SILENCE
from torch.distributed import FileStore, HashStore, Store, TCPStore

from reloadpg.errors import ReloadpgError, RendezvousTimeoutError
from reloadpg.rendezvous.decision import Decision
from reloadpg.rendezvous.rendezvous import Rendezvous
from reloadpg.rendezvous.round import Round, on_barrier
from reloadpg.settings import GRACE, LOG_WAIT
from reloadpg.threads import CancelToken, Deadline, Interrupt, Interrupted, Task

pytestmark = pytest.mark.matrix


def job_on(stores: Sequence[Store]) -> Job:
    """A job whose ranks are connected, so slow host name lookups do not count as waits."""
    size = len(stores)
    job = Job([Rendezvous(lambda own=own: own, rank, size) for rank, own in enumerate(stores)])  # type: ignore[misc]
    job.run(lambda rdv: rdv.ask(lambda _: None, Deadline("connecting", 30)))
    return job


def clients(size: int) -> list[TCPStore]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, *(server.clone() for _ in range(size - 1))]


def tcp_job(size: int, answered: Mapping[int, Watch] = {}) -> Job:
    """A job on a TCPStore; `answered` has callbacks for responses, by rank."""
    return job_on(
        [
            WatchedStore(store, answered=answered[rank]) if rank in answered else store
            for rank, store in enumerate(clients(size))
        ]
    )


def signals_arrival(arrived: Event, rank: int, at: str = "") -> dict[int, Watch]:
    """Set the event when this rank is counted at a barrier, before it waits there."""

    def counted(method: str, key: str) -> None:
        if method == "add" and key.endswith(f"{at}/count"):
            arrived.set()

    return {rank: counted}


class HeldStore(WatchedStore):
    """The first request of a kind gets no response; later requests do.

    Args:
        store: the store that responds.
        holds: whether to hold a request, by its method and key; asked until one is held.
        ended: when the held request is sent after all.
    """

    def __init__(self, store: Store, holds: Callable[[str, str], bool], ended: Event) -> None:
        self.held: list[str] = []

        def watch(method: str, key: str) -> None:
            if not self.held and holds(method, key):
                self.held.append(key)
                ended.wait(FAR)

        super().__init__(store, watch)


# -- operations that pass --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_operations_pass_on_every_kind_of_store(kind: str, size: int, tmp_path: Path) -> None:
    if kind == "file":
        job = job_on([FileStore(str(tmp_path / "store"), size) for _ in range(size)])
    else:
        job = tcp_job(size) if kind == "tcp" else job_on([HashStore()] * size)
    for _ in range(3):
        assert job.run(two_barriers) == ["passed"] * size


def test_a_job_of_one_rank_needs_no_store() -> None:
    rdv = Rendezvous(None, 0, 1)
    assert two_barriers(rdv) == "passed"
    round_ = Round.open(rdv, "reload", ("enter",), 20)
    assert round_.barrier("enter", PLAN, "why") == "why"


# -- timeouts --------------------------------------------------------------------------------------


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only a short time for the responses of ranks that do not respond."""
    for name, seconds in SILENCE.items():
        monkeypatch.setenv(name, seconds)


@pytest.mark.parametrize(
    ("end", "timeout", "error"),
    [
        ("timeout", 0.3, RendezvousTimeoutError),
        ("interrupt", FAR, Interrupted),
        ("failure", SOON, ZeroDivisionError),
    ],
)
def test_work_that_ends_after_its_operation_is_not_committed(
    end: str, timeout: float, error: type[Exception]
) -> None:
    """The operation times out, its caller tells it to end, or another thread fails."""
    release, ended, begun, committed = *(Event() for _ in range(3)), []

    wanted = CancelToken()

    def commit() -> None:
        begun.set()
        release.wait(SOON)
        with wanted as is_wanted:
            committed.append(is_wanted)
        ended.set()

    def fail() -> None:
        assert begun.wait(SOON)
        raise ZeroDivisionError

    interrupt = Interrupt()
    round_ = Round(Rendezvous(None, 0, 1), "reload", ("rebuilt",), timeout, interrupt)
    round_.enter()
    if end == "interrupt":
        threading.Thread(
            target=lambda: begun.wait(SOON) and interrupt.tell(KeyboardInterrupt())
        ).start()
    with pytest.raises(error) as caught:
        tasks = [Task(one, "work") for one in [commit, *[fail] * (end == "failure")]]
        round_.watch(tasks, wanted, lambda: "a group")
    round_.fail(caught.value)
    release.set()
    assert ended.wait(SOON)
    assert committed == [False]


@pytest.mark.slow
@pytest.mark.usefixtures("silence")
def test_progress_of_any_rank_extends_the_wait() -> None:
    """It restarts the timeout of ranks that work or have arrived, and in a job of one rank."""
    worked, arrived, over = Event(), Event(), Event()
    together = threading.Barrier(3)
    job = tcp_job(3, signals_arrival(arrived, 2, at="/3"))
    steps, step = 22, 0.25  # 5.5 s of work with a timeout of 5 s

    def body(rdv: Rendezvous) -> str:
        Round.open(rdv, "reload", ("enter",), FAR).barrier("enter", PLAN)
        round_ = Round.open(rdv, "reload", ("rebuilt",), 5.0)

        def progress() -> None:
            if rdv.rank == 0:
                for _ in range(steps):
                    time.sleep(step)
                    round_.advance()
                worked.set()
            elif rdv.rank == 1:
                worked.wait(SOON)  # longer than the timeout, while rank 0 makes progress

        together.wait(SOON)  # rank 0 works for longer than the timeout after all have begun
        work(round_, progress)
        round_.barrier("rebuilt")
        if rdv.rank == 0:
            over.wait(SOON)  # no more progress, until the others have ended
        elif rdv.rank == 1:
            assert arrived.wait(SOON)
        try:
            Round.open(rdv, "barrier", ("done",), 0.5 if rdv.rank == 1 else FAR).barrier("done")
        finally:
            over.set()
        return "passed"

    def work_alone() -> None:
        round_ = Round.open(Rendezvous(None, 0, 1), "reload", ("rebuilt",), 5.0)

        def progress() -> None:
            for _ in range(steps):
                time.sleep(step)
                round_.advance()

        work(round_, progress)

    with ThreadPoolExecutor() as pool:
        alone = pool.submit(work_alone)
        for error in job.run(body):
            assert isinstance(error, RendezvousTimeoutError), error
            assert (error.phase, error.missing) == ("done", (0,))
        alone.result()


@pytest.mark.slow
@pytest.mark.usefixtures("silence")
def test_a_long_wait_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The message has operation, phase and what to do; the intervals double."""
    monkeypatch.setenv(LOG_WAIT, "0.1")
    job = tcp_job(3)
    job.run(
        lambda rdv: Round.open(rdv, "reload", ("enter",), 2.0).barrier("enter", PLAN), ranks=[0]
    )
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 2 <= len(lines) <= 8  # after 0.1, 0.2, 0.4, 0.8 and 1.6 s
    assert all(line.startswith("reload, phase enter: waiting for") for line in lines)
    assert all(line.endswith(" s for other ranks; see `reloadpg status`") for line in lines)


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("ends", ["interrupted", "passed"])
def test_a_rank_that_no_longer_polls_is_not_waited_for_at_the_end(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Rank 0 keeps the store for polling ranks, of which the key has the number."""
    monkeypatch.setenv(LOG_WAIT, "0.1")  # it polls after that time
    interrupt, polls = Interrupt(), threading.Event()

    def answered(method: str, key: str) -> None:
        if method == "add" and key.endswith("/polls") and not polls.is_set():
            polls.set()
            if ends == "interrupted":
                interrupt.tell(KeyboardInterrupt())

    job = tcp_job(2, {1: answered})

    def body(rdv: Rendezvous) -> None:
        with Round(rdv, "offload", ("enter",), FAR, interrupt) as round_:
            round_.enter()
            assert rdv.rank or polls.wait(SOON)
            round_.barrier("enter", PLAN)

    if ends == "passed":
        assert job.run(body) == [None, None]
    else:
        assert isinstance(job.run(body, ranks=[1])[0], Interrupted)
    assert polls.is_set()
    rdv = job.ranks[1]
    assert rdv.ask(lambda store: store.add(rdv.polls, 0), Deadline("polls", SOON)) == 0


# -- failures --------------------------------------------------------------------------------------


def test_the_error_of_a_rank_names_one_that_was_interrupted_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted rank does not wait until the others have read it. Its abort breaks their
    connections.
    """
    monkeypatch.setenv(GRACE, str(FAR))
    job, entered, failed = tcp_job(2), threading.Barrier(2), Event()
    own = ReloadpgError("connection closed by peer")

    def body(rdv: Rendezvous) -> None:
        round_ = Round.open(rdv, "recover", ("enter",), FAR)
        entered.wait(SOON)
        if rdv.rank == 1:
            assert failed.wait(SOON)
        round_.fail(own if rdv.rank == 1 else KeyboardInterrupt("by the user"))
        failed.set()

    assert job.run(body) == [None, None]
    first, second = str(own).splitlines()
    assert first == "connection closed by peer"
    assert second == "Rank 0 failed first: KeyboardInterrupt: by the user"


@pytest.mark.usefixtures("silence")
def test_a_late_rank_that_opens_the_next_attempt_alone_is_said_to_have_come_late() -> None:
    """A reload repairs, so it waits there for those that had waited for it."""
    job, left = tcp_job(2), Event()

    def body(rdv: Rendezvous) -> None:
        if rdv.rank == 1:
            assert left.wait(SOON)
        try:
            Round.open(rdv, "reload", ("enter",), 1.0).barrier("enter", PLAN)
        finally:
            left.set()

    first, second = job.run(body)
    assert (first.missing, second.missing) == ((1,), (0,))
    assert "Before this call, rank 1 had come too late to the reload() before" in str(second)
    assert "in which rank 0 waited until its timeout" in str(second)


TIMEOUT = Decision(
    *("timeout", 2), missing=(1,), late=(3,), stuck=(2,), doing="rank 2 was in: group 7"
)
FAILED = Decision("failed", 1, text="broken")


@pytest.mark.parametrize(
    ("decision", "operation", "said"),
    [
        (TIMEOUT, "reload", "rank 2 waited 3 s without progress in phase 'enter'; 1 of 4 ranks"),
        (TIMEOUT, "reload", "missing: ranks 1, 3. Rank 2 did not finish its own work"),
        (TIMEOUT, "reload", "rank 2 was in: group 7"),
        (TIMEOUT, "reload", "A missing rank has not called reload()"),
        (TIMEOUT, "reload", "call reload() again on all ranks"),
        (TIMEOUT, "reload", "if rank 1 ended, restart the job"),
        (TIMEOUT, "reload", "raise install(timeout=...)"),
        (TIMEOUT, "barrier 'the data'", "call barrier() again on all ranks"),
        (FAILED, "reload", "call reload() again on all ranks"),
        (FAILED, "exit", "The groups of this block are aborted. If the default group is one"),
    ],
)
def test_an_error_names_ranks_and_the_next_call(
    decision: Decision, operation: str, said: str
) -> None:
    error: Any = decision.error(Deadline(operation, 3, "enter"), rank=0, size=4)
    assert said in str(error)
    assert error.phase == "enter"
    if decision is TIMEOUT:
        assert (error.seconds, error.arrived, error.missing) == (3, 1, (1, 3))
        assert "arrived too late" not in str(error)
        late = str(decision.error(Deadline(operation, 3, "enter"), rank=3, size=4))
        assert "This rank arrived too late." in late
    else:
        assert "timeout" not in str(error)


@pytest.mark.parametrize("last", [False, True])
def test_an_error_of_a_rank_when_all_have_arrived_ends_a_later_phase(last: bool) -> None:
    """The operation is complete in spite of it, if that was the last barrier."""
    passed, arrived = Event(), Event()
    phases = ("enter",) if last else ("enter", "released")

    def hook(moment: str, operation: str, phase: str, rank: int) -> None:
        if (moment, phase, rank) == ("waiting", "enter", 0):
            assert passed.wait(SOON)
            raise RuntimeError("its own")

    def body(rdv: Rendezvous) -> str | None:
        round_ = Round.open(rdv, "offload", phases, FAR)
        if rdv.rank == 1:
            assert arrived.wait(SOON)
        try:
            round_.barrier("enter", PLAN)
            passed.set()
            if not last:
                round_.barrier("released")
        except Exception as error:
            return round_.fail(error)
        return "passed"

    job = tcp_job(2, signals_arrival(arrived, 0))
    remove_hook = on_barrier(hook)
    try:
        expected = [None, "passed"] if last else ["released", "released"]
        assert job.run(body) == expected
    finally:
        remove_hook()


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize(
    ("phases", "lost", "ends"),
    [
        (("enter",), True, None),
        (("enter", "done"), True, "done"),
        (("enter", "done"), False, "enter"),
    ],
)
def test_a_rank_that_loses_the_store_at_a_barrier_assumes_that_all_pass_it(
    phases: tuple[str, ...], lost: bool, ends: str | None
) -> None:
    """It may have been counted. If a new connection works, it ends the operation there."""
    ended, counted = Event(), Event()

    def watch(method: str, key: str) -> None:
        if lost and counted.is_set():
            ended.wait(FAR)

    def answered(method: str, key: str) -> None:
        if method == "add" and key.endswith("/count"):
            counted.set()
            ended.wait(FAR)

    one, _ = clients(2)
    job = job_on([WatchedStore(one, watch, answered), one])
    round_ = Round.open(job.ranks[0], "reload", phases, 0.3)
    with pytest.raises(RendezvousTimeoutError, match="store does not respond") as caught:
        round_.barrier("enter", PLAN)
    assert round_.fail(caught.value) == ends
    ended.set()


# -- stores that fail ------------------------------------------------------------------------------


@pytest.mark.usefixtures("silence")
def test_a_lost_store_is_an_error_on_every_rank_and_in_each_operation() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = job_on([TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(2)])
    assert job.run(two_barriers) == ["passed"] * 2
    del server
    for _ in range(2):
        call = lambda rdv: Round.open(rdv, "offload", ("enter",), 0.5).barrier("enter", PLAN)  # noqa: E731
        for error in job.run(call):
            assert isinstance(error, ReloadpgError)
            assert "rendezvous store" in str(error)
            assert "Restart the job" in str(error)


@pytest.mark.slow
def test_a_recovery_request_is_seen_after_the_store_did_not_respond() -> None:
    silent, ended = Event(), Event()
    one, other = clients(2)
    job = job_on([one, HeldStore(other, lambda method, key: silent.is_set(), ended)])

    def body(rdv: Rendezvous) -> tuple[bool, bool]:
        Round.open(rdv, "reload", ("enter",), FAR).barrier("enter", PLAN)
        if rdv.rank == 0:
            Round.open(rdv, "recover", ("enter",), FAR)
            return False, True
        silent.set()
        first, end = rdv.recovery_requested(), time.monotonic() + SOON
        while not rdv.recovery_requested() and time.monotonic() < end:
            time.sleep(0.01)
        return first, rdv.recovery_requested()

    assert job.run(body) == [(False, True)] * 2
    ended.set()


def test_a_request_without_a_response_blocks_nothing_and_its_late_reply_changes_nothing() -> None:
    """Counting the job has a timeout, so ``init_process_group`` does not wait for it."""
    others, ended = {*threading.enumerate()}, Event()
    held = HeldStore(clients(1)[0], lambda method, key: "/jobs/" in key, ended)
    rdv = Rendezvous(lambda: held, 0, 2, watches=True)
    rdv.count_job(0.1)
    assert held.held
    assert not rdv.state.job
    try:
        assert rdv.ask(lambda _: "answered", Deadline("next", SOON)) == "answered"
        rdv.count_job(SOON)
        assert rdv.state.job == 1
        state = vars(rdv.state).copy()
    finally:
        ended.set()
    rdv.end(Deadline("the end", SOON))
    for thread in {*threading.enumerate()} - others:
        thread.join(SOON)
    assert vars(rdv.state) == state


@pytest.mark.parametrize("key", ["job", "1/current"])
def test_a_value_of_another_program_is_named_on_every_rank(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits at a barrier is woken, and does not find it by polling."""
    monkeypatch.setenv(LOG_WAIT, str(FAR))  # it polls after that time
    waits = Event()
    job = tcp_job(2, signals_arrival(waits, 0))
    server = job.ranks[0].client
    if key == "job":
        server.ask(lambda store: store.set("reloadpg/job", "yes"), Deadline("set", SOON))
    else:
        assert job.run(two_barriers) == ["passed"] * 2  # later waits are long
        waits.clear()

    def body(rdv: Rendezvous) -> None:
        if rdv.rank == 1 and key != "job":
            assert waits.wait(SOON)
            rdv.client.ask(lambda store: store.set(f"reloadpg/{key}", "yes"), Deadline("x", SOON))
        with Round.open(rdv, "offload", ("enter",), FAR) as round_:
            round_.barrier("enter", PLAN)

    for error in job.run(body):
        assert type(error) is ReloadpgError, error
        assert f"the key {key!r} of the rendezvous store holds 'yes'" in str(error)


def test_keys_and_threads_do_not_accumulate() -> None:
    """Over a thousand operations, of which some fail."""
    others = {*threading.enumerate()}
    job = tcp_job(3)

    def body(rdv: Rendezvous) -> None:
        for number in range(1000):
            try:
                with Round.open(rdv, "reload", ("enter", "done"), FAR) as round_:
                    round_.barrier("enter", PLAN, "why" if number % 7 == 0 else "")
                    if number % 50 == rdv.rank:
                        raise ReloadpgError("broken")
                    round_.barrier("done")
            except ReloadpgError:
                pass

    def left() -> tuple[int, int]:
        job.run(two_barriers)
        keys = job.ranks[0].client.ask(lambda store: store.num_keys(), Deadline("keys", SOON))
        return keys, len({*threading.enumerate()} - others)

    before = left()
    job.run(body)
    assert left() == before


def test_the_grace_period_grows_with_the_job() -> None:
    """16,384 ranks poll the store every eight seconds, so responses take as long."""
    rank = Rendezvous(None, 1, 16384)
    assert rank.pause_s > 8
    assert rank.grace_s > 2 * rank.pause_s
