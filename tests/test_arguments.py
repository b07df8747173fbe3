"""Public arguments take the kinds of values that programs have: NumPy's, torch's, paths, times."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reloadpg
from reloadpg import environment
from reloadpg.environment import set_seed
from reloadpg.integrations.transformers import OffloadedPhase
from reloadpg.settings import as_timedelta
from reloadpg.testing import run_ranks

INTEGERS = (np.int64(2), np.uint8(2), torch.tensor(2), 2)
NO_INTEGERS = (True, np.True_, "2", 2.5, None, [2])
FLAGS = (False,)
NO_FLAGS = ("False", 0, None, np.False_)
TIMES = (timedelta(seconds=2), 2, 2.0, np.int64(2), np.float32(2), np.float64(2))
NO_TIMES = (True, np.True_, "2", np.float64("nan"), -1, 0, [2])
NAMES = ("gloo", np.str_("gloo"), ["gloo"], {"gloo"}, np.array(["gloo"]), (n for n in ["gloo"]))
NO_NAMES = (2, True, torch.tensor(2), [2], ["gloo", None], Path("gloo"))


def install(**options: Any) -> Any:
    reloadpg.install(**{"backends": {"gloo"}, **options})
    reloadpg.uninstall()


def sized(size: Any) -> None:
    assert environment.resolve_mesh_dims({"tp": size}, 2) == {"dp_shard": 1, "tp": 2}


def scope(seconds: Any) -> None:
    assert environment.process_group_scope(timeout=seconds)._timeout.total_seconds() == 2


def init(**options: Any) -> None:
    with environment.init_distributed("gloo", **options):
        pass


CALLS: dict[str, tuple[Callable[[Any], object], tuple[Any, ...], tuple[Any, ...]]] = {
    "install(min_size)": (lambda v: install(min_size=v), INTEGERS, NO_INTEGERS),
    "install(parallelism)": (lambda v: install(parallelism=v), INTEGERS, NO_INTEGERS[:4]),
    "install(world)": (lambda v: install(world=v), FLAGS, NO_FLAGS),
    "install(recoverable)": (lambda v: install(recoverable=v), FLAGS, NO_FLAGS),
    "install(timeout)": (lambda v: install(timeout=v), TIMES, NO_TIMES),
    "install(backends)": (lambda v: install(backends=v), NAMES, (*NO_NAMES, [])),
    "install(exclude)": (lambda v: install(exclude=v), NAMES, NO_NAMES),
    "install(sets)": (lambda v: install(sets={"engine": v}), NAMES, NO_NAMES),
    "mesh size": (sized, INTEGERS, NO_INTEGERS),
    "mesh world_size": (
        lambda v: environment.resolve_mesh_dims({}, v),
        INTEGERS,
        NO_INTEGERS,
    ),
    "set_seed": (lambda v: set_seed(v), INTEGERS, NO_INTEGERS),
    "process_group_scope": (scope, TIMES, NO_TIMES),
    "barrier": (lambda v: environment.barrier("x", timeout=v), TIMES, NO_TIMES),
    "offload(wait)": (lambda v: reloadpg.offload(wait=v), (True,), NO_FLAGS),
    "reload(wait)": (lambda v: reloadpg.reload(wait=v), (True,), NO_FLAGS),
    "offload(set)": (lambda v: reloadpg.offload(v), ("trainer", np.str_("trainer")), (2, "", "a")),
    "on_offload(sets)": (
        lambda v: reloadpg.on_offload(print, sets=v)(),
        NAMES,
        (*NO_NAMES, "", [""]),
    ),
    "every": (lambda v: OffloadedPhase(every=v), INTEGERS, NO_INTEGERS),
    "run_ranks(world_size)": (lambda v: run_ranks(nothing, v), (), NO_INTEGERS),
    "run_ranks(timeout)": (lambda v: run_ranks(nothing, 1, timeout=v), (), NO_TIMES),
    "init_distributed(timeout)": (lambda v: init(timeout=v), TIMES[:4], NO_TIMES),
}


def nothing(*_: object) -> None: ...


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> Any:
    reads = str(request.node.name)
    if "offload(" in reads or "reload(" in reads:
        reloadpg.install(backends={"gloo"})
    yield
    reloadpg.uninstall()
    environment.destroy_distributed()


@pytest.mark.parametrize("call", CALLS)
def test_argument_takes_every_kind_of_its_values_and_refuses_the_others(call: str) -> None:
    """Nothing but an error of the library, which is a ValueError, comes from a wrong value."""
    function, taken, refused = CALLS[call]
    for value in taken:
        function(value)
    for value in refused:
        with pytest.raises(ValueError, match=r"othing was|No group was"):
            function(value)


def test_times_of_all_kinds_are_equal() -> None:
    """Seconds of any kind are the same timedelta."""
    assert {as_timedelta(value, "timeout") for value in TIMES} == {timedelta(seconds=2)}


RANKS: dict[str, Any] = {
    "numpy.arange": np.arange(2),
    "array of int32": np.arange(2, dtype=np.int32),
    "numpy integers": [np.int64(0), np.int64(1)],
    "tensor": torch.arange(2),
    "tensors": [torch.tensor(0), torch.tensor(1)],
    "set": {0, 1},
    "keys": {0: "", 1: ""}.keys(),
    "one rank numpy": [np.int64(0)],
}


def cycle_each(rank: int, world_size: int, folder: Path) -> None:
    """Create a group from each kind of ranks on rank 0, and from a list on the others."""
    reloadpg.install(backends={"gloo"}, timeout=np.int64(20), min_size=1)
    dist.init_process_group("gloo", rank=np.int64(rank), world_size=np.int64(world_size))
    assert os.environ["FOLDER"] == str(folder)
    groups = []
    for kind, ranks in RANKS.items():
        group = dist.new_group(ranks if rank == 0 else [int(one) for one in ranks], group_desc=kind)
        if isinstance(group, dist.ProcessGroup):
            groups.append(group)
    reloadpg.offload()
    assert all(type(one) is int for group in reloadpg.status().groups for one in group.ranks)
    reloadpg.reload()
    for group in groups:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == group.size()
    environment.barrier("end", timeout=np.float32(20), group=groups[0])
    dist.destroy_process_group()


@pytest.mark.matrix
def test_groups_of_ranks_that_are_no_ints_are_reloaded(tmp_path: Path) -> None:
    """Torch takes NumPy's integers and tensors as ranks; they also cycle, and plans are equal."""
    env = {"FOLDER": str(tmp_path)}
    run_ranks(cycle_each, 2, args=(tmp_path,), env=env, timeout=timedelta(seconds=60))
