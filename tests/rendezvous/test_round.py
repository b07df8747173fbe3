"""Barriers, outcomes and keys on real stores, with a thread and a store client for each rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, Store, TCPStore
from watched_store import Watch, WatchedStore

from reloadpg import c10d
from reloadpg.errors import (
    PeerFailedError,
    ReloadpgError,
    RendezvousTimeoutError,
)
from reloadpg.rendezvous import round as rounds
from reloadpg.rendezvous.decision import Decision
from reloadpg.rendezvous.plan import Plan, Proposal
from reloadpg.rendezvous.round import Rendezvous
from reloadpg.rendezvous.store_client import StoreSilent, absent
from reloadpg.rendezvous.worker_thread import Wait

pytestmark = pytest.mark.matrix

FAR = 600.0
"""Bound in seconds that no rank reaches where all goes well."""
SOON = 100.0
"""Seconds in which a rank has long ended that does not wait for FAR: a limit, not a measurement."""

PLAN = Plan("offload", {"generation": "0"})


class Job:
    """The ranks of a job as threads: nothing here is process-global."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.size = len(stores)
        self.ranks = [
            Rendezvous(lambda own=store: own, rank, self.size)  # type: ignore[misc]
            for rank, store in enumerate(stores)
        ]
        self.store = stores[0]
        # As a job connects when it is created: a look-up of host names that is slow to fail must
        # not count against the bounds of the tests.
        self.run(lambda rdv: rdv.ask(lambda _: None, Wait("connecting", 30)))

    def run(
        self, body: Callable[[Rendezvous], Any], ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """What each rank's call returned or raised, and the seconds it took, in rank order."""
        chosen = range(self.size) if ranks is None else ranks
        results: dict[int, Any] = {}

        def call(rank: int) -> None:
            begun = time.monotonic()
            try:
                result = body(self.ranks[rank])
            except Exception as error:
                result = error
            results[rank] = (result, time.monotonic() - begun)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON)
        return [results[rank] for rank in chosen]


