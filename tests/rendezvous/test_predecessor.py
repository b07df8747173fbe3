"""A process that replaces another one finds the mark of its predecessor in the store."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore, TCPStore

from reloadpg.errors import PeerFailedError, ReloadpgError
from reloadpg.rendezvous.predecessor import Predecessor, job_keys
from reloadpg.rendezvous.round import Rendezvous
from reloadpg.rendezvous.worker_thread import Wait

pytestmark = pytest.mark.matrix

FAR = 200.0


def begin(store: object, rank: int = 0, size: int = 1, **more: object) -> Rendezvous:
    """Begin the job on this store as one rank."""
    rendezvous = Rendezvous(lambda: store, rank, size, marks=True, **more)  # type: ignore[arg-type]
    rendezvous.ask(lambda _: None, Wait("begin", FAR))
    return rendezvous


def leave_mark(store: object, rank: int = 0, instance: int = 1) -> None:
    """Leave the mark of another process that has begun the job."""
    job_keys(store, instance).set(f"process/{rank}", "another")  # type: ignore[arg-type]


def test_a_new_job_has_no_predecessor() -> None:
    """The mark of the same process does not count, and a job may have no marks."""
    store = HashStore()
    assert Predecessor.find(store, 0, 1) is None
    begin(store)
    assert Predecessor.find(store, 0, 1) is None
    other = HashStore()
    Rendezvous(lambda: other, 0, 1).ask(lambda _: None, Wait("begin", FAR))
    assert Predecessor.find(other, 0, 1) is None


def test_the_mark_of_another_process_is_found_once() -> None:
    """The first process that searches the last job on the store takes the mark."""
    store = HashStore()
    for _ in range(2):
        begin(store)
    leave_mark(store, instance=2)
    assert Predecessor.find(store, 0, 2) == Predecessor(2, 0)
    assert Predecessor.find(store, 0, 2) is None


def test_no_rank_of_an_ended_job_can_be_replaced() -> None:
    """A rank can be replaced until all ranks have ended the job."""
    store = HashStore()
    ranks = [begin(store, rank, 2) for rank in range(2)]
    for rank in range(2):
        leave_mark(store, rank)
    ranks[0].end()
    assert Predecessor.find(store, 0, 2) == Predecessor(1, 0)
    ranks[1].end()
    assert Predecessor.find(store, 1, 2) == Predecessor(1, 0)  # rank 0's replacement has not ended
    leave_mark(store)
    for rank in ranks:
        rank.end()
    assert Predecessor.find(store, 0, 2) is None


def test_a_replacement_starts_no_operation_before_it_has_rejoined() -> None:
    """It does not know the other ranks' number of operations."""
    rank = begin(HashStore(), predecessor=Predecessor(1, 0))
    with pytest.raises(ReloadpgError, match=r"Call reloadpg\.rejoin\(\) first"):
        rank.open("offload", ["enter"], FAR)


def test_a_predecessor_that_was_counted_is_not_counted_again() -> None:
    """It had arrived at a barrier. The ranks that wait there leave and meet in a new recovery."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [server.clone() for _ in range(4)]
    ranks = [begin(store, rank, 3) for rank, store in enumerate(stores[:3])]
    ended: list[object] = []

    def arrive(rendezvous: Rendezvous) -> None:
        try:
            rendezvous.recover(["enter"], "test", "{}", FAR).barrier("enter")
            ended.append("met")
        except PeerFailedError as error:
            ended.append(error.rank)

    def started(*chosen: Rendezvous) -> list[threading.Thread]:
        threads = [threading.Thread(target=arrive, args=(one,)) for one in chosen]
        for thread in threads:
            thread.start()
        return threads

    waiting = started(ranks[0], ranks[2])
    count = job_keys(server, 1)
    end = time.monotonic() + FAR
    while count.add("1.0/enter/count", 0) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    leave_mark(server, 2)
    place = Predecessor.find(stores[3], 2, 3)
    assert place == Predecessor(1, 1)
    new = begin(stores[3], 2, 3, predecessor=place)
    joining = started(new)
    for thread in waiting:
        thread.join(FAR)
    assert ended == [2, 2]
    for thread in [*started(ranks[0], ranks[1]), *joining]:
        thread.join(FAR)
    assert ended == [2, 2, "met", "met", "met"]
    assert {one.state.epoch for one in (*ranks[:2], new)} == {2}
