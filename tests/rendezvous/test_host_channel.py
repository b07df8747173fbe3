"""Ranks of one host arrive together: messages within the host, and requests to the store."""

from __future__ import annotations

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from rank_threads import FAR, PLAN, SOON, Job, two_barriers
from torch.distributed import TCPStore
from watched_store import WatchedStore

from reloadpg.rendezvous import peers, store_client
from reloadpg.rendezvous.host_channel import HostChannel
from reloadpg.rendezvous.round import Rendezvous

OK = '{"kind": "ok"}'


@pytest.fixture
def pair() -> Iterator[tuple[HostChannel, HostChannel]]:
    leader, follower = HostChannel(3), HostChannel(5)
    leader.expect([5])
    follower.follow(leader.listen())
    yield leader, follower
    leader.close()
    follower.close()


def test_an_arrival_is_counted_once(pair: tuple[HostChannel, HostChannel]) -> None:
    """``gather`` returns the sum of new arrivals, and whether all have arrived."""
    leader, follower = pair
    assert leader.gather("a", 0.0) == (0, False)
    assert follower.hand("a", 17)
    assert follower.hand("b", 5)
    assert leader.gather("a", SOON) == (17, True)
    assert leader.gather("a", SOON) == (0, True)
    assert leader.gather("b", SOON) == (5, True)


def test_a_decision_is_read_at_its_barrier(
    pair: tuple[HostChannel, HostChannel],
) -> None:
    """A decision of an earlier barrier is ignored."""
    leader, follower = pair
    leader.gather("a", 0.0)
    assert follower.hear("a", 0.0) is None
    leader.spread("a", '{"kind": "failed"}')
    leader.spread("b", OK)
    assert follower.hear("b", SOON) == OK
    assert follower.hear("b", 0.0) is None


def test_a_closed_leader_ends_the_wait(pair: tuple[HostChannel, HostChannel]) -> None:
    leader, follower = pair
    leader.gather("a", 0.0)
    leader.close()
    assert follower.hear("a", FAR) is None
    assert not follower.hand("a", 1)


def test_a_leader_does_not_wait_for_a_rank_that_the_store_counted(
    pair: tuple[HostChannel, HostChannel],
) -> None:
    """The leader waits for this rank again once it has sent an arrival."""
    leader, follower = pair
    assert leader.gather("a", 0.0) == (0, False)
    leader.spread("a", OK)
    assert leader.gather("b", 0.0) == (0, True)
    assert follower.hand("b", 1)
    assert leader.gather("b", 0.0) == (1, True)
    leader.spread("b", OK)
    assert leader.gather("c", 0.0) == (0, False)


def test_a_leader_without_file_descriptors_sleeps_between_polls(
    pair: tuple[HostChannel, HostChannel],
) -> None:
    """It cannot accept a connection, and accepts it later."""
    leader, follower = pair
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        assert leader.gather("a", 0.0) == (0, False)
        begun = time.monotonic()
        leader.pause(0.2)
        assert time.monotonic() - begun > 0.19
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in taken:
            os.close(one)
    assert follower.hand("a", 17)
    assert leader.gather("a", SOON) == (17, True)


def test_a_rank_without_a_leader_sends_nothing() -> None:
    """The store counts it instead."""
    lone = HostChannel(1)
    lone.follow("there-is-none")
    assert not lone.hand("a", 1)
    assert lone.hear("a", FAR) is None
    lone.close()


def test_the_lowest_rank_of_a_host_waits_for_the_others() -> None:
    """Also at the first barrier after they have met."""
    leader, follower = peers.Peers(3), peers.Peers(5)
    entries = leader.entry() + follower.entry()
    assert leader.meet(entries) == follower.meet(entries) == (3, 5)
    assert leader.channel.gather("a", 0.0) == (0, False)
    assert follower.channel.hand("a", 7)
    assert leader.channel.gather("a", SOON) == (7, True)
    leader.forget()
    follower.forget()


class HostsJob(Job):
    """Ranks on these hosts, which count their requests to the store.

    Unless ``meets`` is False, they have passed two barriers: after that, the ranks of a host arrive
    together. A rank whose leader is slow does not read the store instead.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, hosts: list[int], *, meets: bool = True
    ) -> None:
        monkeypatch.setattr(store_client, "HEAR_S", FAR)
        self.asked: Counter[tuple[int, str]] = Counter()  # by rank and key
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = []
        for rank, host in enumerate(hosts):
            monkeypatch.setattr(peers, "_host", lambda host=host: f"host {host}")
            store = WatchedStore(self.server.clone(), partial(self._count, rank))
            ranks.append(Rendezvous(lambda store=store: store, rank, len(hosts), watches=True))
        super().__init__(ranks)
        assert not meets or self.run(two_barriers) == ["passed"] * len(hosts)

    def _count(self, rank: int, method: str, key: str) -> None:
        self.asked[rank, key] += 1

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


def without_work(rdv: Rendezvous) -> None:
    """One operation of two barriers; a rank would poll the store while it works between them."""
    round_ = rdv.open("offload", ("enter", "released"), FAR)
    round_.agree("enter", PLAN)
    round_.barrier("released")


def test_one_rank_of_each_host_uses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests per host and barrier; one rank also decides and deletes two keys.

    In a long wait, which the key ``here`` marks, a rank polls the store, and a leader counts the
    ranks that come later in another request. Such barriers are not examined.
    """
    hosts = 3
    job = HostsJob(monkeypatch, [0, 0, 0, 0, 1, 1, 1, 2])
    assert job.run(without_work) == [None] * 8
    keys = job.server.num_keys()
    for _ in range(5):
        assert job.run(without_work) == [None] * 8
    job.end()
    barriers: dict[str, Counter[tuple[int, str]]] = {}
    for (rank, key), times in job.asked.items():
        found = re.search(r"/0\.(\d+)/(\w+)/(\w+)", key)
        if found and int(found[1]) > 1:  # the ranks of a host do not know each other before
            barriers.setdefault(found[1] + found[2], Counter())[rank, found[3]] += times
    assert len(barriers) == 12
    short = [asked for asked in barriers.values() if "here" not in {name for _, name in asked}]
    assert short
    for asked in short:
        assert {rank for rank, _ in asked} == {0, 4, 7}
        # The rank that decides deletes both keys.
        counted = sum(times for (_, name), times in asked.items() if name == "count")
        assert hosts <= counted <= hosts + 1
        assert asked.total() <= 3 * hosts + 3
    # Keys do not accumulate; some are of the last barrier, if the wait there was long.
    assert job.server.num_keys() <= keys + hosts + 1


def test_a_rank_that_waited_in_an_earlier_job_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has counted one more job, and rank 1 follows it there from a barrier."""
    job = HostsJob(monkeypatch, [0, 0], meets=False)
    job.server.add("reloadpg/instance/0", 1)

    def body(rdv: Rendezvous) -> str:
        while rdv.rank == 0 and not job.server.check(["reloadpg/1/0.1/enter/count"]):
            time.sleep(0.01)
        return two_barriers(rdv)

    assert job.run(body) == ["passed"] * 2
    assert [rdv.state.instance for rdv in job.ranks] == [2, 2]
    job.end()