def tcp_job(size: int, answered: Mapping[int, Watch] = {}) -> Job:
    """A job on a TCPStore; some ranks are told of each question that was answered to them."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [server, *(server.clone() for _ in range(size - 1))]
    return Job(
        [
            WatchedStore(store, answered=answered[rank]) if rank in answered else store
            for rank, store in enumerate(stores)
        ]
    )


def signals_arrival(arrived: threading.Event, *ranks: int, at: str = "") -> dict[int, Watch]:
    """An event that is set when ranks were counted at a barrier, before they wait there."""
    left = {*ranks}

    def counted(rank: int, method: str, key: str) -> None:
        if method == "add" and key.endswith(f"{at}/count"):
            left.discard(rank)
            if not left:
                arrived.set()

    if not ranks:
        arrived.set()
    return {rank: partial(counted, rank) for rank in ranks}


def meet_after(mark: str, *ranks: int) -> dict[int, Watch]:
    """Ranks that set a key on the store go on when all of them have set theirs."""
    all_have = threading.Barrier(len(ranks))

    def answered(method: str, key: str) -> None:
        if method == "set" and f"/{mark}/" in key:
            all_have.wait(SOON)

    return dict.fromkeys(ranks, answered)


class SilentStore(WatchedStore):
    """From a moment on, clients that were connected before get no answer; later ones do."""

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
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [
        SilentStore(store, threading.Event(), threading.Event())
        for store in (server, *(server.clone() for _ in range(size - 1)))
    ]
    return Job(stores), stores


@pytest.fixture(params=["tcp", "file", "hash"])
def any_job(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Job]:
    def make(size: int) -> Job:
        if request.param == "tcp":
            return tcp_job(size)
        if request.param == "file":
            return Job([FileStore(str(tmp_path / "store"), size) for _ in range(size)])
        return Job([HashStore()] * size)

    return make


def three_barriers(rdv: Rendezvous) -> str:
    round_ = rdv.open("offload", ("enter", "quiesced", "released"), FAR)
    round_.agree("enter", PLAN)
    round_.run("quiesced", lambda *_: None, lambda: "nothing")
    round_.barrier("quiesced")
    round_.barrier("released")
    return "passed"


@pytest.mark.parametrize("size", [2, 5, 8])
def test_all_ranks_pass_many_rounds(any_job: Callable[[int], Job], size: int) -> None:
    """On every kind of store."""
    job = any_job(size)
    for _ in range(3):
        assert [result for result, _ in job.run(three_barriers)] == ["passed"] * size


def test_keys_are_retired() -> None:
    """However many rounds: the keys of two barriers and the count of this job are what is left."""
    job = tcp_job(4)
    counts = []
    for _ in range(6):
        job.run(three_barriers)
        counts.append(job.store.num_keys())
    # A barrier has two shared keys and one of each rank; an agreeing one one more; one key a rank
    # counts jobs, and a TCPStore counts one key of its own.
    assert max(counts) <= 2 * (2 + 4) + 1 + 4 + 1
    assert counts[2:] == [counts[2]] * 4


def test_keys_of_proposals_are_retired() -> None:
    """Whoever made them; none of a barrier is left when all ranks are at the second after it."""
    job = tcp_job(3)

    def proposing(rdv: Rendezvous) -> None:
        round_ = rdv.open("offload", ("enter", "quiesced", "released"), FAR)
        proposals = [Proposal("of all", "x"), Proposal(f"of {rdv.rank}", "x", yields=True)]
        assert round_.agree("enter", PLAN, proposals, ["of all"]) == {"of all": "x"}
        round_.barrier("quiesced")
        round_.barrier("released")

    job.run(three_barriers)
    before = job.store.num_keys()
    for _ in range(3):
        assert [result for result, _ in job.run(proposing)] == [None] * 3
    assert job.store.num_keys() == before


@pytest.mark.parametrize("absent", [[1], [0], [1, 2, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_a_time_out_names_the_missing_ranks(absent: list[int]) -> None:
    """Phase, bound, how many arrived and who did not, alike on all ranks that came."""
    present = [rank for rank in range(8) if rank not in absent]
    last, others = present[-1], threading.Event()
    bounds = {rank: 0.5 if rank == last else FAR for rank in present}
    job = tcp_job(8, signals_arrival(others, *present[:-1]))

    def arrive(rdv: Rendezvous) -> None:
        assert rdv.rank != last or others.wait(SOON)
        begun = time.monotonic()
        with pytest.raises(RendezvousTimeoutError) as caught:
            rdv.open("reload", ("enter",), bounds[rdv.rank]).agree("enter", PLAN)
        assert rdv.rank != last or time.monotonic() - begun >= 0.5
        raise caught.value

    for rank, (error, seconds) in zip(present, job.run(arrive, present), strict=True):
        assert isinstance(error, RendezvousTimeoutError)
        assert isinstance(error, TimeoutError)
        assert (error.phase, error.seconds) == ("enter", bounds[rank])
        assert (error.arrived, error.missing) == (len(present), tuple(absent))
        assert seconds < SOON
        assert f"{len(present)} of 8 ranks arrived" in str(error)


@pytest.fixture
def all_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grace expires: each ends when all ranks have answered, and all of them do."""
    monkeypatch.setattr(rounds, "GRACE_S", SOON)
    monkeypatch.setattr(rounds, "_TELL_S", SOON)


@pytest.mark.usefixtures("all_answer")
def test_a_failure_is_heard_at_once(any_job: Callable[[int], Job]) -> None:
    """Ranks that wait at the barrier and ranks at work read it long before the bound."""
    job = any_job(3)
    release = threading.Event()

    def body(rdv: Rendezvous) -> str | None:
        round_ = rdv.open("offload", ("enter", "released"), FAR)
        round_.agree("enter", PLAN)
        if rdv.rank == 0:
            return round_.fail(ReloadpgError("out of memory"))
        if rdv.rank == 1:
            round_.run("released", lambda *_: release.wait(FAR), lambda: "working")
        round_.barrier("released")
        return None

    results = job.run(body)
    release.set()
    assert results[0][0] == "released"
    for error, seconds in results[1:]:
        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.phase, error.missing) == (0, "released", ())
        assert "ReloadpgError: out of memory" in str(error)
        assert seconds < SOON


