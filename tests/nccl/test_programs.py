"""Random programs and every end of a job over torch's ProcessGroupNCCL: see ``programs``.

All ranks get the same result of each operation, values are right after the next recovery or reload,
and nothing is left. ``FAULT_PROGRAMS`` is the number of random programs, of one seed each.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers.nccl_job import CAN_SUSPEND, ENGINES, engine_variables
from helpers.program_ranks import run
from helpers.programs import DISTURBED, STATES, Program, disturbed, every_end, program_on_nccl
from helpers.sampling import sampled

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
    pytest.mark.parametrize("engine", ENGINES),
]

PROGRAMS = int(os.environ.get("FAULT_PROGRAMS", "3"))
SUSPENDED = ["suspended"] * CAN_SUSPEND


def play(program: Program, engine: str, **variables: str) -> None:
    run(program, **engine_variables(engine), **variables)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_programs(seed: int, engine: str) -> None:
    """Each part has a fault at a call of NCCL on one rank."""
    play(program_on_nccl(seed, suspends=CAN_SUSPEND), engine)


@pytest.mark.parametrize("state", sampled([*STATES, *SUSPENDED], "live", "half rebuilt"))
def test_ends(state: str, engine: str) -> None:
    """The program's own error is raised, torch's tables are clean, and the process starts again."""
    options = {"strategy": "suspend"} if state == "suspended" else {}
    state = "offloaded" if state == "suspended" else state
    play(every_end(state, "nccl", **options), engine)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "die"])
@pytest.mark.parametrize("operation", DISTURBED)
def test_a_rank_is_stopped_or_killed_in_a_call_of_nccl(
    operation: str, how: str, engine: str
) -> None:
    """The operation fails on all ranks alike.

    The next recovery after a stop makes values right and leaves nothing of the operation; the peers
    of a killed rank free everything.
    """
    if operation in ("suspend", "resume") and not CAN_SUSPEND:
        pytest.skip("torch 2.12 and later can suspend")
    play(disturbed(operation, how), engine)
