"""megatron-core's own groups: ``initialize_model_parallel`` and its getters.

megatron-core is in the ``test`` extra; without it these tests fail, they are not skipped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from consumer_run import Run, same_results, tables
from helpers import worlds

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2 cp2": {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "create_gloo_process_groups": False,
    },
    "pp2 ep2": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "tp2 ep4 etp1": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "create_all_gather_group": True,  # not in 0.19
    },
    "pp4": {"pipeline_model_parallel_size": 4},  # groups overlap: an embedding of ranks 0 and 3
    "cp4": {"context_parallel_size": 4, "order": "tp-cp-pp-dp"},
}
"""Arguments of ``initialize_model_parallel`` on four ranks."""

FIRST, LATER = timedelta(minutes=120), timedelta(minutes=7)


def getters(parallel_state: Any) -> dict[str, Callable[[], Any]]:
    """Every getter of groups that megatron-core has, with each of its flags too."""
    found: dict[str, Callable[[], Any]] = {}
    for name, function in inspect.getmembers(parallel_state, inspect.isfunction):
        if not (name.startswith("get_") and ("_group" in name)):
            continue
        if "rank" in name or "size" in name or "hybrid" in name:
            continue
        parameters = inspect.signature(function).parameters
        found[name] = function
        for flag in parameters:
            if flag.startswith(("with_", "partial_", "independent_", "tp_only")):
                found[f"{name}({flag})"] = lambda f=function, flag=flag: f(**{flag: True})
    return found


def groups_of(parallel_state: Any) -> dict[str, dist.ProcessGroup]:
    """What the getters give on this rank; those without a group here are left out."""
    groups: dict[str, dist.ProcessGroup] = {}
    for name, getter in getters(parallel_state).items():
        try:
            value = getter()
        except AssertionError:  # megatron-core: not initialized in this layout or on this rank
            continue
        for index, group in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(group, dist.ProcessGroup):
                groups[f"{name}[{index}]" if isinstance(value, list) else name] = group
    return groups


def timeout_of(group: dist.ProcessGroup) -> float:
    return group._get_backend(worlds.device_of(group)).options._timeout.total_seconds()


def sums(run: Run, groups: dict[str, dist.ProcessGroup]) -> dict[str, Any]:
    """By group: its members, and 2**rank summed over them by a collective."""
    out = {}
    for name, group in groups.items():
        tensor = torch.tensor([float(2**run.rank)], device=worlds.device_of(group))
        dist.all_reduce(tensor, group=group)
        out[name] = {
            "ranks": dist.get_process_group_ranks(group),
            "sum": tensor,
            "timeout": timeout_of(group),
            "desc": group.group_desc,
        }
    return out


def end(parallel_state: Any, *, leave: bool = False) -> None:
    """``destroy_model_parallel``, which leaves most groups alive; then these too, or not."""
    made = [group for group in parallel_state._global_process_group_list if group is not None]
    parallel_state.destroy_model_parallel()
    for group in made:
        if not leave and group in tables().pg_map:
            dist.destroy_process_group(group)


PRELOAD = () if worlds.NCCL else ("megatron.core",)
"""What ``consumer_run`` has imported once for all ranks of a launch. It asks CUDA for its devices
as it is imported, and a process that has done so cannot be forked."""


def megatron_program(run: Run) -> dict[str, Any]:
    """One layout after the other, three cycles in each; the first one's groups stay around.

    All in one job, as importing megatron-core is what takes long.
    """
    from megatron.core import parallel_state

    results: dict[str, Any] = {}
    run.facts["same objects"] = []
    run.facts["groups"] = {}
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    for name, layout in LAYOUTS.items():
        arguments = {key: value for key, value in layout.items() if key in known}
        parallel_state.initialize_model_parallel(
            **arguments, distributed_timeout_minutes=int(FIRST.total_seconds() / 60)
        )
        groups = groups_of(parallel_state)
        run.facts["groups"][name] = sorted(groups)
        rounds = [sums(run, groups)]
        for cycle in range(3):
            if cycle == 1:
                # What megatron-core's update_pg_timeout does after its barrier and its
                # torch.cuda.synchronize(), which needs a GPU.
                for group in parallel_state._global_process_group_list:
                    dist.distributed_c10d._set_pg_timeout(LATER, group)
            run.cycle()
            now = groups_of(parallel_state)
            run.facts["same objects"].append(
                list(now) == list(groups) and all(now[key] is groups[key] for key in groups)
            )
            rounds.append(sums(run, groups))
        results[name] = rounds
        del groups, now, group  # a destroyed gloo group keeps its sockets while it is held
        end(parallel_state, leave=name == "tp2 pp2")
    return results


@pytest.mark.slow
def test_megatron() -> None:
    """Getters return the same objects before and after each cycle.

    All kinds of groups take part: tensor, pipeline, data, context, expert and embedding groups;
    gloo ones on request.
    """
    for outcome in same_results(megatron_program, 4, groups=8, cycles=3 * len(LAYOUTS)):
        assert outcome.facts["same objects"] == [True] * (3 * len(LAYOUTS))
        seen = outcome.facts["groups"]
        for name in seen:
            for kind in ("tensor_model", "pipeline_model", "data", "context", "expert_model"):
                assert f"get_{kind}_parallel_group" in seen[name]
            gloo = "get_data_parallel_group_gloo" in seen[name]
            assert gloo is LAYOUTS[name].get("create_gloo_process_groups", True)
        assert "get_embedding_group" in seen["tp2 pp2"]
        assert "get_data_parallel_group(with_context_parallel)" in seen["cp4"]
