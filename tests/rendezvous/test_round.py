"""Barriers, decisions and keys on real stores, with a thread and a store client for each rank.

``test_protocol.py`` checks all interleavings; these tests add stores, threads and clocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.rank_threads import FAR, PLAN, SOON, Job, two_barriers, work
from helpers.watched_store import Watch, WatchedStore
from helpers.worlds import SILENCE
from torch.distributed import FileStore, HashStore, Store, TCPStore

from reloadpg.errors import PeerFailedError, ReloadpgError, RendezvousTimeoutError
from reloadpg.rendezvous.decision import Decision
from reloadpg.rendezvous.rendezvous import Rendezvous
from reloadpg.rendezvous.round import Round, on_barrier
from reloadpg.settings import LOG_WAIT
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


def signals_arrival(arrived: threading.Event, rank: int, at: str = "") -> dict[int, Watch]:
    """Set the event when this rank is counted at a barrier, before it waits there."""

    def counted(method: str, key: str) -> None:
        if method == "add" and key.endswith(f"{at}/count"):
            arrived.set()

    return {rank: counted}


def meet_after(mark: str, *ranks: int) -> dict[int, Watch]:
    """Let these ranks wait after they have added to a key ``/mark`` until all of them have."""
    all_have = threading.Barrier(len(ranks))

    def answered(method: str, key: str) -> None:
        if method == "add" and key.endswith(f"/{mark}"):
            all_have.wait(SOON)

    return dict.fromkeys(ranks, answered)


class SilentStore(WatchedStore):
    """Existing clients get no response once `silent` is set; new clients do."""

    def __init__(self, store: Any, silent: threading.Event, ended: threading.Event) -> None:
        early = not silent.is_set()

        def watch(method: str, key: str) -> None:
            if early and silent.is_set():
                ended.wait(FAR)

        super().__init__(store, watch)
        self.silent, self.ended = silent, ended

    def clone(self) -> SilentStore:
        return SilentStore(self._store.clone(), self.silent, self.ended)


def silent_job(size: int) -> tuple[Job, list[SilentStore]]:
    """A job, and each rank's store."""
    stores = [SilentStore(store, threading.Event(), threading.Event()) for store in clients(size)]
    return job_on(stores), stores


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
    release, ended, begun, committed = *(threading.Event() for _ in range(3)), []

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
    worked, arrived, over = threading.Event(), threading.Event(), threading.Event()
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


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("silence")
def test_an_error_names_ranks_that_failed_before_and_ranks_that_do_not_respond() -> None:
    """The abort of a rank breaks the collectives of others before they read its failure."""
    job = tcp_job(4, meet_after("answered", 0, 1, 3))  # the grace period begins then
    entered = threading.Barrier(3)
    failed = threading.Event()
    own = ReloadpgError("connection closed by peer")

    def body(rdv: Rendezvous) -> None:
        round_ = Round.open(rdv, "recover", ("enter", "rebuilt"), FAR)
        entered.wait(SOON)
        if rdv.rank == 0:
            round_.fail(KeyboardInterrupt("by the user"))
            failed.set()
            return
        assert failed.wait(SOON)
        if rdv.rank == 1:
            round_.fail(own)
            raise own
        round_.barrier("enter", PLAN)

    _, second, error = job.run(body, ranks=[0, 1, 3])
    first, *more = str(second).splitlines()
    assert first == "connection closed by peer"
    assert more[0] == "Rank 0 failed first: KeyboardInterrupt: by the user"
    assert "No response since then from rank 2" in more[1]
    assert (error.rank, error.missing) == (0, (2,))


@pytest.mark.parametrize("operation", ["offload", "barrier 'x'"])
def test_a_rank_that_arrives_after_the_timeout_was_decided_is_missing(operation: str) -> None:
    """Also within the grace period: the others wait there for its response."""
    decided = threading.Event()

    def answered(method: str, key: str) -> None:
        if method == "add" and key.endswith("/answered"):
            decided.set()

    job = tcp_job(3, {0: answered})
    phase = "enter" if operation == "offload" else "arrive"

    def body(rdv: Rendezvous) -> None:
        if rdv.rank == 2:
            assert decided.wait(SOON)
        Round.open(rdv, operation, (phase,), 1.0 if rdv.rank == 0 else FAR).barrier(phase, PLAN)

    for rank, error in enumerate(job.run(body)):
        assert isinstance(error, RendezvousTimeoutError), error
        assert (error.missing, error.arrived) == ((2,), 2), error
        assert "2 of 3 ranks arrived, missing: rank 2" in str(error)
        assert ("This rank arrived too late" in str(error)) == (rank == 2)


@pytest.mark.usefixtures("silence")
def test_a_late_rank_that_opens_the_next_attempt_alone_is_said_to_have_come_late() -> None:
    """A reload repairs, so it waits there for those that had waited for it."""
    job, left = tcp_job(2), threading.Event()

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


TIMEOUT = Decision("timeout", 2, missing=(1, 3), stuck=(2,), doing="rank 2 was in: group 7")
FAILED = Decision("failed", 1, text="broken")


