"""The standard variables of an environment, its port, and that it needs no torch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

from reloadpg.environment import (
    DistributedEnvironment,
    detect_environment,
)
from reloadpg.environment.identity import port_from_ids

ENVIRONMENT = DistributedEnvironment("slurm", 5, 1, 8, 4, 1, 2, "n1", 15123)


def test_the_variables_are_read_back_as_the_same_environment() -> None:
    """A child process that reads torchrun's variables is the same rank of the same job."""
    read_back = detect_environment(ENVIRONMENT.variables())
    assert read_back == replace(ENVIRONMENT, source="torchrun")


def test_ports_are_in_range_and_differ_between_steps_and_neighbouring_jobs() -> None:
    """15000..30000; the first 200 steps of 70 consecutive jobs share none."""
    for base in (1, 999, 15001, 4294967):
        ports = [
            port_from_ids(str(base + job), str(step))
            for job, step in itertools.product(range(70), range(200))
        ]
        assert 15000 <= min(ports) <= max(ports) <= 30000
        assert len(set(ports)) == len(ports)


def test_importing_detecting_and_ranks_import_no_torch() -> None:
    """A launcher script may need all of this before torch is loaded."""
    script = (
        "import sys, reloadpg\n"
        "import reloadpg.environment as e\n"
        "assert e.detect_environment({}).variables()['RANK'] == '0'\n"
        "assert e.get_rank() == 0 and e.is_rank_zero()\n"
        "e.resolve_mesh_dims({}, 8)\n"
        "e.destroy_distributed(); e.process_group_scope().__enter__()\n"
        "assert reloadpg.environment.detect_environment is e.detect_environment\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    environ = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT.variables()}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
