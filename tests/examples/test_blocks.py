"""Every Python block of the README, of docs/ and of an environment docstring is run as printed.

A block without a check below runs on two ranks. A block with a ``__main__`` runs as a script.
Placeholders for the user's code are in ``stubs``. Commands, and all blocks again, run in an
environment of their page's own install line: ``.ci/pages``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.documents import (
    LANGUAGES,
    PAGES,
    README,
    ROOT,
    Block,
    blocks_of,
    docstring_blocks,
    has_indented_block,
    page_blocks,
)
from helpers.launching import torchrun
from helpers.stubs import CYCLES, run_block

from reloadpg.testing import run_ranks

BLOCKS = [*page_blocks(), *docstring_blocks()]


def the_uniform_pause(ranks: list[dict[str, Any]]) -> None:
    """The groups are recreated where the accelerator cannot suspend them, and work afterwards."""
    for rank in ranks:
        assert rank["used"] == {"default_pg": "recreate", "trainer's": "recreate"}
        assert (rank["state"], rank["groups"]) == ("live", 2)


def the_hook_of_deepspeed(ranks: list[dict[str, Any]]) -> None:
    """The engine releases what it has gathered before its groups are offloaded."""
    for rank in ranks:
        assert [seen[:2] for seen in rank["seen"]] == [
            ("release", "live"),
            ("generate", "offloaded"),
        ]


def the_colocated_loop(ranks: list[dict[str, Any]]) -> None:
    """The groups hold no memory while the rollout engine works."""
    for rank in ranks:
        assert rank["seen"] == [("generate", "offloaded", 0), ("train", "live", 4.0)] * CYCLES
        assert (rank["generation"], rank["groups"]) == (CYCLES, 2)


def the_evaluator(ranks: list[dict[str, Any]]) -> None:
    """A group is created since there are two ranks, and destroyed."""
    for number, rank in enumerate(ranks):
        assert rank["seen"] == [("evaluate", number, 2, 4.0)]
        assert (rank["results"], rank["initialized"]) == ("results", False)


def the_owner(ranks: list[dict[str, Any]]) -> None:
    """The group that the block created is destroyed by it."""
    for rank in ranks:
        assert rank["seen"] == [("train", "live", 4.0)]
        assert not rank["initialized"]


def the_mesh(ranks: list[dict[str, Any]]) -> None:
    """On the smallest world that the dimensions fit: a step of the sharded model."""
    assert [rank["seen"] for rank in ranks] == [[("mesh", True, "cpu")]] * 8
    assert not any(rank["initialized"] for rank in ranks)


def the_report(ranks: list[dict[str, Any]]) -> None:
    """The default group is recreated; nothing was connected yet."""
    for rank in ranks:
        report = rank["report"]
        assert (report.memory_source, report.released_bytes) == ("simulated", 0)
        assert [(group.desc, group.strategy) for group in report.groups] == [
            ("default_pg", "recreate")
        ]
        assert rank["generation"] == 1


def the_rollout(ranks: list[dict[str, Any]]) -> None:
    """Groups first, then pause; resume, then reload; the engine awake in between."""
    cycle = [("pause", "offloaded"), ("wake", "offloaded"), ("generate", "offloaded", 0)]
    cycle += [("sleep", "offloaded"), ("resume", "offloaded"), ("train", "live", 4.0)]
    for rank in ranks:
        assert rank["seen"] == cycle * CYCLES


def the_update_while_asleep(ranks: list[dict[str, Any]]) -> None:
    """The engine's weights wake first; the groups work while memory is paused."""
    cycle = [("pause", "offloaded"), ("wake", "offloaded"), ("disable", "offloaded")]
    cycle += [("wake", "offloaded"), ("generate", "offloaded", 0), ("sleep", "offloaded")]
    cycle += [("resume", "offloaded"), ("train", "live", 4.0)]
    for rank in ranks:
        assert rank["seen"] == cycle * CYCLES
        assert rank["generation"] == 2 * CYCLES


def the_groups_that_stay_until_the_weights_are_sent(ranks: list[dict[str, Any]]) -> None:
    """One reload in each iteration; part of the memory is paused while the groups are live."""
    cycle = [("pause", "live"), ("wake", "live"), ("pause", "offloaded"), ("wake", "offloaded")]
    cycle += [("generate", "offloaded", 0), ("sleep", "offloaded"), ("resume", "offloaded")]
    cycle += [("resume", "live"), ("train", "live", 4.0)]
    for rank in ranks:
        assert rank["seen"] == cycle * CYCLES
        assert rank["generation"] == CYCLES


def the_start_with_the_engine_asleep(ranks: list[dict[str, Any]]) -> None:
    """The engine is asleep before the trainer has groups, and the block leaves them offloaded."""
    for rank in ranks:
        assert rank["seen"] == [("sleep", "live")]
        assert (rank["state"], rank["generation"]) == ("offloaded", 0)


def the_reloaded_mesh(ranks: list[dict[str, Any]]) -> None:
    """One reload of the default group, which is the mesh's too."""
    assert [(rank["generation"], rank["groups"]) for rank in ranks] == [(1, 1)] * 2


