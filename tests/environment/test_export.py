"""Export to the standard variables, its exact undo, and checks of an environment."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from reloadpg.environment import (
    DistributedEnvironment,
    DistributedEnvironmentError,
    detect_environment,
)
from reloadpg.environment.model import port_from_ids

ENVIRONMENT = DistributedEnvironment("slurm", 5, 1, 8, 4, 1, 2, "n1", 15123)


def test_the_exported_variables_are_read_back_as_the_same_environment() -> None:
    """A child process that reads torchrun's variables is the same rank of the same job."""
    environ: dict[str, str] = {}
    ENVIRONMENT.export(environ)
    assert detect_environment(environ) == replace(ENVIRONMENT, source="torchrun")


def test_the_undo_restores_os_environ_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call does nothing. The address of the user is kept."""
    for name in ENVIRONMENT.variables():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "n1-ib")
    before = dict(os.environ)
    undo = ENVIRONMENT.export()
    assert (os.environ["RANK"], os.environ["MASTER_ADDR"]) == ("5", "n1-ib")
    undo()
    assert dict(os.environ) == before
    monkeypatch.setenv("RANK", "6")
    undo()
    assert os.environ["RANK"] == "6"


def test_nothing_is_exported_if_a_preset_rank_or_size_differs() -> None:
    """Half of one identity is never combined with half of another."""
    environ = {"RANK": "7"}
    with pytest.raises(DistributedEnvironmentError, match="RANK is '7' and would become '5'"):
        ENVIRONMENT.export(environ)
    assert environ == {"RANK": "7"}


def test_undo_keeps_a_variable_that_was_changed_later_and_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It undoes only what still has the exported value."""
    environ: dict[str, str] = {}
    undo = ENVIRONMENT.export(environ)
    environ["RANK"] = "0"
    with caplog.at_level(logging.WARNING):
        undo()
    assert environ == {"RANK": "0"}
    assert "RANK was set to '5' by the export but is '0' now" in caplog.text


def test_ports_are_in_range_and_differ_between_steps_and_neighbouring_jobs() -> None:
    """15000..30000; the first 200 steps of 70 consecutive jobs share none."""
    for base in (1, 999, 15001, 4294967):
        ports = [
            port_from_ids(str(base + job), str(step))
            for job, step in itertools.product(range(70), range(200))
        ]
        assert 15000 <= min(ports) <= max(ports) <= 30000
        assert len(set(ports)) == len(ports)


def test_importing_detecting_exporting_and_ranks_import_no_torch() -> None:
    """A launcher script may need all of this before torch is loaded."""
    script = (
        "import sys, reloadpg\n"
        "import reloadpg.environment as e\n"
        "e.detect_environment({}).export({})()\n"
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
