"""The path of a new user: a torchrun script, and the lines copied from the README."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from documents import README, ROOT, readme_blocks

from reloadpg.testing import run_ranks

SCRIPT = Path(__file__).with_name("user_script.py")
OBSERVED = "STATUS = reloadpg.status()\n    print(json.dumps([STATUS.cycles, len(STATUS.groups)]))"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def with_the_lines_of_the_readme() -> str:
    """The script with the lines of the README, for gloo."""
    lines = [line.strip() for line in readme_blocks()[0].code.splitlines() if "reloadpg" in line]
    assert len(lines) == 3
    (cpu,) = set(re.findall(r'reloadpg\.install\(backends=\{"gloo"\}\)', README.read_text()))
    text = SCRIPT.read_text()
    for place, words in (
        ("# IMPORT", "import"),
        ("# INSTALL", "install("),
        ("with nullcontext():  # OFFLOAD", "offloaded("),
    ):
        (line,) = [line for line in lines if words in line]
        text = text.replace(place, line.replace("reloadpg.install()", cpu))
    # Not a line of the user: what the test reads.
    return text.replace("    print(json", f"    {OBSERVED}\n    print(json")


def as_it_was(rank: int, world_size: int) -> Any:
    with redirect_stdout(StringIO()) as output:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads(output.getvalue())


@pytest.mark.slow
def test_a_script_with_the_lines_of_the_readme_trains_as_before(tmp_path: Path) -> None:
    """The default group is offloaded three times, and the losses are equal to the last bit."""
    script = tmp_path / "train.py"
    script.write_text(with_the_lines_of_the_readme())
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1", str(script)),
        ],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Two ranks on one pipe: their lines may run into each other.
    ranks = [json.loads(text) for text in re.findall(r"\{.*?\}", done.stdout)]
    assert done.stdout.count("[3, 1]") == len(ranks) == 2
    assert sorted(ranks, key=lambda one: one["rank"]) == run_ranks(as_it_was, 2, timeout=280)
    assert all(len(set(one["losses"])) == 3 for one in ranks)
