"""Every Python block of the README and of ``reloadpg.environment``'s docstring is run as it stands.

A block that has no check of its own below is run all the same, on two ranks. A block that has a
``__main__`` of its own is run as a script. What stands for the user's code is in ``stubs``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, Block, docstring_blocks, readme_blocks
from stubs import CYCLES, run_block

from reloadpg.testing import run_ranks

BLOCKS = [*readme_blocks(), *docstring_blocks()]
PREAMBLE = "import torch, torch.distributed as dist, reloadpg\n"
"""What the earlier blocks of the document have imported."""


def the_colocated_loop(ranks: list[dict[str, Any]]) -> None:
    """The groups own nothing while the rollout engine works, and all of it while training."""
    for rank in ranks:
        assert rank["seen"] == [("generate", "offloaded", 0), ("train", "live", 4.0)] * CYCLES
        assert (rank["generation"], rank["groups"]) == (CYCLES, 2)


def the_evaluator(ranks: list[dict[str, Any]]) -> None:
    """A group is made since there are two ranks, and ended."""
    for number, rank in enumerate(ranks):
        assert rank["seen"] == [("evaluate", number, 2, 4.0)]
        assert (rank["results"], rank["initialized"]) == ("results", False)


def the_owner(ranks: list[dict[str, Any]]) -> None:
    """The group that the block made is ended by it."""
    for rank in ranks:
        assert rank["seen"] == [("train", "live", 4.0)]
        assert not rank["initialized"]


def the_mesh(ranks: list[dict[str, Any]]) -> None:
    """On the smallest world that the dimensions fit: a step of the sharded model."""
    assert [rank["seen"] for rank in ranks] == [[("mesh", True, "cpu")]] * 8
    assert not any(rank["initialized"] for rank in ranks)


def the_report(ranks: list[dict[str, Any]]) -> None:
    """The default group is recreated, as its pattern says; nothing was connected yet."""
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


CHECKS = {
    "StrategyPolicy(": (2, the_report),
    "colocated(engine": (2, the_rollout),
    "with reloadpg.offloaded():  # all ranks": (2, the_colocated_loop),
    "ensure_process_group()": (2, the_evaluator),
    "process_group_scope()": (2, the_owner),
    'mesh_dims={"pp": 2, "dp_shard": -1, "tp": 4}': (8, the_mesh),
}
"""By words of the block: how many ranks it needs, and what must then have been seen."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_block_does_what_it_shows(block: Block, tmp_path: Path) -> None:
    """It runs, and what it promises holds where it calls the user's code."""
    if "__main__" in block.code:
        script = tmp_path / "example.py"
        script.write_text(PREAMBLE + block.code)
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return
    matching = [check for words, check in CHECKS.items() if words in block.code]
    size, check = matching[0] if matching else (2, lambda _: None)
    check(run_ranks(run_block, size, args=(block.code, str(block)), timeout=90))


def test_each_check_has_its_block() -> None:
    """None is left over from a block that is no more, and no two are of one block."""
    for words in CHECKS:
        assert sum(words in block.code for block in BLOCKS) == 1, words


def test_blocks_are_found_in_both_documents() -> None:
    """The text says how many there are: each fence, each ``::`` line."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme_blocks()) == readme.count("```python") >= 2
    assert len(docstring_blocks()) >= 3
    assert all(block.code.strip() for block in BLOCKS)
