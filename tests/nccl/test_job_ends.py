"""Every end of a job, in every state, on torch's ProcessGroupNCCL: see ``job_ends``."""

from __future__ import annotations

import pytest
import torch
from job_ends import STATES, cells, check
from nccl_job import ENGINES, engine_variables

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

ALL = cells("nccl")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("state", [state for state in STATES if any(c.state == state for c in ALL)])
def test_the_cause_is_raised_tables_are_clean_and_the_process_starts_again(
    state: str, engine: str
) -> None:
    check("nccl", [c for c in ALL if c.state == state], standins=True, env=engine_variables(engine))
