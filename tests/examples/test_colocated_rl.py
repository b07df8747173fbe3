"""``examples/colocated_rl.py`` is a script that a user can copy and run."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from documents import ROOT

import reloadpg
from reloadpg.testing import run_ranks

EXAMPLE = ROOT / "examples" / "colocated_rl.py"


def as_a_script(rank: int, world_size: int, path: str, *options: str) -> tuple[str, bool]:
    """What one rank prints where megatron-core is not installed; whether reloadpg was."""
    importlib.util.find_spec = lambda name, package=None: None
    sys.argv = [path, "--iterations", "1", *options]
    with redirect_stdout(StringIO()) as output:
        runpy.run_path(path, run_name="__main__")
    return output.getvalue(), reloadpg.is_installed()


def test_a_copy_prints_the_same_numbers_with_and_without_reloadpg(tmp_path: Path) -> None:
    """Without megatron-core it uses the groups of a DeviceMesh."""
    copy = str(shutil.copy(EXAMPLE, tmp_path / "mine.py"))
    with_it, without = (
        run_ranks(as_a_script, 1, args=(copy, *options), timeout=280)
        for options in ((), ("--no-offload",))
    )
    assert [installed for _, installed in (*with_it, *without)] == [True, False]
    line, freed = with_it[0][0].splitlines()
    assert [line] == without[0][0].splitlines()
    numbers = r"iteration 1: reward 0\.\d{3}, loss [+-]\d\.\d{9}, evaluation \d\.\d{9}"
    assert re.fullmatch(numbers, line)
    assert re.fullmatch(r"each rollout: [1-9]\d* groups offloaded, [1-9]\d* MiB freed", freed)
