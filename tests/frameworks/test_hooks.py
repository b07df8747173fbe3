"""Frameworks with the hooks of ``reloadpg.integrations``: bit-equal to the same without.

Not part of any other run: ``nox -s frameworks`` installs the frameworks, as
``tests/frameworks/constraints.txt`` pins them, and runs the tests marked ``frameworks``. With
``TEST_FRAMEWORKS_TABLE`` set to a file, the table in it is replaced by what was seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.launching import DEEPSPEED, HERE, activation, build_deepspeed, ranks_of, torchrun

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

COMMON = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **DEEPSPEED}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}


class Framework(NamedTuple):
    """One framework, by the name of its script."""

    name: str
    entry: str
    """What trains."""
    hook: str
    cycles: int
    """Times that the groups are offloaded and reloaded."""
    equal_weights: bool = True
    """Whether all ranks end with the same weights."""


FRAMEWORKS = (
    Framework("transformers", "Trainer, DDP", "transformers.offloaded_phase", 4),
    Framework("lightning", "Trainer, DDP", "lightning.offloaded_phase", 6),
    Framework("trl", "GRPOTrainer, DDP", "reloadpg.offloaded", 8),
    Framework("deepspeed", "engine, ZeRO 1, 2, 3", "deepspeed.offloaded", 12),
)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """The rows of the table in the documents; written at the end, where that is asked for."""
    rows: list[str] = []
    yield rows
    target = os.environ.get("TEST_FRAMEWORKS_TABLE")
    if target and rows:
        write_table(Path(target), rows)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_training_with_the_hook_is_bit_equal_to_training_without(
    framework: Framework, tmp_path: Path, table: list[str]
) -> None:
    """Losses, norms and weights of every rank, by the same script without and with the hook's line.

    (JSON keeps a float exactly.) Every group is offloaded within the phase of the hook, where it
    refuses a collective, and is live again at the end. The table gets a row.
    """
    if framework.name == "deepspeed":
        build_deepspeed()
    script = HERE / "scripts" / f"hook_{framework.name}.py"
    folders = [tmp_path / "plain", tmp_path / "hooked"]
    for folder in folders:
        folder.mkdir()
    installing = activation(folders[1])
    torchrun(2, script, folders[0], **COMMON, **OFFLINE, PYTHONPATH=installing["PYTHONPATH"])
    torchrun(2, script, folders[1], "hook", **COMMON, **OFFLINE, **installing)
    plain, hooked = (ranks_of(folder, "training") for folder in folders)
    assert hooked == plain
    # So that the comparison proves something.
    assert [rank["ranks"] for rank in plain] == [2, 2]
    assert [facts["installed"] for facts in ranks_of(folders[0], "facts")] == [False, False]
    for rank in plain:
        assert len(set(rank["losses"])) > len(rank["losses"]) / 2
        assert sum(map(len, rank["weights"])) > 100
    assert (plain[0]["weights"] == plain[1]["weights"]) == framework.equal_weights
    for facts in ranks_of(folders[1], "facts"):
        assert facts["installed"]
        assert facts["reloadable"] >= 1
        assert (facts["state"], facts["generation"]) == ("live", framework.cycles)
        seen = {"refused": "GroupOffloadedError", "states": ["offloaded"]}
        assert facts["cycles"] == [seen] * framework.cycles
    table.append(
        f"| {facts['package']} | {facts['version']} | {framework.entry} | `{framework.hook}` | "
        f"{facts['reloadable']} | {facts['bypassed']} | {framework.cycles} | yes |"
    )


HEAD = (
    "| framework | version | entry point | hook | reloadable | bypassed | cycles | bit-equal |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
BEGIN, END = "<!-- table: written by nox -s frameworks -->\n", "<!-- end of the table -->\n"


def write_table(page: Path, rows: list[str]) -> None:
    """Replace the table of a page; rows of frameworks that did not run are kept."""
    before, rest = page.read_text().split(BEGIN)
    old, after = rest.split(END)
    kept = [line for line in old.splitlines() if line.startswith("| ") and line not in HEAD]
    by_name = {line.split("|")[1].strip(): line for line in [*kept, *rows]}
    lines = "".join(f"{by_name[name]}\n" for name in sorted(by_name))
    page.write_text(f"{before}{BEGIN}\n{HEAD}{lines}\n{END}{after}")
