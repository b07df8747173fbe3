"""Programs of others, whole, with a cycle after every step.

``nox -s frameworks`` runs all of them, with the versions of ``constraints.txt``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from helpers.launching import (
    DEEPSPEED,
    HELPERS,
    HERE,
    ROOT,
    build_deepspeed,
    clean_environment,
    ranks_of,
)


class Program(NamedTuple):
    """A training script, and on how many ranks it runs."""

    script: Path
    ranks: int = 2
    environment: Mapping[str, str] = {}


SCRIPTS = HERE / "scripts"
PROGRAMS = {
    "accelerate": Program(SCRIPTS / "with_accelerate.py"),
    "fabric": Program(SCRIPTS / "with_fabric.py"),
    "megatron": Program(SCRIPTS / "with_megatron.py", ranks=4),
    "transformers": Program(SCRIPTS / "hook_transformers.py"),
    "lightning": Program(SCRIPTS / "hook_lightning.py"),
    "trl": Program(SCRIPTS / "hook_trl.py"),
    "deepspeed": Program(SCRIPTS / "hook_deepspeed.py", environment=DEEPSPEED),
    "verl": Program(SCRIPTS / "with_verl.py", environment=DEEPSPEED),
    "torchtitan": Program(SCRIPTS / "with_torchtitan.py", ranks=4),
}
"""The scripts of hooks run without their hook."""

LIMIT_S = 500.0
pytestmark = pytest.mark.timeout(1100)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}
PATHS = os.pathsep.join(map(str, (ROOT, HELPERS.parent)))
NOTICES = re.compile(
    r"hostname of the client socket cannot be retrieved|\[c10d\] waitForInput: "
    r"|^\[Gloo\] Rank \d is connected to "
    r"|^ +[~^]+$|site-packages|Warning: |^\s+warnings\.warn"
)
"""Lines that differ from run to run."""
PREFIX = re.compile(r"^(\[rank\d\]: ?)?([IWE]\d{4} [\d:.]+ +\d+ )?")
"""The rank, or the time and the process, before what torch prints."""


class Ended(NamedTuple):
    codes: list[int]
    stderr: list[str]


def run(program: Program, folder: Path, *before: object) -> Ended:
    """Run a program on its ranks, by the helper in ``before``, until all have ended."""
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = str(program.ranks)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": size}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": size, **OFFLINE}
    command = [sys.executable, *map(str, before), str(program.script), str(folder)]
    ranks = []
    for rank in range(program.ranks):
        environment = {**clean_environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment |= program.environment
        with (folder / f"stderr.{rank}").open("w") as stderr:
            ranks.append(
                subprocess.Popen(
                    command,
                    env={**environment, "PYTHONPATH": PATHS},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                )
            )
    try:
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    texts = [(folder / f"stderr.{rank}").read_text() for rank in range(program.ranks)]
    return Ended(codes, [_plain(text) for text in texts])


def _plain(stderr: str) -> str:
    """What was printed, without the lines of the helper and of torch's notices."""
    lines = (re.sub(PREFIX, "", line) for line in stderr.splitlines())
    kept = [line for line in lines if line.strip() and not NOTICES.search(line)]
    return "\n".join(line for line in kept if not line.startswith("    "))


@pytest.fixture
def program(name: str) -> Program:
    if name == "deepspeed":
        build_deepspeed()
    return PROGRAMS[name]


@pytest.mark.frameworks
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_a_cycle_after_every_step_is_bit_equal(
    program: Program, tmp_path: Path
) -> None:
    """Losses and weights of every rank. (JSON keeps a float exactly.)"""
    folders = [tmp_path / "plain", tmp_path / "cycled"]
    plain = run(program, folders[0])
    assert plain.codes == [0] * program.ranks, plain
    cycled = run(program, folders[1], HERE / "cycling.py", folders[1])
    assert cycled == plain
    before, after = (ranks_of(folder, "training") for folder in folders)
    assert len(before) == program.ranks
    assert after == before
    for cycles in ranks_of(folders[1], "cycles"):
        assert len(cycles) >= 8
        for number, cycle in enumerate(cycles, 1):
            assert cycle["released"] >= 1
            assert (cycle["refused"], cycle["states"]) == ("GroupOffloadedError", ["offloaded"])
            assert (cycle["state"], cycle["generation"]) == ("live", number)
