"""Programs of others that end while their groups are offloaded: as they end without reloadpg."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import asleep
import pytest
import torch.distributed as dist
from launching import HELPERS, HERE, clean_environment

PROGRAMS = {
    "accelerate": HERE / "scripts" / "with_accelerate.py",
    "fabric": HERE / "scripts" / "with_fabric.py",
}

IN_THE_GATE = {("accelerate", "SIGTERM"), ("fabric", "exit")}
"""Marked slow; the others run at night, with the frameworks."""

CASES = [
    pytest.param(
        name,
        way,
        marks=pytest.mark.slow if (name, way) in IN_THE_GATE else pytest.mark.frameworks,
    )
    for name in PROGRAMS
    for way in ("return", *asleep.WAYS)
]

LIMIT_S = 240.0
NOTICES = re.compile(
    r"hostname of the client socket cannot be retrieved"
    r"|^\[Gloo\] Rank \d is connected to "
    r"|asleep\.py|^ +[~^]+$|site-packages|Warning: |^\s+warnings\.warn"
)
"""Lines that differ from run to run, and those of the helper."""


class Ended(NamedTuple):
    codes: list[int]
    stderr: list[str]


def run(program: Path, way: str, folder: Path, *, is_asleep: bool) -> Ended:
    """Run a program as two ranks, until both have ended."""
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, str(HELPERS / "asleep.py"), way, str(int(is_asleep)), str(program)]
    ranks = []
    for rank in range(2):
        environment = {**clean_environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"stderr.{rank}").open("w") as stderr:
            ranks.append(
                subprocess.Popen(
                    [*command, str(folder)],
                    env=environment,
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
    return Ended(codes, [_plain((folder / f"stderr.{rank}").read_text()) for rank in range(2)])


def _plain(stderr: str) -> str:
    """What was printed, without the lines of the helper and of torch's notices."""
    lines = (re.sub(r"^\[rank\d\]: ?", "", line) for line in stderr.splitlines())
    kept = [line for line in lines if line.strip() and not NOTICES.search(line)]
    return "\n".join(line for line in kept if not line.startswith("    "))


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_program_ends_while_its_groups_are_offloaded(name: str, way: str, tmp_path: Path) -> None:
    """Exit codes and what is printed are those of the program without reloadpg; nothing hangs."""
    plain = run(PROGRAMS[name], way, tmp_path / "plain", is_asleep=False)
    codes = {"return": 0, "exception": 1, "exit": 3, "SIGTERM": -15, "SIGINT": -2}
    assert plain.codes == [codes[way]] * 2, plain
    assert run(PROGRAMS[name], way, tmp_path / "asleep", is_asleep=True) == plain
