"""Ranks of one host arrive together: their messages, and what the store is asked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore
from watched_store import WatchedStore

from reloadpg.errors import DisagreementError, PeerFailedError
from reloadpg.rendezvous import peers
from reloadpg.rendezvous.host_channel import HostChannel
from reloadpg.rendezvous.plan import Plan
from reloadpg.rendezvous.round import Rendezvous

FAR = 600.0
"""Timeout in seconds that no rank reaches where all goes well."""
SOON = 100.0
OK = '{"kind": "ok"}'


@pytest.fixture
def pair() -> Iterator[tuple[HostChannel, HostChannel]]:
    leader, follower = HostChannel(3), HostChannel(5)
    leader.expect([5])
    follower.follow(leader.listen())
    yield leader, follower
    leader.close()
    follower.close()


def test_an_arrival_is_taken_once(pair: tuple[HostChannel, HostChannel]) -> None:
    """The sum, and whether all have arrived: asked again, all have, and nothing is left."""
    leader, follower = pair
    assert leader.gather("a", 0.0) == (0, False)
    assert follower.hand("a", 17)
    assert follower.hand("b", 5)
    assert leader.gather("a", SOON) == (17, True)
    assert leader.gather("a", SOON) == (0, True)
    assert leader.gather("b", SOON) == (5, True)


def test_a_decision_is_heard_by_those_who_wait_for_it(
    pair: tuple[HostChannel, HostChannel],
) -> None:
    """One of an earlier barrier is passed over."""
    leader, follower = pair
    leader.gather("a", 0.0)
    assert follower.hear("a", 0.0) is None
    leader.spread("a", '{"kind": "failed"}')
    leader.spread("b", OK)
    assert follower.hear("b", SOON) == OK
    assert follower.hear("b", 0.0) is None


def test_a_leader_that_is_gone_is_noticed_at_once(pair: tuple[HostChannel, HostChannel]) -> None:
    """No arrival is handed to it, and no wait for it lasts."""
    leader, follower = pair
    leader.gather("a", 0.0)
    leader.close()
    assert follower.hear("a", FAR) is None
    assert not follower.hand("a", 1)


def test_a_rank_that_arrived_alone_is_not_waited_for(
    pair: tuple[HostChannel, HostChannel],
) -> None:
    """Until it sends something again."""
    leader, follower = pair
    assert leader.gather("a", 0.0) == (0, False)
    leader.spread("a", OK)
    assert leader.gather("b", 0.0) == (0, True)
    assert follower.hand("b", 1)
    assert leader.gather("b", 0.0) == (1, True)
    leader.spread("b", OK)
    assert leader.gather("c", 0.0) == (0, False)


def test_no_leader_no_message() -> None:
    """A rank that finds none counts itself."""
    lone = HostChannel(1)
    lone.follow("there-is-none")
    assert not lone.hand("a", 1)
    assert lone.hear("a", FAR) is None
    lone.close()


class Hosts:
    """A job whose ranks are threads, on hosts, and the requests of each to their store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: list[int]) -> None:
        self.asked: Counter[tuple[int, str]] = Counter()
        self.counting = False
        self.size = len(hosts)
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.server = server
        self.ranks = []
        for rank, host in enumerate(hosts):
            monkeypatch.setattr(peers, "_host", lambda host=host: f"host {host}")
            store = WatchedStore(server.clone(), self._watch(rank))
            self.ranks.append(Rendezvous(lambda store=store: store, rank, self.size, watches=True))

    def _watch(self, rank: int) -> Any:
        def watch(method: str, key: str) -> None:
            if self.counting:
                self.asked[rank, method] += 1

        return watch

    def run(self, body: Any) -> list[Any]:
        results: dict[int, Any] = {}

        def call(rank: int) -> None:
            try:
                results[rank] = body(self.ranks[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON)
        return [results[rank] for rank in range(self.size)]

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


def plan(kind: str = "0") -> Plan:
    return Plan("offload", {"generation": kind})


def two_barriers(rdv: Rendezvous) -> str:
    round_ = rdv.open("offload", ("enter", "released"), FAR)
    round_.agree("enter", plan())
    round_.barrier("released")
    return "passed"


def test_only_one_rank_of_a_host_asks_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests a barrier, and the decision and two deletions of one rank."""
    job = Hosts(monkeypatch, [0, 0, 0, 0, 1, 1, 1, 2])
    assert job.run(two_barriers) == ["passed"] * 8
    assert job.run(two_barriers) == ["passed"] * 8
    keys = job.server.num_keys()
    job.counting = True
    for _ in range(5):
        assert job.run(two_barriers) == ["passed"] * 8
    job.end()
    assert {rank for rank, _ in job.asked} == {0, 4, 7}
    barriers, hosts = 10, 3
    assert sum(n for (_, method), n in job.asked.items() if method == "add") == barriers * hosts
    assert sum(job.asked.values()) <= barriers * (3 * hosts + 3)
    assert job.server.num_keys() == keys


def test_ranks_of_several_hosts_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The summands of a host are added up before they are counted."""
    job = Hosts(monkeypatch, [0, 0, 1, 1])
    for _ in range(2):
        assert job.run(two_barriers) == ["passed"] * 4

    def other(rdv: Rendezvous) -> None:
        round_ = rdv.open("offload", ("enter",), FAR)
        round_.agree("enter", plan("1" if rdv.rank == 3 else "0"))

    found = job.run(other)
    job.end()
    assert all(isinstance(one, DisagreementError) for one in found), found
    assert all("0 on ranks 0-2 and 1 on rank 3" in str(one) for one in found), found


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_reaches_all_hosts(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """A leader's and a follower's, of which the others wait; the next operation passes."""
    job = Hosts(monkeypatch, [0, 0, 1, 1])
    assert job.run(two_barriers) == ["passed"] * 4

    def fails(rdv: Rendezvous) -> None:
        round_ = rdv.open("offload", ("enter", "released"), FAR)
        round_.agree("enter", plan())
        if rdv.rank == failing:
            round_.fail(RuntimeError("broken"))
        else:
            round_.barrier("released")

    found = job.run(fails)
    assert found.pop(failing) is None
    assert all(isinstance(one, PeerFailedError) and one.rank == failing for one in found), found
    assert job.run(two_barriers) == ["passed"] * 4
    job.end()
