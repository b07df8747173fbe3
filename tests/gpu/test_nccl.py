"""NCCL communicators on real GPUs: memory, bits, options, training, suspend."""

from __future__ import annotations

import statistics
from datetime import timedelta
from typing import Any

import pytest
from gpu import gpu_job

from reloadpg.testing import run_ranks

MIB = 1 << 20
SLACK = 64 * MIB
"""Other processes and the driver change the device's figure by some MiB."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(gpu_job.no_gpu()), reason=gpu_job.no_gpu() or "-"),
]

SIZES = [
    1,
    pytest.param(
        2,
        marks=pytest.mark.skipif(
            gpu_job.ranks_at_hand() < 2,
            reason=gpu_job.no_gpu()
            or "one GPU, and NCCL below 2.30 or without NCCL_MULTI_RANK_GPU_ENABLE=1",
        ),
    ),
]


@pytest.fixture(scope="module", params=SIZES)
def recreated(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(gpu_job.cycles, request.param, args=("nccl", 20, "recreate"), timeout=280)


class TestTwentyCycles:
    """WORLD and three groups, used, released and rebuilt."""

    def test_memory_is_released_and_does_not_grow(self, recreated: Any) -> None:
        """Each offload releases as much as the first one."""
        for seen in recreated:
            assert seen["source"] == "device"
            assert seen["groups"] == 4
            released = [row["before"] - row["after"] for row in seen["rows"]]
            assert min(released) > 0
            middle = statistics.median(released)
            assert all(abs(one - middle) <= SLACK for one in released[1:]), released
            befores = [row["before"] for row in seen["rows"]]
            assert max(befores[1:]) - min(befores[1:]) <= SLACK, befores

    def test_the_report_equals_the_devices_figures(self, recreated: Any) -> None:
        """Up to what other processes use."""
        for seen in recreated:
            for row in seen["rows"]:
                assert abs(row["reported"] - (row["before"] - row["after"])) <= SLACK

    def test_collectives_give_the_same_bits(self, recreated: Any) -> None:
        """In an all-reduce of equal inputs before and after each cycle."""
        assert all(seen["equal"] for seen in recreated)

    def test_no_context_is_created_on_another_device(self, recreated: Any) -> None:
        """(Failure 32.)"""
        for seen in recreated:
            assert seen["other_contexts"] in (0, None)


def test_timeout_and_options_are_kept() -> None:
    """Timeout, high-priority stream and an NCCL config value (failure 9)."""
    (seen,) = run_ranks(gpu_job.options, 1, args=("nccl",), timeout=120)
    expected = {"timeout": timedelta(seconds=77), "high": True, "max_ctas": 4}
    assert seen["first"] == expected
    assert seen["later"] == [expected] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["fsdp2", "ddp"])
def test_training_with_cycles_is_bit_identical(how: str, size: int) -> None:
    """Six steps with two cycles and without."""
    with_cycles, without = (
        run_ranks(gpu_job.train, size, args=("nccl", how, offloads), timeout=140)
        for offloads in (True, False)
    )
    assert with_cycles == without


@pytest.mark.skipif(bool(gpu_job.no_suspend()), reason=gpu_job.no_suspend() or "-")
@pytest.mark.parametrize("size", SIZES)
def test_suspend_keeps_bits_and_leaks_no_memory(size: int) -> None:
    for seen in run_ranks(gpu_job.cycles, size, args=("nccl", 5, "suspend"), timeout=200):
        assert seen["equal"]
        for row in seen["rows"]:
            assert row["strategies"] == ["suspend"]
            assert row["before"] - row["after"] >= 0
        befores = [row["before"] for row in seen["rows"]]
        assert max(befores) - min(befores) <= SLACK
