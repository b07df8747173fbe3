"""TransformerEngine's userbuffers, with a stand-in that keeps and exchanges as the real ones do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import reloadpg
from reloadpg.errors import InvalidOptionError
from reloadpg.integrations.transformer_engine import expert_parallel, userbuffers

PACKAGES = Path(__file__).parents[1] / "helpers" / "packages"

pytestmark = pytest.mark.matrix


def start() -> Any:
    reloadpg.install(backends={"gloo"}, timeout=60)
    dist.init_process_group("gloo")
    sys.path.insert(0, str(PACKAGES))
    import transformer_engine.pytorch

    return transformer_engine.pytorch


def groups() -> int:
    return len(reloadpg.status().groups) + reloadpg.status().bypassed


@pytest.mark.ranks(2)
def test_userbuffers_are_destroyed_before_the_offload_and_created_after_the_reload(
    rank: int,
) -> None:
    """On all ranks, since they exchange handles. The groups that TransformerEngine leaves go."""
    library = start()
    base = sys.modules["transformer_engine.pytorch.module.base"]
    end = userbuffers(lambda: library.initialize_ub([4, 4], 2))
    layers, many = ["qkv_fprop", "proj_fprop"], groups()
    for _ in range(2):
        assert base.alive == layers
        report = reloadpg.offload()
        assert base.alive == []
        assert [one.state for one in report.holders] == ["released"]
        reloadpg.reload()
        assert groups() == many
    with pytest.raises(RuntimeError, match="already initialized"):
        library.initialize_ub([4, 4], 2)
    end()
    reloadpg.offload()
    assert base.alive == layers


@pytest.mark.ranks(2)
def test_a_failure_on_one_rank_leaves_no_second_set_of_userbuffers(rank: int) -> None:
    """The next reload restores all ranks; the one whose buffers are alive destroys them first."""
    library = start()
    base = sys.modules["transformer_engine.pytorch.module.base"]
    userbuffers(lambda: library.initialize_ub([4, 4], 2))

    def fail() -> None:
        if rank == 0:
            raise ValueError("of this rank")

    reloadpg.register_holder("z", release=fail, restore=lambda: None, collective=True)
    with pytest.raises(reloadpg.ReloadpgError, match="holder z on rank 0"):
        reloadpg.offload()  # z is released first
    assert rank == 1 or base.alive == ["qkv_fprop", "proj_fprop"]
    reloadpg.reload()
    assert base.alive == ["qkv_fprop", "proj_fprop"]


def test_functions_that_initialize_nothing_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"did not call .* ep_bootstrap"):
        expert_parallel(None, lambda: None)
    with pytest.raises(InvalidOptionError, match=r"did not call .* initialize_ub"):
        userbuffers(lambda: None)
