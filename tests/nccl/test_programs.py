"""Random programs and every end of a job over torch's ProcessGroupNCCL: see ``programs``.

All ranks get the same result of each operation, values are right after the next recovery or reload,
and nothing is left. ``FAULT_PROGRAMS`` is the number of random programs, of one seed each.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers.nccl_job import CAN_SPLIT_MIXED, CAN_SUSPEND, ENGINES, engine_variables
from helpers.program_ranks import run
from helpers.programs import STATES, Program, check, every_end, program_on_nccl
from helpers.sampling import sampled

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
    pytest.mark.parametrize("engine", ENGINES),
]

PROGRAMS = int(os.environ.get("FAULT_PROGRAMS", "3"))
SUSPENDED = ["suspended"] * CAN_SUSPEND


def play(program: Program, engine: str) -> None:
    check(program, run(program, env=engine_variables(engine)))


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_programs(seed: int, engine: str) -> None:
    """Each part has a fault at a call of NCCL on one rank."""
    play(program_on_nccl(seed, suspends=CAN_SUSPEND, splits_mixed=CAN_SPLIT_MIXED), engine)


@pytest.mark.parametrize("state", sampled([*STATES, *SUSPENDED], "live", "half rebuilt"))
def test_ends(state: str, engine: str) -> None:
    """The program's own error is raised, torch's tables are clean, and the process starts again."""
    options = {"strategy": "suspend"} if state == "suspended" else {}
    state = "offloaded" if state == "suspended" else state
    play(every_end(state, "nccl", **options), engine)
