"""The simulated accelerator suspends by NCCL's rules; without reloadpg's lifecycle."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reloadpg.lifecycle import memory
from reloadpg.testing import run_ranks, simulated

MIB = 1 << 20
pytestmark = pytest.mark.matrix


def start(**configuration: Any) -> Any:
    simulated.register()
    simulated.configure(bytes_per_communicator=8 * MIB, **configuration)
    dist.init_process_group("sim")
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def use() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def error(function: Any) -> str:
    try:
        function()
    except RuntimeError as raised:
        return str(raised)
    return ""


def walk(rank: int, size: int) -> dict[str, Any]:
    backend = start()
    seen: dict[str, Any] = {
        "unused": [error(getattr(backend, n)) for n in ("suspend", "resume", "memory_stats")]
    }
    use()
    seen["live"] = backend.memory_stats()
    seen["resumed live"] = error(backend.resume)
    backend.suspend()
    seen["suspended"] = backend.memory_stats()
    seen["held"] = simulated.stats().held_bytes
    seen["source"] = memory.in_use()["simulated"]
    seen["twice"] = error(backend.suspend)
    seen["used"] = error(use)
    backend.resume()
    seen["again"] = backend.memory_stats()
    seen["sum"] = use()
    backend.suspend()
    dist.destroy_process_group()
    seen["end"] = (simulated.stats().held_bytes, simulated.stats().released)
    return seen


@pytest.fixture(scope="module")
def walked() -> list[dict[str, Any]]:
    return run_ranks(walk, 2, timeout=60)


class TestRules:
    """One communicator through its life."""

    def test_an_unused_communicator_is_not_initialized(self, walked: Any) -> None:
        """There is nothing to suspend, to resume, or to count."""
        for seen in walked:
            assert all("not initialized" in text for text in seen["unused"])

    def test_part_of_the_memory_stays(self, walked: Any) -> None:
        """Seven eighths come back, under NCCL's names, and are taken again."""
        live = {"suspend": 7 * MIB, "suspended": 0, "persist": MIB, "total": 8 * MIB}
        for seen in walked:
            assert seen["live"] == seen["again"] == live
            assert seen["suspended"] == {**live, "suspended": 1, "total": MIB}
            assert seen["held"] == seen["source"] == MIB

    def test_the_wrong_state_is_invalid_usage(self, walked: Any) -> None:
        """Suspended twice, resumed while live."""
        for seen in walked:
            assert "invalid usage: suspend" in seen["twice"]
            assert "invalid usage: resume" in seen["resumed live"]

    def test_use_while_suspended_is_undefined(self, walked: Any) -> None:
        """Here it is an illegal memory access, so that a test sees it."""
        for seen in walked:
            assert "illegal memory access" in seen["used"]

    def test_a_resumed_communicator_works_and_ends(self, walked: Any) -> None:
        """The sum is right, and a suspended one is destroyed whole."""
        for seen in walked:
            assert seen["sum"] == 2
            assert seen["end"] == (0, 1)


def hang(rank: int, size: int) -> dict[str, Any]:
    backend = start()
    use()
    if rank == 1:
        simulated.inject(simulated.Fault("suspend"))
        failed = error(backend.suspend)
        dist.group.WORLD.get_group_store().set("failed", "1")
        return {"failed": failed}
    ended: list[str] = []
    waiting = threading.Thread(target=lambda: ended.append(error(backend.suspend)), daemon=True)
    waiting.start()
    dist.group.WORLD.get_group_store().wait(["failed"])
    hangs = not ended and backend.memory_stats()["suspended"] == 0
    backend.abort()
    waiting.join()
    return {"hangs": hangs, "ended": ended}


def test_the_peers_of_a_member_that_fails_hang_until_they_abort() -> None:
    """The call has no bound of its own."""
    waiting, failed = run_ranks(hang, 2, timeout=60)
    assert "injected fault" in failed["failed"]
    assert waiting["hangs"]
    assert len(waiting["ended"]) == 1
    assert "was released" in waiting["ended"][0]


def run_out(rank: int, size: int) -> dict[str, Any]:
    backend = start(capacity_bytes=8 * MIB)
    use()
    backend.suspend()
    assert memory.free_bytes() == (7 * MIB, "simulated")
    simulated.configure(capacity_bytes=2 * MIB)
    seen = {"resume": error(backend.resume), "held": simulated.stats().held_bytes}
    group = dist.new_group([0])
    seen["connect"] = error(lambda: dist.all_reduce(torch.ones(1), group=group))
    return seen


def test_memory_can_run_out() -> None:
    """On a resume and on a first use; nothing is taken then."""
    (seen,) = run_ranks(run_out, 1, timeout=60)
    assert "out of memory" in seen["resume"]
    assert "out of memory" in seen["connect"]
    assert seen["held"] == MIB


def nothing_back(rank: int, size: int, how: str) -> dict[str, Any]:
    if how == "variable":
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
    backend = start(suspend_works=how == "variable")
    use()
    backend.suspend()
    held = simulated.stats().held_bytes
    backend.resume()
    return {"held": (held, simulated.stats().held_bytes), "sum": use()}


@pytest.mark.parametrize("how", ["variable", "setting"])
def test_a_suspend_can_do_nothing(how: str) -> None:
    """With NCCL_CUMEM_ENABLE=0 it succeeds and gives nothing back."""
    for seen in run_ranks(nothing_back, 2, args=(how,), timeout=60):
        assert seen == {"held": (8 * MIB, 8 * MIB), "sum": 2}


@pytest.mark.parametrize(
    "setting", [{"persistent_share": 1.5}, {"persistent_share": -1}, {"capacity_bytes": -1}]
)
def test_bad_settings(setting: dict[str, Any]) -> None:
    """A ValueError; nothing is changed."""
    with pytest.raises(ValueError, match="nothing was changed"):
        simulated.configure(**setting)