@pytest.mark.parametrize(
    ("decision", "operation", "said"),
    [
        (TIMEOUT, "reload", "rank 2 waited 3 s without progress in phase 'enter'; 1 of 4 ranks"),
        (TIMEOUT, "reload", "missing: ranks 1, 3. Rank 2 did not finish its own work"),
        (TIMEOUT, "reload", "rank 2 was in: group 7"),
        (TIMEOUT, "reload", "A missing rank has not called reload()"),
        (TIMEOUT, "reload", "call reload() again on all ranks"),
        (TIMEOUT, "reload", "if ranks 1, 3 ended, restart the job"),
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
    else:
        assert "timeout" not in str(error)


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("error", [ReloadpgError, RuntimeError, KeyboardInterrupt])
def test_a_rank_that_fails_waits_until_the_others_have_read_it(error: type[BaseException]) -> None:
    """Its abort would break their connections. An interrupted rank does not wait."""
    ended: list[int] = []
    first = threading.Event()

    def late(method: str, key: str) -> None:  # rank 0 is slow to respond
        if method == "add" and key.endswith("/answered") and 0 not in ended:
            first.wait(0.6)
            ended.append(0)

    one, other = clients(2)
    job = job_on([WatchedStore(one, watch=late), other])

    def body(rdv: Rendezvous) -> None:
        round_ = Round.open(rdv, "reload", ("done",), FAR)
        if rdv.rank == 0:
            round_.barrier("done")
        round_.fail(error("broken"))
        ended.append(1)
        first.set()

    assert isinstance(job.run(body)[0], PeerFailedError)
    assert ended == ([1, 0] if error is KeyboardInterrupt else [0, 1])


@pytest.mark.parametrize("last", [False, True])
def test_an_error_of_a_rank_when_all_have_arrived_ends_a_later_phase(last: bool) -> None:
    """The operation is complete in spite of it, if that was the last barrier."""
    passed, arrived = threading.Event(), threading.Event()
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
    ended, counted = threading.Event(), threading.Event()

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
    job, stores = silent_job(2)

    def body(rdv: Rendezvous) -> tuple[bool, bool]:
        Round.open(rdv, "reload", ("enter",), FAR).barrier("enter", PLAN)
        if rdv.rank == 0:
            Round.open(rdv, "recover", ("enter",), FAR)
            return False, True
        stores[1].silent.set()
        first, end = rdv.recovery_requested(), time.monotonic() + SOON
        while not rdv.recovery_requested() and time.monotonic() < end:
            time.sleep(0.01)
        return first, rdv.recovery_requested()

    assert job.run(body) == [(False, True)] * 2
    stores[1].ended.set()


class HeldStore(WatchedStore):
    """The first count of a job gets no response; later requests do."""

    def __init__(self, ended: threading.Event) -> None:
        self.held: list[str] = []

        def watch(method: str, key: str) -> None:
            if method == "add" and "jobs/" in key and not self.held:
                self.held.append(key)
                ended.wait(FAR)

        super().__init__(clients(1)[0], watch)


def test_a_request_without_a_response_does_not_block_later_requests() -> None:
    """Counting the job has a timeout, so ``init_process_group`` does not wait for it."""
    ended = threading.Event()
    held = HeldStore(ended)
    rdv = Rendezvous(lambda: held, 0, 2)
    rdv.count_job(0.1)
    assert held.held
    assert not rdv.state.job
    try:
        assert rdv.ask(lambda _: "answered", Deadline("next", 20.0)) == "answered"
        rdv.count_job(20.0)
        assert rdv.state.job == 1
    finally:
        ended.set()


def test_a_reply_to_an_abandoned_request_changes_nothing() -> None:
    """Another request has counted the job since then."""
    others, ended = {*threading.enumerate()}, threading.Event()
    held = HeldStore(ended)
    rdv = Rendezvous(lambda: held, 0, 2, watches=True)
    rdv.count_job(0.1)
    try:
        rdv.count_job(SOON)
        assert rdv.state.job
        state = vars(rdv.state).copy()
    finally:
        ended.set()
    rdv.end(Deadline("the end", SOON))
    for thread in {*threading.enumerate()} - others:
        thread.join(SOON)
    assert vars(rdv.state) == state


def test_a_rank_that_has_counted_fewer_jobs_joins_the_newest_one() -> None:
    """Its initialisation of an earlier job has failed. It is in the list of its host there."""
    stores = clients(2)

    def begin(*counted: int) -> Job:
        job = Job([Rendezvous(partial(stores.__getitem__, n), n, 2, watches=True) for n in (0, 1)])
        for rank in counted:
            job.ranks[rank].count_job(SOON)
        return job

    begin(1)  # rank 0 has not begun this job
    second = begin(0, 1)
    assert [rdv.state.job for rdv in second.ranks] == [1, 2]
    assert second.run(two_barriers) == ["passed"] * 2
    assert [rdv.state.job for rdv in second.ranks] == [2, 2]
    listed = stores[0].get(f"reloadpg/2/hosts/{second.ranks[0].peers.host}").decode()
    assert sorted(line[0] for line in listed.splitlines()) == ["0", "1"]
    third = begin(0, 1)
    assert [rdv.state.job for rdv in third.ranks] == [3, 3]
    assert third.run(two_barriers) == ["passed"] * 2


@pytest.mark.parametrize("key", ["job", "1/current"])
def test_a_value_of_another_program_is_named_on_every_rank(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits at a barrier is woken, and does not find it by polling."""
    monkeypatch.setenv(LOG_WAIT, str(FAR))  # it polls after that time
    waits = threading.Event()
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
