"""The parallel groups of a Megatron-style trainer: made by Megatron itself where it is installed.

No group that is made here is told of reloadpg, and neither is Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .layout import Layout

__all__ = ["ParallelGroups", "megatron_version"]

_MINUTES = 10


def megatron_version() -> str | None:
    """The installed version of megatron-core, or None. Local, imports nothing."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's parallel groups.

    Attributes:
        source: who made them.
        groups: all of them by description, in the order in which all ranks made them.
    """

    source: str
    tensor: ProcessGroup
    pipeline: ProcessGroup
    data: ProcessGroup
    expert: ProcessGroup
    groups: dict[str, ProcessGroup]

    @classmethod
    def create(cls, layout: Layout) -> ParallelGroups:
        """Make the groups. Collective over all ranks of the job."""
        installed = megatron_version()
        return _by_hand(layout) if installed is None else _by_megatron(layout, installed)


def _by_megatron(layout: Layout, installed: str) -> ParallelGroups:
    state = import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=_MINUTES,
        create_gloo_process_groups=False,
    )
    groups: dict[str, ProcessGroup] = {}
    for name, value in vars(state).items():
        if isinstance(value, ProcessGroup) and value not in groups.values():
            groups[name.strip("_")] = value
    return ParallelGroups(
        f"megatron-core {installed}",
        state.get_tensor_model_parallel_group(),
        state.get_pipeline_model_parallel_group(),
        state.get_data_parallel_group(),
        state.get_expert_model_parallel_group(),
        groups,
    )


def _by_hand(layout: Layout) -> ParallelGroups:
    """The same calls that Megatron makes: every rank calls for every group, by keyword."""
    groups: dict[str, ProcessGroup] = {}
    for desc, ranks in layout.groups():
        group = dist.new_group(
            ranks=ranks,
            timeout=timedelta(minutes=_MINUTES),
            backend=None,
            pg_options=None,
            use_local_synchronization=False,
            group_desc=desc,
        )
        if dist.get_rank() in ranks:
            groups[desc] = group
    return ParallelGroups(
        "new_group, called as Megatron calls it (megatron-core is not installed)",
        groups["TENSOR_MODEL_PARALLEL_GROUP"],
        groups["PIPELINE_MODEL_PARALLEL_GROUP"],
        groups["DATA_PARALLEL_GROUP"],
        groups["EXPERT_MODEL_PARALLEL_GROUP"],
        groups,
    )
