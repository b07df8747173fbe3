"""Every end of a job, in every state, on gloo: see ``job_ends``."""

from __future__ import annotations

import pytest
from helpers.job_ends import PROGRAMS, STATES, cells, check, core, program

ALL = cells("gloo")


@pytest.mark.slow
@pytest.mark.matrix
def test_some_ends_in_every_state() -> None:
    """Two cells for each end, and more for each state."""
    check("gloo", core(ALL))


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_the_cause_is_raised_tables_are_clean_and_the_process_starts_again(state: str) -> None:
    check("gloo", [cell for cell in ALL if cell.state == state])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_programs(seed: int) -> None:
    """Random ends one after the other: ``FAULT_PROGRAMS`` of them."""
    check("gloo", program(ALL, seed))
