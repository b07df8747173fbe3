"""Strategy ``suspend`` over real ranks: what comes back, what stays, what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from suspend_job import HELD, MIB, STAYS, Job, attempt, chosen, reasons

import reloadpg
from reloadpg import StrategyPolicy
from reloadpg.groups.registry import registry
from reloadpg.lifecycle import memory
from reloadpg.testing import run_ranks, simulated

pytestmark = pytest.mark.matrix


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def three_cycles(rank: int, size: int, strategy: str) -> dict[str, Any]:
    job = Job(strategy)
    backends = {n: g._get_backend(torch.device("cpu")) for n, g in job.groups.items()}
    cycles = []
    for _ in range(3):
        before, rss_before = simulated.stats(), resident()
        report = reloadpg.offload()
        after, rss_after = simulated.stats(), resident()
        refused, facts = job.refused(), job.facts()
        status = reloadpg.status()
        again = reloadpg.offload()
        back = reloadpg.reload()
        cycles.append(
            {
                "report": report,
                "reload": back,
                "held": (before.held_bytes, after.held_bytes, simulated.stats().held_bytes),
                "rss": rss_before - rss_after,
                "refused": refused,
                "facts": facts,
                "status": status,
                "again": again.changed,
                "live": job.facts(),
                "sums": job.sums(),
                "nothing": reloadpg.reload().changed,
            }
        )
    now = {n: g._get_backend(torch.device("cpu")) for n, g in job.groups.items()}
    stats = simulated.stats()
    return {
        "groups": list(job.groups),
        "cycles": cycles,
        "same_backend": [now[name] is backend for name, backend in backends.items()],
        "counts": (stats.created, stats.suspended, stats.resumed),
    }


@pytest.mark.parametrize("strategy", ["suspend", "recreate"])
def test_three_cycles(strategy: str) -> None:
    """On WORLD and three overlapping subgroups: what the accelerator holds is what is reported.

    Recreate gives back all that communicators hold; suspend keeps its share, and the backends.
    Resident memory confirms it. Offloaded groups refuse collectives, and the same objects sum right
    after the reload.
    """
    suspends = strategy == "suspend"
    for result in run_ranks(three_cycles, 3, args=(strategy,), timeout=120):
        count = len(result["groups"])
        left = STAYS if suspends else 0
        # A rebuilt communicator takes its memory at its first use.
        again = HELD * count if suspends else 0
        for number, cycle in enumerate(result["cycles"]):
            assert cycle["held"] == (HELD * count, left * count, again), number
            report, back = cycle["report"], cycle["reload"]
            assert report.memory_source == back.memory_source == "simulated"
            assert report.released_bytes == (HELD - left) * count
            assert cycle["rss"] == pytest.approx(report.released_bytes, rel=0.05)
            assert report.to_dict()["offload/released_bytes"] == report.released_bytes
            assert back.restored_bytes == again - left * count
            assert report.restored_bytes is back.released_bytes is None
            assert [group.bytes for group in report.groups] == [HELD] * count
            assert {*chosen(report).values(), *chosen(back).values()} == {strategy}
            stay = [f"kept {left * count / MIB:.1f} MiB" in text for text in report.warnings]
            assert stay == [True] * suspends
            assert cycle["refused"]
            assert {state for state, _ in cycle["facts"].values()} == {"offloaded"}
            assert cycle["sums"]
            assert {*cycle["live"].values()} == {("live", 0 if suspends else number + 1)}
            assert (cycle["again"], cycle["nothing"]) == (False, False)
            for group in cycle["status"].groups:
                assert (group.strategy, group.cycles) == (strategy, number + 1)
                assert (group.memory_bytes, group.timeout_s) == (left, 1800)
                assert group.last_offload_ms is not None
            assert cycle["status"].memory_bytes == left * count
        assert {*result["same_backend"]} == {suspends}
        kept = (count, 3 * count, 3 * count)
        assert result["counts"] == (kept if suspends else (4 * count, 0, 0))


def unused(rank: int, size: int, used: tuple[str, ...]) -> dict[str, Any]:
    job = Job("suspend", used=False)
    job.sums(*used)
    seen = []
    for _ in range(2):
        report = reloadpg.offload()
        held = simulated.stats().held_bytes
        refused = job.refused()
        back = reloadpg.reload()
        seen.append(
            {
                "chosen": chosen(report),
                "skipped": [g.desc.replace("default_pg", "WORLD") for g in report.skipped],
                "back": chosen(back),
                "held": held,
                "refused": refused,
            }
        )
    return {"seen": seen, "sums": job.sums(), "created": simulated.stats().created}


@pytest.mark.parametrize("used", [("WORLD", "g0"), ("g0",)], ids="+".join)
def test_a_communicator_that_was_never_used_is_skipped_on_all_ranks(used: tuple[str, ...]) -> None:
    """NCCL refuses to suspend it; it is set aside alike by all members, and works afterwards.
    Others are suspended, also where a rank has used none of its own.
    """
    for rank, result in enumerate(run_ranks(unused, 3, args=(used,), timeout=60)):
        members = {"WORLD": {0, 1, 2}, "g0": {0, 1}, "g1": {1, 2}, "g2": {0, 1, 2}}
        mine = {
            name: "suspend" if name in used else "skip"
            for name, ranks in members.items()
            if rank in ranks
        }
        for seen in result["seen"]:
            assert seen["chosen"] == seen["back"] == mine
            assert sorted(seen["skipped"]) == sorted(n for n, how in mine.items() if how == "skip")
            assert seen["held"] == STAYS * list(mine.values()).count("suspend")
            assert seen["refused"]
        assert result["sums"]
        assert result["created"] == len(mine)


def destroyed_while_suspended(rank: int, size: int) -> dict[str, Any]:
    job = Job("suspend")
    reloadpg.offload()
    group = job.groups.pop("g2")
    dist.destroy_process_group(group)
    held = simulated.stats().held_bytes
    reloadpg.reload()
    sums, state = job.sums(), str(group.state)
    reloadpg.offload()
    dist.destroy_process_group()
    return {
        "held": held,
        "others": len(job.groups),
        "state": state,
        "sums": sums,
        "left": simulated.stats().held_bytes,
        "live": simulated.stats().live,
        "leaked": simulated.stats().leaked,
    }


def test_destroying_suspended_groups_frees_the_rest() -> None:
    """A group destroyed while suspended gives back what it still held, and stays destroyed; so
    does the whole job.
    """
    for result in run_ranks(destroyed_while_suspended, 3, timeout=60):
        assert result["held"] == STAYS * result["others"]
        assert result["state"] == "destroyed"
        assert result["sums"]
        assert (result["left"], result["live"], result["leaked"]) == (0, 0, 0)


def overridden(rank: int, size: int) -> dict[str, Any]:
    policy = StrategyPolicy("suspend", groups={"g0": "recreate"})
    job = Job(policy)
    report = reloadpg.offload()
    reloadpg.reload()
    again = attempt(lambda: reloadpg.install(strategy="suspend"))
    same = attempt(lambda: reloadpg.install(strategy=policy, timeout=registry.options.timeout))
    return {"chosen": chosen(report), "sums": job.sums(), "again": again, "same": same}


def test_a_strategy_for_single_groups() -> None:
    """Patterns of the description choose: recreate for one group, suspend for the others."""
    for rank, result in enumerate(run_ranks(overridden, 3, timeout=60)):
        expected = {"WORLD": "suspend", "g2": "suspend"}
        expected |= {"g0": "recreate"} if rank < 2 else {}
        expected |= {"g1": "suspend"} if rank > 0 else {}
        assert result["chosen"] == expected
        assert result["sums"]
        assert result["again"][0] == "PatchConflictError"
        assert result["same"] == ("", "")


def changed_while_suspended(rank: int, size: int) -> dict[str, Any]:
    job = Job("suspend")
    group = job.groups["WORLD"]
    reloadpg.offload()
    group._set_group_desc("renamed")
    reloadpg.reload()
    return {"desc": group.communicator.group_desc, "sums": job.sums()}


def test_a_description_set_while_suspended_holds() -> None:
    """What was set on the offloaded group is on the resumed one."""
    for result in run_ranks(changed_while_suspended, 3, timeout=60):
        assert result == {"desc": "renamed", "sums": True}


def gloo_groups(rank: int, size: int) -> dict[str, Any]:
    reloadpg.install(backends={worlds.BACKEND}, strategy="suspend")
    worlds.init()
    report = reloadpg.offload()
    reloadpg.reload()
    value = torch.ones(1)
    dist.all_reduce(value)
    return {"reason": reasons(report), "warnings": report.warnings, "sum": value.item()}


def test_a_backend_that_cannot_suspend() -> None:
    """Gloo groups are recreated, and the report gives the reason in one warning."""
    for result in run_ranks(gloo_groups, 2, timeout=60):
        assert result["sum"] == 2
        assert "cannot suspend" in result["reason"]["WORLD"]
        assert [t for t in result["warnings"] if "1 group is recreated, not suspended" in t]


def no_room(rank: int, size: int) -> dict[str, Any]:
    job = Job("suspend")
    reloadpg.offload()
    held = simulated.stats().held_bytes
    if rank == 1:  # the rollout engine still has the memory
        simulated.configure(capacity_bytes=held + 2 * MIB)
    free = memory.free_bytes()
    failed, facts = attempt(reloadpg.reload), job.facts()
    resumed = simulated.stats().resumed
    if rank == 1:
        simulated.configure(capacity_bytes=0)
    report = reloadpg.reload()
    return {
        "free": free,
        "failed": failed,
        "facts": facts,
        "resumed": resumed,
        "chosen": set(chosen(report).values()),
        "sums": job.sums(),
    }


def test_no_rank_resumes_before_all_have_room() -> None:
    """One rank without room: all raise, nothing was resumed anywhere; with room it goes on."""
    for rank, result in enumerate(run_ranks(no_room, 3, timeout=60)):
        kind, text = result["failed"]
        assert kind == ("InsufficientMemoryError" if rank == 1 else "PeerFailedError")
        assert "rank 1 has 2 MiB free (simulated)" in text
        assert result["free"] == ((2 * MIB, "simulated") if rank == 1 else None)
        assert {state for state, _ in result["facts"].values()} == {"offloaded"}
        assert result["resumed"] == 0
        assert result["chosen"] == {"suspend"}
        assert result["sums"]
