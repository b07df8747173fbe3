"""Random programs over random topologies on real ranks, compared with a model.

The default run has 10 programs and the slow run 50, which are fixed. ``HYPOTHESIS_PROFILE=nightly``
draws 500 new ones. ``PROPERTY_EXAMPLES`` overrides the number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.program_ranks import Pool
from helpers.programs import Model, Program, programs
from hypothesis import HealthCheck, Phase, given, settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES") or (500 if NIGHTLY else 50))
LIMIT_S = max(280.0, 5.0 * EXAMPLES)
SETTINGS = settings(
    max_examples=EXAMPLES,
    derandomize=not NIGHTLY,
    database=None,
    deadline=None,
    print_blob=NIGHTLY,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Ranks that interpret one program after another."""
    pool = Pool(LIMIT_S)
    yield pool
    pool.close()


def check(pool: Pool, program: Program) -> None:
    """Compare each rank's observations after each instruction with the model."""
    model = Model(program.size)
    seen = pool.run(program)
    for number, instruction in enumerate(program.instructions):
        for rank, expected in enumerate(model.step(number, instruction)):
            found = seen[rank][number]
            assert found == expected, (
                f"rank {rank} after instruction {number}, {instruction}:\n"
                f"  seen     {found}\n  expected {expected}\nin {program!r}"
            )


@pytest.mark.slow
@settings(SETTINGS, max_examples=10)
@given(program=programs())
def test_a_few_programs(pool: Pool, program: Program) -> None:
    """:func:`test_programs` with fewer programs, for the default run."""
    check(pool, program)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@SETTINGS
@given(program=programs())
def test_programs(pool: Pool, program: Program) -> None:
    """Groups, generations, sums and errors equal the model's (failures 4 to 6, 9, 12, 22 to 27)."""
    check(pool, program)
