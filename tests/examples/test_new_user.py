"""A new user's path: a script of their own under torchrun, and the lines copied from the README."""

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
FIVE = 5
OBSERVED = "SEEN.update(cycles=reloadpg.status().cycles, groups=len(reloadpg.status().groups))"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def copied_lines() -> dict[str, str]:
    """The lines of the README's first example that speak of reloadpg, by where they go."""
    lines = [line for line in readme_blocks()[0].code.splitlines() if "reloadpg" in line]
    assert len(lines) <= FIVE
    placed = {}
    for place, words in (("IMPORT", "import"), ("INSTALL", "install("), ("OFFLOAD", "offloaded(")):
        (placed[place],) = [line.strip() for line in lines if words in line]
    assert len(placed) == len(lines)
    return placed


def for_a_cpu(line: str) -> str:
    """As the README says for a machine without a GPU, with its own words."""
    (call,) = set(re.findall(r'reloadpg\.install\(backends=\{"gloo"\}\)', README.read_text()))
    return line.replace("reloadpg.install()", call)


def user_script(lines: dict[str, str]) -> str:
    text = SCRIPT.read_text()
    text = text.replace("# IMPORT\n", lines["IMPORT"] + "\n")
    text = text.replace("# INSTALL\n", for_a_cpu(lines["INSTALL"]) + "\n")
    text = text.replace("with nullcontext():  # OFFLOAD\n", lines["OFFLOAD"] + "\n")
    # Not the user's: what the test looks at.
    return text.replace("    print(json", f"    {OBSERVED}\n    print(json")


def torchrun(script: Path) -> list[dict[str, Any]]:
    """What the script's two ranks print."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1", str(script)),
        ],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Two ranks on one pipe: their lines may run into each other.
    found = [json.loads(text) for text in re.findall(r"\{.*?\}", done.stdout)]
    return sorted(found, key=lambda one: one["rank"])


def as_it_was(rank: int, world_size: int) -> dict[str, Any]:
    """What one rank of the script without the lines prints."""
    with redirect_stdout(StringIO()) as output:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads(output.getvalue())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The script as it was, and with the lines."""
    script = tmp_path_factory.mktemp("user") / "train.py"
    script.write_text(user_script(copied_lines()))
    return {"before": run_ranks(as_it_was, 2), "with": torchrun(script)}


def test_the_lines_are_in_the_script() -> None:
    """All of the README's, none changed but for the CPU."""
    text = user_script(copied_lines())
    assert "import reloadpg" in text
    assert 'reloadpg.install(backends={"gloo"})' in text
    assert "with reloadpg.offloaded():" in text
    assert text.count("reloadpg") <= FIVE + OBSERVED.count("reloadpg")


def test_three_cycles_on_two_ranks(runs: dict[str, list[dict[str, Any]]]) -> None:
    """On each rank the default group was offloaded and reloaded three times."""
    assert [(one["rank"], one["cycles"], one["groups"]) for one in runs["with"]] == [
        (0, 3, 1),
        (1, 3, 1),
    ]


def test_training_is_what_it_was(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Bit-equal losses on each rank, over the three steps."""
    losses = {name: [one["losses"] for one in ranks] for name, ranks in runs.items()}
    assert losses["with"] == losses["before"]
    assert [len(one) for one in losses["with"]] == [3, 3]