def test_who_does_not_answer_after_a_failure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank that failed too."""
    monkeypatch.setattr(rounds, "_TELL_S", SOON)
    job = tcp_job(4, meet_after("answer", 0, 1, 3))  # from then on the grace counts
    own = ReloadpgError("connection reset")

    def body(rdv: Rendezvous) -> None:
        round_ = rdv.open("reload", ("enter", "rebuilt"), FAR)
        if rdv.rank == 0:
            round_.fail(own)
            raise own
        round_.agree("enter", PLAN)

    results = job.run(body, ranks=[0, 1, 3])
    assert all("No response since then from rank 2" in str(error) for error, _ in results)
    assert [error.missing for error, _ in results[1:]] == [(2,), (2,)]
    assert all(seconds < SOON for _, seconds in results)


def test_a_failure_that_another_one_came_before_names_it() -> None:
    """A peer that aborts fails the collectives of others, who may not have heard of it yet."""
    job = tcp_job(2)
    told = threading.Event()
    own = ReloadpgError("connection closed by peer")

    def body(rdv: Rendezvous) -> None:
        round_ = rdv.open("recover", ("enter", "rebuilt"), FAR)
        if rdv.rank == 0:
            round_.fail(KeyboardInterrupt("by the user"))
            told.set()
            return
        assert told.wait(SOON)
        round_.fail(own)
        raise own

    ((error, _),) = job.run(body)[1:]
    assert str(error).splitlines() == [
        "connection closed by peer",
        "Rank 0 failed first: KeyboardInterrupt: by the user",
    ]


def test_proposals_reach_those_who_look_them_up() -> None:
    """What any rank has proposed, whoever looks; nothing where nobody has proposed anything."""
    job = tcp_job(3)
    proposals = [[Proposal("a", "1")], [Proposal("b", "2"), Proposal("c", "3")], []]
    asks = [["b", "d"], [], ["c", "a"]]
    results = job.run(
        lambda rdv: rdv.open("reload", ("enter",), FAR).agree(
            "enter", PLAN, proposals[rdv.rank], asks[rdv.rank]
        )
    )
    assert [result for result, _ in results] == [{"b": "2"}, {}, {"c": "3", "a": "1"}]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_proposal_that_yields_is_read_only_without_another(order: tuple[int, int]) -> None:
    """Whoever comes first."""
    written = threading.Event()
    job = tcp_job(2, signals_arrival(written, order[0]))
    proposals = [[Proposal("a", "weak", yields=True)], [Proposal("a", "strong")]]

    def agree(rdv: Rendezvous) -> dict[str, str]:
        round_ = rdv.open("reload", ("enter",), FAR)
        if rdv.rank != order[0]:
            assert written.wait(SOON)
        return round_.agree("enter", PLAN, proposals[rdv.rank], ["a"])

    assert [result for result, _ in job.run(agree)] == [{"a": "strong"}] * 2


def test_a_rank_alone_reads_its_own_proposals() -> None:
    """As with others: those that it looks up."""
    round_ = Rendezvous(None, 0, 1).open("reload", ("enter",), 20)
    proposals = [Proposal("a", "1"), Proposal("b", "2")]
    assert round_.agree("enter", PLAN, proposals, ["b", "c"]) == {"b": "2"}


def test_work_that_does_not_end_is_told_from_ranks_that_are_gone() -> None:
    """Who is stuck leaves a sign, with what it is at; who is gone is missing."""
    job = tcp_job(3, meet_after("rebuilt/answer", 0, 1))  # from then on the grace counts
    release = threading.Event()

    def body(rdv: Rendezvous) -> None:
        rdv.open("reload", ("enter",), FAR).agree("enter", PLAN)
        if rdv.rank < 2:
            round_ = rdv.open("reload", ("rebuilt",), 0.7)
            round_.run("rebuilt", lambda *_: release.wait(FAR), lambda: "the group of tests")

    results = job.run(body)
    release.set()
    assert results[2][0] is None
    for error, seconds in results[:2]:
        assert isinstance(error, RendezvousTimeoutError)
        assert error.missing == (2,)
        assert "Ranks 0-1 did not finish their own work" in str(error)
        assert "the group of tests" in str(error)
        assert seconds < SOON


def test_abandoned_work_is_told_that_it_is_not_wanted() -> None:
    """What comes late of it is not put in place."""
    release, ended, wanted = threading.Event(), threading.Event(), []

    def work(attempt: Any, _: int) -> None:
        release.wait(SOON)
        with attempt as still:
            wanted.append(still)
        ended.set()

    rdv = Rendezvous(None, 0, 1)
    with pytest.raises(RendezvousTimeoutError, match="did not finish its own work"):
        rdv.open("reload", ("rebuilt",), 0.3).run("rebuilt", work, lambda: "a group")
    release.set()
    assert ended.wait(SOON)
    assert wanted == [False]


def test_a_rank_alone_passes_without_a_store() -> None:
    """A job of one, or one on the fake backend, meets nobody."""
    assert three_barriers(Rendezvous(None, 0, 1)) == "passed"


class Counting:
    """A store that counts questions."""

    def __init__(self, present: set[str]) -> None:
        self.present = present
        self.checks = 0

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        return all(key in self.present for key in keys)


@pytest.mark.parametrize("missing", [[], [0], [999], [500], [3, 4, 900]])
def test_few_missing_ranks_are_found_with_few_questions(missing: list[int]) -> None:
    """At most twenty or so for each of a thousand ranks that is missing."""
    store: Any = Counting({f"1/enter/here/{rank}" for rank in range(1000) if rank not in missing})
    assert absent(store, "1/enter/here", range(1000)) == missing
    assert store.checks <= 1 + 20 * len(missing)


def test_a_long_wait_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first mark and at doubled ones, with operation, phase and missing ranks."""
    monkeypatch.setattr(Wait, "FIRST_LOG_S", 0.1)
    job = tcp_job(3)
    job.run(lambda rdv: rdv.open("reload", ("enter",), 2.0).agree("enter", PLAN), ranks=[0])
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 2 <= len(lines) <= 8  # it asks each 0.1 s; said at 0.1, 0.2, 0.4, 0.8 and 1.6 s
    assert all(line.startswith("reload, phase enter: waiting for") for line in lines)
    assert all(line.endswith("missing: ranks 1-2") for line in lines)


