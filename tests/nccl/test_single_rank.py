"""Groups of one rank: what they hold while they bypass, and their cycles with ``min_size=1``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import eventually
from helpers.nccl_job import held, left_over, on_engines, start, summed, used

import reloadpg
from reloadpg.cli.doctor import diagnose
from reloadpg.observability.publish import Publisher
from reloadpg.observability.record import decoded
from reloadpg.testing import standins

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

bound_or_not = pytest.mark.parametrize("bound", [True, False])


def alone(rank: int, number: int) -> list[dist.ProcessGroup]:
    """Groups of this rank alone, as Megatron creates them for dimensions of size one."""
    rows = [[dist.new_group([one]) for one in range(2)] for _ in range(number)]
    return [row[rank] for row in rows]  # type: ignore[misc]


def warnings_of_one_rank(report: reloadpg.Report) -> list[str]:
    return [text for text in report.warnings if "of one rank" in text]


@bound_or_not
@on_engines(2)
def test_bypassed_groups_of_one_rank_with_a_communicator_are_warned_of_once(
    engine: str, bound: bool, rank: int, tmp_path: Path
) -> None:
    """The looks at them create no communicator; status, its file and doctor say the same."""
    start(rank, bound=bound)
    groups = alone(rank, 3)
    assert summed(None, rank) == 3.0
    assert [summed(group, rank) for group in groups[:2]] == [rank + 1.0] * 2
    number = 3 if engine == "nccl2" or bound else 2  # these engines connect at the creation
    before = standins.communicators()
    reports = []
    for _ in range(2):
        reports += [reloadpg.offload(), reloadpg.reload(connect="eager")]
    told = [warnings_of_one_rank(report) for report in reports]
    assert [len(texts) for texts in told] == [1, 0, 0, 0]
    (text,) = told[0]
    assert text.startswith(f"{number} bypassed groups of one rank have communicators"), text
    assert "install(min_size=1) on all ranks" in text
    found = reloadpg.status()
    assert text in str(found)
    amounts = [group.memory_bytes for group in found.bypassed_groups if group.holds]
    assert len(amounts) == number
    if reports_memory := hasattr(dist.ProcessGroupNCCL, "memory_stats"):
        assert all(amounts)
    assert (" MiB, first group" in text) is reports_memory
    (finding,) = [one for one in diagnose() if one.check == "groups"]
    assert (finding.level, finding.message) == ("warning", text.partition("; ")[0])
    publisher = Publisher(tmp_path)
    publisher.start()
    file = tmp_path / f"rank-{rank}.json"
    assert eventually(file.is_file)
    publisher.stop()
    assert decoded(file.read_text()).alone == number
    assert standins.communicators() == before


@bound_or_not
@on_engines(2)
def test_groups_of_one_rank_cycle_with_min_size_1(engine: str, bound: bool, rank: int) -> None:
    """By value and by memory: an offload leaves no communicator, and nothing is warned of."""
    start(rank, bound=bound, min_size=1)
    groups = [None, *alone(rank, 2)]
    expected = [3.0, rank + 1.0, rank + 1.0]
    assert [summed(group, rank) for group in groups] == expected
    empty = None
    for cycle in range(6):
        offload = reloadpg.offload()
        assert len(offload.groups) == 3
        assert not warnings_of_one_rank(offload)
        assert standins.communicators() == 0
        dist_used = used()
        reloadpg.reload(connect=("none", "eager", "canary")[cycle % 3])
        assert [summed(group, rank) for group in groups] == expected
        if cycle == 2:
            empty, live = dist_used, held()
    assert dist_used == empty
    assert not left_over(live)
    assert not reloadpg.status().bypassed_groups
