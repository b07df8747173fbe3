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
from collections.abc import Callable
from dataclasses import dataclass, field
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


def blocks_with(document: str, words: str) -> list[Block]:
    return [block for block in BLOCKS if block.document == document and words in block.code]


STEP = ("train", "live", 4.0)
"""A training step whose all-reduces over two ranks, of two groups, have the right sum."""
ASLEEP = ("sleep", "offloaded")
RESUMED = ("resume", "offloaded")
ROLLOUT = ("generate", "offloaded", 0)
"""A rollout while the groups are offloaded and hold no memory."""


@dataclass(frozen=True)
class Expected:
    """What must have been seen on each of the ranks, by its name in the result of ``run_block``."""

    ranks: int = 2
    values: dict[str, Any] = field(default_factory=dict)
    check: Callable[[int, dict[str, Any]], bool] = lambda number, rank: True


def seen(*calls: tuple[object, ...], times: int = 1, **values: Any) -> Expected:
    """These calls of the user's code, repeated, and then these values."""
    return Expected(values={"seen": [*calls] * times, **values})


def report_is_right(_: int, rank: dict[str, Any]) -> bool:
    """The default group is recreated; nothing was connected yet."""
    report = rank["report"]
    groups = [(group.desc, group.strategy) for group in report.groups]
    source = (report.memory_source, report.released_bytes)
    return (*source, groups) == ("simulated", 0, [("default_pg", "recreate")])


def metrics_are_right(_: int, rank: dict[str, Any]) -> bool:
    """Of one offload and one reload: calls, times, and the bytes of the two groups."""
    metrics, done = rank["metrics"], ("offload", "reload")
    return (
        all(metrics[f"reloadpg_calls_total/{one}/False"] == 1 for one in done)
        and all(metrics[f"reloadpg_seconds_total/{one}"] > 0 for one in done)
        and all(metrics[f"reloadpg_wait_seconds_total/{one}"] > 0 for one in done)
        and metrics["reloadpg_released_bytes"] == 2 << 20
    )


RL, TRAINERS = "docs/colocated-rl.md", "docs/trainers.md"
CHECKS: dict[tuple[str, str], Expected] = {
    ("docs/start.md", "with reloadpg.offloaded() as report"): seen(
        ROLLOUT, STEP, times=CYCLES, generation=CYCLES, groups=2
    ),
    ("docs/start.md", "prometheus_client"): Expected(
        values={"seen": [ROLLOUT]}, check=metrics_are_right
    ),
    ("docs/migration.md", "used = pause()"): Expected(
        # recreated where the accelerator cannot suspend them
        values={
            "used": {"default_pg": "recreate", "trainer's": "recreate"},
            "state": "live",
            "groups": 2,
        }
    ),
    # The engine releases what it has gathered before its groups are offloaded.
    (TRAINERS, "offloaded(engine)"): seen(("release", "live"), ROLLOUT),
    # One reload of the default group, which is the mesh's too.
    (TRAINERS, "fully_shard(model"): Expected(values={"generation": 1, "groups": 1}),
    # The group that saves is not offloaded.
    (TRAINERS, "dcp.async_save("): seen(ROLLOUT, STEP, generation=1, groups=2),
    # Without a fault each step runs once, and no group is recreated.
    ("docs/recovery.md", "recovery_requested()"): seen(STEP, times=CYCLES, generation=0, groups=2),
    # The rank that failed raises its own error; after the reload all groups are live.
    ("docs/testing.md", "faults.inject"): Expected(
        values={"state": "live", "generation": 1},
        check=lambda number, rank: rank["failure"] == ("ReleaseError", "PeerFailedError")[number],
    ),
    # The engine is asleep before the trainer has groups, and the block leaves them offloaded.
    (RL, "engine.sleep("): seen(("sleep", "live"), state="offloaded", generation=0),
    # Groups first, then pause; resume, then reload; the engine awake in between.
    (RL, 'connect="eager"'): seen(
        *(("pause", "offloaded"), ("wake", "offloaded"), ROLLOUT, ASLEEP, RESUMED, STEP),
        times=CYCLES,
    ),
    # The engine's weights wake first; the groups work while memory is paused.
    (RL, "groups_live()"): seen(
        *(("pause", "offloaded"), ("wake", "offloaded"), ("disable", "offloaded")),
        *(("wake", "offloaded"), ROLLOUT, ASLEEP, RESUMED, STEP),
        times=CYCLES,
        generation=2 * CYCLES,
    ),
    # One reload in each iteration; part of the memory is paused while the groups are live.
    (RL, 'pause("optimizer")'): seen(
        *(("pause", "live"), ("wake", "live"), ("pause", "offloaded"), ("wake", "offloaded")),
        *(ROLLOUT, ASLEEP, RESUMED, ("resume", "live"), STEP),
        times=CYCLES,
        generation=CYCLES,
    ),
    (RL, "report.memory_source"): Expected(values={"generation": 1}, check=report_is_right),
    # A group is created since there are two ranks, and destroyed.
    ("environment", "ensure_process_group()"): Expected(
        values={"results": "results", "initialized": False},
        check=lambda number, rank: rank["seen"] == [("evaluate", number, 2, 4.0)],
    ),
    # The group that the block created is destroyed by it.
    ("environment", "process_group_scope()"): seen(STEP, initialized=False),
    # A step of the sharded model on the smallest world that the dimensions fit.
    ("environment", 'mesh_dims={"pp": 2, "dp_shard": -1, "tp": 4}'): Expected(
        8, {"seen": [("mesh", True, "cpu")], "initialized": False}
    ),
}
"""By document and words of the block."""


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
    named = [CHECKS[key] for key in CHECKS if block in blocks_with(*key)]
    expected = named[0] if named else Expected()
    ranks = run_ranks(run_block, expected.ranks, args=(block.code, str(block)), timeout=280)
    for number, rank in enumerate(ranks):
        assert {name: rank[name] for name in expected.values} == expected.values
        assert expected.check(number, rank), rank


def test_the_first_program_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    """As pasted, under torchrun."""
    [block] = [block for block in blocks_of(README) if block.what == "cycle.py"]
    script = tmp_path / block.what
    script.write_text(block.code)
    printed = torchrun(2, script)  # unbuffered: the ends of lines of two ranks can change places
    assert [printed.count(text) for text in ("offloaded", "2.0 1")] == [2, 2], printed


def test_each_check_has_exactly_one_block() -> None:
    """A check of a block that was removed is an error."""
    assert [key for key in CHECKS if len(blocks_with(*key)) != 1] == []


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