def test_a_store_that_is_gone_is_an_error_within_the_bound() -> None:
    """On every rank, and again in the next round."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [
        TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
        for _ in range(2)
    ]
    job = Job(clients)
    assert [result for result, _ in job.run(three_barriers)] == ["passed"] * 2
    del server
    for _ in range(2):
        for error, seconds in job.run(
            lambda rdv: rdv.open("offload", ("enter",), 0.5).agree("enter", PLAN)
        ):
            assert isinstance(error, ReloadpgError)
            assert "rendezvous store" in str(error)
            assert "Restart the job" in str(error)
            assert seconds < SOON


def test_outcomes_survive_the_store() -> None:
    """Written and read back, an outcome is the same."""
    outcome = Decision("timeout", 3, missing=(1, 2), stuck=(0,), doing="a group", proposed=True)
    assert Decision.from_json(outcome.to_json()) == outcome
    assert Decision.from_json(Decision("ok").to_json()) == Decision("ok")


@pytest.mark.parametrize(
    ("operation", "step"),
    [
        ("reload", "call reload() again on all ranks"),
        ("barrier 'the data'", "call barrier() again on all ranks"),
        ("exit", "restart the job: its process groups are aborted"),
    ],
)
@pytest.mark.parametrize("kind", ["failed", "timeout"])
def test_an_error_says_what_to_do_next(kind: str, operation: str, step: str) -> None:
    """A function that exists, or that nothing here can be called again."""
    outcome = Decision(kind, 1, text="broken", missing=(1,))
    error = outcome.error(operation, "arrive", seconds=3, rank=0, size=2)
    assert step in str(error)
    raised = "raise install(timeout=...)" in str(error)
    assert raised is (kind == "timeout" and operation == "reload")


def test_progress_extends_the_wait() -> None:
    """Of any rank, on ranks that work and on ranks that have arrived; then the bound holds."""
    worked, arrived, over = threading.Event(), threading.Event(), threading.Event()
    job = tcp_job(3, signals_arrival(arrived, 2, at="done"))
    steps, step = 22, 0.25  # 5.5 s of work under a bound of 5 s

    def body(rdv: Rendezvous) -> str:
        rdv.open("reload", ("enter",), FAR).agree("enter", PLAN)
        round_ = rdv.open("reload", ("rebuilt",), 5.0)

        def work(attempt: Any, _: int) -> None:
            if rdv.rank == 0:
                for _ in range(steps):
                    time.sleep(step)
                    round_.advance()
                worked.set()
            elif rdv.rank == 1:
                worked.wait(SOON)  # hangs longer than the bound, while rank 0 makes progress

        round_.run("rebuilt", work, lambda: "a group")
        round_.barrier("rebuilt")
        if rdv.rank == 0:
            over.wait(SOON)  # progress is over, until the others have ended
        elif rdv.rank == 1:
            assert arrived.wait(SOON)
        try:
            rdv.open("reload", ("done",), 0.5 if rdv.rank == 1 else FAR).barrier("done")
        finally:
            over.set()
        return "passed"

    for error, seconds in job.run(body):
        assert isinstance(error, RendezvousTimeoutError), error
        assert (error.phase, error.missing) == ("done", (0,))
        assert steps * step < seconds < SOON


def test_the_rank_that_hosts_the_store_raises_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process often ends then, and with it the store that the others still have to read."""
    monkeypatch.setattr(rounds, "GRACE_S", SOON)  # for which rank 0 waits for rank 1 at the end
    ended: list[int] = []
    first = threading.Event()

    def late(method: str, key: str) -> None:  # rank 1 knows who has answered, and takes its time
        if method == "compare_set" and key.endswith("/roll") and 1 not in ended:
            first.wait(0.6)  # it does not come: rank 0 is waiting
            ended.append(1)

    job = tcp_job(2, {1: late})

    def body(rdv: Rendezvous) -> None:
        round_ = rdv.open("reload", ("enter",), FAR)
        if rdv.rank == 1:
            round_.agree("enter", PLAN)
        round_.fail(ReloadpgError("broken"))
        ended.append(0)
        first.set()

    (_, _), (error, _) = job.run(body)
    assert isinstance(error, PeerFailedError)
    assert ended == [1, 0]  # the server is rank 0's: all are in this process


