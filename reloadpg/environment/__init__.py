"""Bring-up, ownership and the mesh: the distributed environment around reloadable groups.

Names are loaded on first use: importing this package and detecting the environment do not import
torch. Do not assume that bring-up writes ``RANK`` or ``MASTER_ADDR`` to ``os.environ``: for
libraries that read them, the program does, from ``detect_environment().variables()``.

An evaluator that may or may not run under a launcher::

    reloadpg.environment.ensure_process_group()        # gloo if there are several ranks
    results = evaluate(shard=reloadpg.environment.get_rank())
    reloadpg.environment.destroy_distributed()         # nothing if there is no group

A trainer that destroys the group only if it created it::

    with reloadpg.environment.process_group_scope():
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl")
        train()                            # success: barrier, destroy; exception: abort

A mesh trainer, with the same line under ``torchrun``, ``srun`` and ``mpirun``::

    reloadpg.install()
    with reloadpg.environment.init_distributed(
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

if TYPE_CHECKING:  # at run time, __getattr__ resolves the names
    from .bringup import DistributedContext as DistributedContext
    from .bringup import ensure_process_group as ensure_process_group
    from .bringup import init_distributed as init_distributed
    from .identity import DistributedEnvironment as DistributedEnvironment
    from .identity import DistributedEnvironmentError as DistributedEnvironmentError
    from .launchers import detect_environment as detect_environment
    from .launchers import get_rank as get_rank
    from .launchers import is_rank_zero as is_rank_zero
    from .mesh import resolve_mesh_dims as resolve_mesh_dims
    from .mesh import set_seed as set_seed
    from .store import barrier as barrier
    from .teardown import destroy_distributed as destroy_distributed
    from .teardown import process_group_scope as process_group_scope

# The module of each name. A public function must not have the name of its module: importing the
# submodule would replace the function by the module.
_HOMES = {
    "bringup": "DistributedContext ensure_process_group init_distributed",
    "identity": "DistributedEnvironment DistributedEnvironmentError",
    "launchers": "detect_environment get_rank is_rank_zero",
    "mesh": "resolve_mesh_dims set_seed",
    "store": "barrier",
    "teardown": "destroy_distributed process_group_scope",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
