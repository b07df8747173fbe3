"""Bring-up, ownership and the mesh: the distributed environment around reloadable groups.

Names are loaded when they are used: importing this package and detecting the environment import
no torch. Do not assume that bring-up writes ``os.environ``: it does not;
``detect_environment().export()`` does, for libraries that read it.

An evaluator that may or may not run under a launcher::

    reloadpg.ensure_process_group()        # gloo if WORLD_SIZE > 1, otherwise nothing
    results = evaluate(shard=reloadpg.get_rank())
    reloadpg.destroy_distributed()         # nothing if nothing was made

A trainer that ends the group only if it made it::

    with reloadpg.process_group_scope():
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl")
        train()                            # success: barrier, destroy; exception: abort

A mesh trainer, with the same line under ``torchrun``, ``srun`` and ``mpirun``::

    reloadpg.install()
    with reloadpg.init_distributed(
        timeout=timedelta(hours=2),        # of every group, before and after a reload
        init_timeout=timedelta(minutes=5),
        mesh_dims={"pp": 2, "dp_shard": -1, "tp": 4},
        seed=1234,
    ) as context:
        fully_shard(model, mesh=context.mesh["dp_shard"])
        train(model, context.device)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reloadpg.environment.bringup import DistributedContext, init_distributed
    from reloadpg.environment.detect import detect_environment
    from reloadpg.environment.errors import (
        DistributedEnvironmentError,
        GroupNotInitializedError,
        MeshDimensionError,
    )
    from reloadpg.environment.evaluator import ensure_process_group
    from reloadpg.environment.meeting import barrier
    from reloadpg.environment.mesh import resolve_mesh_dims
    from reloadpg.environment.model import DistributedEnvironment
    from reloadpg.environment.network import configure_network_environment, detect_ib_interface
    from reloadpg.environment.ownership import destroy_distributed, process_group_scope
    from reloadpg.environment.ranks import (
        get_rank,
        is_rank_zero,
        rank_zero_first,
        rank_zero_only,
    )
    from reloadpg.environment.seeds import set_seed

__all__ = [
    "DistributedContext",
    "DistributedEnvironment",
    "DistributedEnvironmentError",
    "GroupNotInitializedError",
    "MeshDimensionError",
    "barrier",
    "configure_network_environment",
    "destroy_distributed",
    "detect_environment",
    "detect_ib_interface",
    "ensure_process_group",
    "get_rank",
    "init_distributed",
    "is_rank_zero",
    "process_group_scope",
    "rank_zero_first",
    "rank_zero_only",
    "resolve_mesh_dims",
    "set_seed",
]

# The module of each name. No public function may share its name with its own module: importing
# the submodule would put the module where the function is expected.
_MODULES = {
    "DistributedContext": "bringup",
    "DistributedEnvironment": "model",
    "DistributedEnvironmentError": "errors",
    "GroupNotInitializedError": "errors",
    "MeshDimensionError": "errors",
    "barrier": "meeting",
    "configure_network_environment": "network",
    "destroy_distributed": "ownership",
    "detect_environment": "detect",
    "detect_ib_interface": "network",
    "ensure_process_group": "evaluator",
    "get_rank": "ranks",
    "init_distributed": "bringup",
    "is_rank_zero": "ranks",
    "process_group_scope": "ownership",
    "rank_zero_first": "ranks",
    "rank_zero_only": "ranks",
    "resolve_mesh_dims": "mesh",
    "set_seed": "seeds",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