def test_a_silent_store_is_told_at_the_bound() -> None:
    """With the ranks of which nothing is known, on ranks that wait and on ranks that work."""
    job, stores = silent_job(3)
    hold = threading.Event()

    def body(rdv: Rendezvous) -> None:
        rdv.open("reload", ("enter",), FAR).agree("enter", PLAN)
        round_ = rdv.open("reload", ("rebuilt",), 1.5)
        stores[rdv.rank].silent.set()
        if rdv.rank == 2:
            round_.run("rebuilt", lambda *_: hold.wait(FAR), lambda: "a group")
        round_.barrier("rebuilt")

    results = job.run(body)
    hold.set()
    # The clients that do not answer are given up: the next question has one of its own.
    assert [result for result, _ in job.run(three_barriers)] == ["passed"] * 3
    for store in stores:
        store.ended.set()
    for rank, (error, seconds) in enumerate(results):
        assert isinstance(error, RendezvousTimeoutError), error
        assert error.unknown == tuple(other for other in range(3) if other != rank)
        assert "does not respond" in str(error)
        assert seconds < SOON


def test_a_recovery_is_noticed_soon_after_the_store_was_silent() -> None:
    """A link that is down for seconds hides it no longer than that."""
    job, stores = silent_job(2)

    def body(rdv: Rendezvous) -> tuple[bool, bool]:
        rdv.open("reload", ("enter",), FAR).agree("enter", PLAN)
        if rdv.rank == 0:
            rdv.recover(("enter",), "a fault", "", FAR)
            return False, True
        stores[1].silent.set()
        first, end = rdv.called(0.0), time.monotonic() + SOON
        while not rdv.called(0.0) and time.monotonic() < end:
            time.sleep(0.01)
        return first, rdv.called(0.0)

    assert [result for result, _ in job.run(body)] == [(False, True)] * 2
    stores[1].ended.set()


