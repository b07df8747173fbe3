"""A process that replaces another one finds the mark of its predecessor in the store."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from reloadpg.errors import ReloadpgError
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
    """The first process that searches the last job on the store takes the mark.

    It does not take part in the recoveries that have begun.
    """
    store = HashStore()
    for _ in range(2):
        begin(store)
    leave_mark(store, instance=2)
    job_keys(store, 2).add("recovery", 3)
    assert Predecessor.find(store, 0, 2) == Predecessor(2, 3)
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
    with pytest.raises(ReloadpgError, match=r"Call reloadpg\.recovery\.rejoin\(\) first"):
        rank.open("offload", ["enter"], FAR)
