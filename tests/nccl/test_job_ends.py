"""Every end of a job, in every state, on torch's ProcessGroupNCCL: see ``job_ends``."""

from __future__ import annotations

import pytest
import torch
from helpers.job_ends import PROGRAMS, STATES, Cell, cells, check, core, program
from helpers.nccl_job import ENGINES, engine_variables

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

ALL = cells("nccl")
engines = pytest.mark.parametrize("engine", ENGINES)


def run(chosen: list[Cell], engine: str) -> None:
    check("nccl", chosen, standins=True, env=engine_variables(engine))


@engines
def test_some_ends_in_every_state(engine: str) -> None:
    """Two cells for each end, and more for each state."""
    run(core(ALL), engine)


@pytest.mark.slow
@engines
@pytest.mark.parametrize("state", [state for state in STATES if any(c.state == state for c in ALL)])
def test_the_cause_is_raised_tables_are_clean_and_the_process_starts_again(
    state: str, engine: str
) -> None:
    run([cell for cell in ALL if cell.state == state], engine)


@pytest.mark.slow
@engines
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_programs(seed: int, engine: str) -> None:
    """Random ends one after the other: ``FAULT_PROGRAMS`` of them."""
    run(program(ALL, seed), engine)
