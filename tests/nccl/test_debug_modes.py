"""Torch's debug modes change nothing on its ProcessGroupNCCL: see ``debug_job``."""

from __future__ import annotations

import pytest
import torch
from debug_modes import run_mode
from nccl_job import ENGINES, engine_variables

from reloadpg.testing import standins

pytestmark = [
    pytest.mark.standins,
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

MODES = (
    *("DETAIL", "INFO", "flight recorder", "desync debug", "blocking launches", "blocking wait"),
    *("stack traces of C++",),
)


@pytest.mark.skipif(
    torch.__version__ < "2.9",
    reason="in torch 2.8 a send and a receive hang in the wrappers of DETAIL: docs/versions.md",
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("backend", "mode"),
    [*(("nccl", mode) for mode in MODES), ("cpu:gloo,cuda:nccl", "DETAIL")],
)
def test_a_debug_mode_changes_nothing(backend: str, mode: str, engine: str) -> None:
    """Values, two cycles and a recovery."""
    with standins.job() as job:
        env = {**engine_variables(engine), **job.environment, "TEST_WORLD": "nccl"}
        run_mode(mode, backend, env)