class HeldStore(WatchedStore):
    """The first count of a job gets no answer; the next connection is another one."""

    def __init__(self, store: Any, ended: threading.Event) -> None:
        self.held: list[str] = []

        def watch(method: str, key: str) -> None:
            if method == "add" and "instance" in key and not self.held:
                self.held.append(key)
                ended.wait(FAR)

        super().__init__(store, watch)


def test_a_count_without_an_answer_holds_up_no_other_question() -> None:
    """No lock is held across a question to the store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended = threading.Event()
    held = HeldStore(server, ended)
    rdv = Rendezvous(lambda: held, 0, 1)
    with pytest.raises(StoreSilent):
        rdv.ask(lambda _: None, Wait("held", 0.1))
    try:
        assert rdv.ask(lambda _: "answered", Wait("next", 20.0)) == "answered"
    finally:
        ended.set()


def test_a_job_begins_in_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """``init_process_group`` counts it, on a store that may give no answer."""
    monkeypatch.setattr(rounds, "_COUNT_S", 0.1, raising=False)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended = threading.Event()
    held = HeldStore(server, ended)
    counting = threading.Thread(target=Rendezvous(lambda: held, 0, 1).count_job, args=(held,))
    counting.start()
    counting.join(20.0)
    hangs = counting.is_alive()
    ended.set()
    assert not hangs


@pytest.mark.parametrize("early", [True, False])
def test_a_job_is_counted_without_a_question(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """A rank of an earlier job that asked the store nothing meets the others in the next one."""

    class World:
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(c10d, "has_peers", lambda: True)
    monkeypatch.setattr(c10d, "root_store_of_job", lambda _: lambda: store)
    for number in (1, 2):
        job = Rendezvous.of_world(World())  # type: ignore[arg-type]
        if early:
            job.count_job(store)
            assert job.instance == number  # in the call itself, before any connection is made
        for task in job.connect_ahead():
            assert task.wait(30)
        assert job.instance == number


def test_an_interrupt_while_the_thread_starts_abandons_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work runs already, and must not commit anything once the operation is over."""
    round_ = Rendezvous(None, 0, 1).open("offload", ("released",), 60)
    over, ended, wanted = threading.Event(), threading.Event(), []

    def work(attempt: Any, index: int) -> None:
        over.wait(60)
        with attempt as still:
            wanted.append(still)
        ended.set()

    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        round_.run("released", work, lambda: "work")
    over.set()
    assert ended.wait(60)
    assert wanted == [False]


def test_a_large_job_has_time_to_answer() -> None:
    """Its ranks ask the store every eight seconds, and learn so late that they have to answer."""
    rank = Rendezvous(None, 1, 16384)
    assert rank.pause_s > 8
    assert rank.grace_s > 2 * rank.pause_s
