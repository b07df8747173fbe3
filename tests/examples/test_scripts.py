"""The programs in examples/: each runs on CPU as its docstring says, and shows what it promises."""

from __future__ import annotations

import contextlib
import re
import runpy
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from helpers.documents import ROOT

from reloadpg.testing import run_ranks

EXAMPLES = ROOT / "examples"
SHORT = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "colocated_rl.py")


def as_a_script(rank: int, world_size: int, path: str, *options: str) -> str:
    """Run it as one rank of a job, with the variables that torchrun sets; what it prints."""
    sys.argv = [path, *options]
    with contextlib.redirect_stdout(StringIO()) as output:
        runpy.run_path(path, run_name="__main__")
    return output.getvalue()


def printed(name: str, ranks: int) -> list[str]:
    """What rank 0 of an example prints; the other ranks print nothing."""
    first, *others = run_ranks(as_a_script, ranks, args=(str(EXAMPLES / name),), timeout=280)
    assert others == [""] * (ranks - 1)
    return first.splitlines()


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_an_example_has_at_most_120_lines_and_says_what_differs_on_gpus(path: Path) -> None:
    """In a paragraph of its docstring that begins with "On GPUs"."""
    text = path.read_text()
    assert len(text.splitlines()) <= 120
    assert re.search(r"^On GPUs\b", text.split('"""')[1], re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "groups"),
    [
        ("fsdp2_torchrun.py", 4, r"generation (\d) of 3 groups"),
        ("hf_trainer.py", 2, r"generation (\d), reloadable groups: 1"),
    ],
)
def test_losses_equal_those_of_a_run_without_offloads(
    name: str, ranks: int, groups: str, tmp_path: Path
) -> None:
    """FSDP2 on a mesh, and Hugging Face's Trainer, with a new generation in each of three steps."""
    numbers = [
        re.fullmatch(rf"step \d: loss (\S+), {groups}", line) for line in printed(name, ranks)
    ]
    assert [one and one[2] for one in numbers] == ["1", "2", "3"]
    text = (EXAMPLES / name).read_text()
    assert text.count("reloadpg.offloaded()") == 1
    plain = tmp_path / "plain.py"
    plain.write_text(text.replace("reloadpg.offloaded()", "__import__('contextlib').nullcontext()"))
    without = run_ranks(as_a_script, ranks, args=(str(plain),), timeout=280)[0]
    assert re.findall(r"generation (\d)", without) == ["0", "0", "0"]
    losses = re.findall(r"loss (\S+),", without)
    assert losses == [one[1] for one in numbers if one]
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_the_groups_of_megatron_are_the_same_objects_after_each_reload() -> None:
    """The default group, too."""
    lines = printed("megatron_parallel.py", 4)
    shown = r"step \d: loss \d\.\d{6}, (\d+) groups released, Megatron's are the same objects"
    found = [re.fullmatch(shown, line) for line in lines]
    assert len(found) == 3
    assert all(one and int(one[1]) > 4 for one in found), lines


@pytest.mark.slow
def test_the_sequence_of_slime_rolls_out_while_the_groups_are_offloaded() -> None:
    """The weight falls in each step."""
    shown = r"step \d: weight (0\.\d{6}), rollout offloaded"
    lines = printed("slime_sequence.py", 2)
    found = [re.fullmatch(shown, line) for line in lines]
    assert len(found) == 2, lines
    assert all(found), lines
    weights = [float(one[1]) for one in found if one]
    assert 1 > weights[0] > weights[1] > 0


def ray_driver(rank: int, world_size: int) -> str:
    return as_a_script(rank, world_size, str(EXAMPLES / "ray_actors.py"))


@pytest.mark.slow
def test_the_sums_over_ray_actors_are_right_after_each_reload() -> None:
    """Each actor has two groups.

    The driver runs as a rank, whose process tree is ended with it whatever happens.
    """
    alone = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    [text] = run_ranks(ray_driver, 1, timeout=280, env=alone)
    assert text.splitlines() == [
        "step 0: 2 groups a rank, weights [1.0, 1.0]",
        "step 1: 2 groups a rank, weights [4.0, 4.0]",
    ]


@pytest.mark.slow
def test_the_example_of_a_pytest_suite_passes() -> None:
    """One of its tests runs with and without reloads."""
    settings = ("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n0", *settings),
            str(EXAMPLES / "test_with_reloads.py"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert re.search(r"^4 passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
