"""Strategy ``suspend`` over real ranks: memory, skipped groups, errors."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import HELD, MIB, STAYS, TRIANGLE, Job, reasons, strategies

import reloadpg
from reloadpg import c10d
from reloadpg.lifecycle import memory
from reloadpg.testing import simulated

pytestmark = pytest.mark.matrix

SUSPENDS: dict[str, Any] = {"strategy": "suspend", "subgroups": TRIANGLE}


def resident() -> int:
    """Anonymous memory: the first offload also reads pages of libraries, 1.3 MiB on Python 3.14."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", ["suspend", "recreate"])
def test_three_cycles(strategy: str) -> None:
    """The report has the bytes that the accelerator has released, which resident memory confirms.

    Recreate releases all memory of communicators; suspend keeps a part of it, and the backends.
    Collectives raise on offloaded groups, and the same objects sum correctly after the reload.
    """
    job = Job("sim", **SUSPENDS | {"strategy": strategy})
    count, suspends = len(job.groups), strategy == "suspend"
    left = STAYS * count if suspends else 0
    again = HELD * count if suspends else 0  # a rebuilt communicator takes memory at its first use
    backends = [group._get_backend(torch.device("cpu")) for group in job.groups.values()]
    for cycle in range(1, 4):
        assert simulated.stats().held_bytes == HELD * count
        rss = resident()
        report = reloadpg.offload()
        rss -= resident()
        assert simulated.stats().held_bytes == left
        assert job.refused()
        assert job.states() == {"offloaded"}
        status = reloadpg.status()
        assert status.memory_bytes == left
        for group in status.groups:
            assert (group.strategy, group.cycles) == (strategy, cycle)
            assert (group.memory_bytes, group.timeout_s) == (left // count, 120)
            assert group.last_offload_ms is not None
        assert not reloadpg.offload().changed
        back = reloadpg.reload()
        assert simulated.stats().held_bytes == again
        assert (job.states(), job.generations()) == ({"live"}, {0 if suspends else cycle})
        assert job.sums()
        assert not reloadpg.reload().changed
        assert report.memory_source == back.memory_source == "simulated"
        assert report.released_bytes == HELD * count - left
        assert rss == pytest.approx(report.released_bytes, rel=0.05)
        assert report.pinned_bytes == (report.released_bytes if suspends else 0)
        assert back.pinned_bytes == 0
        assert report.to_dict()["offload/released_bytes"] == report.released_bytes
        assert back.restored_bytes == again - left
        assert report.restored_bytes is back.released_bytes is None
        assert [group.bytes for group in report.groups] == [HELD] * count
        assert {*strategies(report).values(), *strategies(back).values()} == {strategy}
        warnings = [text for text in report.warnings if "backend taken by" not in text]
        kept = [f"kept {left / MIB:.1f} MiB" in text for text in warnings]
        assert kept == [True] * suspends
    for group, backend in zip(job.groups.values(), backends, strict=True):
        assert (group._get_backend(torch.device("cpu")) is backend) == suspends
    stats = simulated.stats()
    assert (stats.created, stats.suspended, stats.resumed) == (
        (count, 3 * count, 3 * count) if suspends else (4 * count, 0, 0)
    )


@pytest.mark.ranks(3)
@pytest.mark.parametrize("used", [("WORLD", "g0"), ("g0",)], ids="+".join)
def test_a_communicator_that_was_never_used_is_skipped_on_all_ranks(
    rank: int, used: tuple[str, ...]
) -> None:
    """NCCL cannot suspend it. All members skip it, and it works afterwards. Other groups are
    suspended, even if a rank has used none of its groups.
    """
    job = Job("sim", **SUSPENDS, used=False)
    job.sums(*used)
    members = {"WORLD": {0, 1, 2}, "g0": {0, 1}, "g1": {1, 2}, "g2": {0, 1, 2}}
    mine = {
        name: "suspend" if name in used else "skip"
        for name, ranks in members.items()
        if rank in ranks
    }
    for _ in range(2):
        report = reloadpg.offload()
        assert simulated.stats().held_bytes == STAYS * list(mine.values()).count("suspend")
        assert job.refused()
        assert strategies(report) == strategies(reloadpg.reload()) == mine
    assert job.sums()
    assert simulated.stats().created == len(mine)


@pytest.mark.ranks(3)
def test_destroying_suspended_groups_releases_their_remaining_memory() -> None:
    """First one group, which stays destroyed after the reload, and then all groups."""
    job = Job("sim", **SUSPENDS)
    reloadpg.offload()
    group = job.groups.pop("g2")
    with simulated.inject(simulated.Fault("release", operation="shutdown")):
        dist.destroy_process_group(group)  # by an abort: a shutdown would need the peers
    assert simulated.stats().held_bytes == STAYS * len(job.groups)
    reloadpg.reload()
    assert job.sums()
    assert group.state == "destroyed"
    reloadpg.offload()
    dist.destroy_process_group()
    stats = simulated.stats()
    assert (stats.held_bytes, stats.live, stats.leaked) == (0, 0, 0)


@pytest.mark.ranks(3)
def test_what_is_set_while_suspended_holds_after_the_reload() -> None:
    job = Job("sim", **SUSPENDS)
    group = job.groups["WORLD"]
    reloadpg.offload()
    group._set_group_desc("renamed")
    group._managed.set_timeout(timedelta(seconds=77))
    reloadpg.reload()
    inner = group._managed.communicator
    assert inner.group_desc == "renamed"
    reported = c10d.get_timeouts(inner, tuple(group._managed.construction.devices))
    assert {timeout.total_seconds() for timeout in reported.values()} == {77}
    assert job.sums()


@pytest.mark.ranks(2)
def test_groups_of_a_backend_that_cannot_suspend_are_recreated() -> None:
    """The report gives the reason, and one warning."""
    reloadpg.install(backends={worlds.BACKEND}, strategy="suspend")
    worlds.init()
    report = reloadpg.offload()
    reloadpg.reload()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2
    assert "cannot suspend" in reasons(report)["WORLD"]
    assert any("1 group is recreated, not suspended" in text for text in report.warnings)


@pytest.mark.ranks(3)
def test_no_rank_resumes_before_all_have_enough_memory(rank: int) -> None:
    """If one rank has too little, all raise and none resumes. With just enough, all resume."""
    job = Job("sim", **SUSPENDS)
    needed = simulated.stats().held_bytes
    reloadpg.offload()
    if rank == 1:  # the rollout engine still has the memory
        simulated.configure(capacity_bytes=simulated.stats().held_bytes + 2 * MIB)
    assert memory.free_bytes() == ((2 * MIB, "simulated") if rank == 1 else None)
    error = reloadpg.errors.InsufficientMemoryError if rank == 1 else reloadpg.PeerFailedError
    with pytest.raises(error, match=r"rank 1 has 2 MiB free \(simulated\)"):
        reloadpg.reload()
    assert job.states() == {"offloaded"}
    assert simulated.stats().resumed == 0
    if rank == 1:
        simulated.configure(capacity_bytes=needed)
    assert {*strategies(reloadpg.reload()).values()} == {"suspend"}
    assert job.sums()


@pytest.mark.ranks(3)
def test_a_suspend_that_gave_back_too_little_is_the_last_one_of_the_job(rank: int) -> None:
    """The report of the first offload says so there. All ranks then recreate, also other groups."""
    if rank == 0:
        simulated.register()
        simulated.configure(suspend_works=False)  # no setting shows it, such as an old driver
    job = Job("sim", **SUSPENDS | {"subgroups": ((0, 1), (1, 2))})
    first = reloadpg.offload()
    assert {*strategies(first).values()} == {"suspend"}
    short = [text for text in first.warnings if "gave back" in text]
    assert [rank] * len(short) == [0] * (rank == 0)
    assert all("gave back 0.0 MiB of the 14.0 MiB" in text for text in short)
    assert all("All ranks recreate their groups" in text for text in short)
    reloadpg.reload()
    assert job.sums()
    second = reloadpg.offload()
    assert strategies(second) == dict.fromkeys(job.groups, "recreate")
    assert all("rank 0: an earlier suspend gave back" in t for t in reasons(second).values())
    reloadpg.reload()
    assert job.sums()


@pytest.mark.parametrize("setting", ["NCCL_CUMEM_ENABLE=0", "NCCL_CUMEM_ENABLE = 0", "NCCL_X=1"])
def test_nccls_configuration_files_are_read(tmp_path: Path, setting: str) -> None:
    """Of the variable's file, or the home's; the variable itself counts more."""
    file = tmp_path / ".nccl.conf"
    file.write_text(f"# NCCL_CUMEM_ENABLE=1\n{setting}\n")
    for environ in ({"NCCL_CONF_FILE": str(file)}, {"HOME": str(tmp_path)}):
        name = setting.partition("=")[0].strip()
        assert c10d.nccl_settings(environ)[name] == (setting[-1], str(file))
        over = c10d.nccl_settings({**environ, "NCCL_CUMEM_ENABLE": "1"})
        assert over["NCCL_CUMEM_ENABLE"] == ("1", "the environment")