def the_save_during_a_rollout(ranks: list[dict[str, Any]]) -> None:
    """The trainer's groups are offloaded, and the group that saves is not."""
    for rank in ranks:
        assert [seen[:2] for seen in rank["seen"]] == [("generate", "offloaded"), ("train", "live")]
        assert (rank["generation"], rank["groups"]) == (1, 2)


def the_injected_fault(ranks: list[dict[str, Any]]) -> None:
    """The rank that failed raises its own error; after the reload all groups are live."""
    assert [rank["failure"] for rank in ranks] == ["ReleaseError", "PeerFailedError"]
    assert [(rank["state"], rank["generation"]) for rank in ranks] == [("live", 1)] * 2


def the_repeated_steps(ranks: list[dict[str, Any]]) -> None:
    """Without a fault each step runs once, and no group is recreated."""
    for rank in ranks:
        assert rank["seen"] == [("train", "live", 4.0)] * CYCLES
        assert (rank["generation"], rank["groups"]) == (0, 2)


def the_metrics(ranks: list[dict[str, Any]]) -> None:
    """Of one offload and one reload: calls, times, and the bytes of the two groups."""
    for rank in ranks:
        metrics, done = rank["metrics"], ("offload", "reload")
        assert [metrics[f"reloadpg_calls_total/{one}/False"] for one in done] == [1, 1]
        assert all(metrics[f"reloadpg_seconds_total/{one}"] > 0 for one in done)
        assert all(metrics[f"reloadpg_wait_seconds_total/{one}"] > 0 for one in done)
        assert metrics["reloadpg_released_bytes"] == 2 << 20
        assert rank["seen"] == [("generate", "offloaded", 0)]


RL = "docs/colocated-rl.md"
CHECKS: dict[tuple[str, str], tuple[int, Any]] = {
    ("docs/start.md", "with reloadpg.offloaded() as report"): (2, the_colocated_loop),
    ("docs/start.md", "prometheus_client"): (2, the_metrics),
    ("docs/migration.md", "used = pause()"): (2, the_uniform_pause),
    ("docs/trainers.md", "offloaded(engine)"): (2, the_hook_of_deepspeed),
    ("docs/trainers.md", "fully_shard(model"): (2, the_reloaded_mesh),
    ("docs/trainers.md", "dcp.async_save("): (2, the_save_during_a_rollout),
    ("docs/recovery.md", "recovery_requested()"): (2, the_repeated_steps),
    ("docs/testing.md", "faults.inject"): (2, the_injected_fault),
    (RL, "engine.sleep("): (2, the_start_with_the_engine_asleep),
    (RL, 'connect="eager"'): (2, the_rollout),
    (RL, "groups_live()"): (2, the_update_while_asleep),
    (RL, 'pause("optimizer")'): (2, the_groups_that_stay_until_the_weights_are_sent),
    (RL, "report.memory_source"): (2, the_report),
    ("environment", "ensure_process_group()"): (2, the_evaluator),
    ("environment", "process_group_scope()"): (2, the_owner),
    ("environment", 'mesh_dims={"pp": 2, "dp_shard": -1, "tp": 4}'): (8, the_mesh),
}
"""By document and words of the block: its number of ranks, and what must then have been seen."""


def check_of(block: Block) -> tuple[int, Any] | None:
    for (document, words), check in CHECKS.items():
        if block.document == document and words in block.code:
            return check
    return None


FRAMEWORKS = pytest.mark.frameworks


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=str(block), marks=[FRAMEWORKS] if block.how else [])
        for block in BLOCKS
    ],
)
def test_a_block_runs_as_printed(block: Block, tmp_path: Path) -> None:
    """What the page promises holds where the block calls the user's code."""
    if "__main__" in block.code:
        script = tmp_path / "example.py"
        script.write_text(block.code)
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return
    size, check = check_of(block) or (2, lambda _: None)
    check(run_ranks(run_block, size, args=(block.code, str(block)), timeout=280))


def test_the_first_program_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    """As pasted, under torchrun."""
    [block] = [block for block in blocks_of(README) if block.what == "cycle.py"]
    script = tmp_path / block.what
    script.write_text(block.code)
    printed = torchrun(2, script)  # unbuffered: the ends of lines of two ranks can change places
    assert [printed.count(text) for text in ("offloaded", "2.0 1")] == [2, 2], printed


def test_each_check_has_exactly_one_block() -> None:
    """A check of a block that was removed is an error."""
    for document, words in CHECKS:
        blocks = [block for block in BLOCKS if block.document == document and words in block.code]
        assert len(blocks) == 1, (document, words)


def test_every_block_is_run_or_says_why_not() -> None:
    """Each has a language, none is indented, and what another command runs names its file."""
    blocks = [block for page in [README, *PAGES] for block in blocks_of(page)]
    assert [page.name for page in [README, *PAGES] if has_indented_block(page)] == []
    comments = [
        comment
        for page in [README, *PAGES]
        for comment in re.findall(r"^(<!-- .*\n)```", page.read_text(), re.MULTILINE)
    ]
    assert len(comments) == sum(bool(block.how) for block in blocks), "one is not of a known form"
    assert {str(block) for block in blocks if block.language not in LANGUAGES} == set()
    for block in blocks:
        if block.how == "run by":
            assert (ROOT / block.what.rpartition(", ")[2]).is_file(), block
    assert len(docstring_blocks()) >= 3
    assert all(block.code.strip() for block in blocks)
