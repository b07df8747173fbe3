"""Torch's and Python's debug modes change nothing: see ``debug_job``.

``nox -s modes`` runs all of it. With ``TEST_MODES_TABLE`` set to a file, a table of what was seen
is appended to it: a row for each mode, a column for each backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.debug_modes import MODES, run_mode
from helpers.nccl_job import ENGINES, engine_variables

from reloadpg.testing import standins

NO_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")

BACKENDS = {
    "gloo": ("gloo", ""),
    **{f"mixed, {engine}": ("cpu:gloo,cuda:nccl", engine) for engine in ENGINES},
    **{f"NCCL, {engine}": ("nccl", engine) for engine in ENGINES},
}
"""Columns of the table: backends of the groups, and torch's implementation of NCCL's."""

CASES = [
    pytest.param(
        mode,
        column,
        marks=[pytest.mark.slow]
        + [pytest.mark.matrix] * (column == "gloo" and mode == "DETAIL")
        + ([] if column == "gloo" else [pytest.mark.standins, NO_CUDA]),
    )
    for column in BACKENDS
    for mode in MODES
]


@pytest.fixture(scope="module")
def cells() -> Iterator[dict[tuple[str, str], str]]:
    """What was seen, by mode and backend."""
    seen: dict[tuple[str, str], str] = {}
    yield seen
    target = os.environ.get("TEST_MODES_TABLE")
    if target and seen:
        columns = [column for column in BACKENDS if any(one == column for _, one in seen)]
        lines = [["mode", *columns], ["---"] * (len(columns) + 1)]
        lines += [[mode, *(seen.get((mode, one), "not run") for one in columns)] for mode in MODES]
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        with Path(target).open("a") as file:
            file.write(f"\ntorch {torch.__version__}\n\n{text}")


@pytest.mark.parametrize(("mode", "column"), CASES)
def test_a_debug_mode_changes_nothing(
    mode: str, column: str, cells: dict[tuple[str, str], str]
) -> None:
    """The op table by value, in two cycles and after a recovery, as on plain groups."""
    backend, engine = BACKENDS[column]
    cells[mode, column] = "FAILED"
    if not engine:
        run_mode(mode, backend)
    else:
        with standins.job() as job:
            env = {**engine_variables(engine), **job.environment, "TEST_WORLD": "nccl"}
            run_mode(mode, backend, env)
    cells[mode, column] = "same"
