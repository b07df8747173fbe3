"""Release NCCL communicators while they are not needed, and keep every process group object.

``reloadpg.install()`` makes the groups that ``torch.distributed`` creates reloadable;
``reloadpg.offload()`` gives their memory back; ``reloadpg.reload()`` makes the same objects work
again. Importing this package imports neither torch nor anything else of weight.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names for type checkers; at run time __getattr__ finds them
    from .blocks import offloaded
    from .choice import StrategyPolicy
    from .environment import (
        DistributedContext,
        DistributedEnvironment,
        barrier,
        configure_network_environment,
        destroy_distributed,
        detect_environment,
        detect_ib_interface,
        ensure_process_group,
        get_rank,
        init_distributed,
        is_rank_zero,
        process_group_scope,
        rank_zero_first,
        rank_zero_only,
        resolve_mesh_dims,
        set_seed,
    )
    from .errors import (
        DisagreementError,
        GroupDestroyedError,
        GroupOffloadedError,
        GroupPickleError,
        InsufficientMemoryError,
        InvalidOptionError,
        NotInstalledError,
        PatchConflictError,
        PeerFailedError,
        RebuildError,
        ReleaseError,
        ReloadpgError,
        RendezvousTimeoutError,
    )
    from .group import GroupState, ReloadableProcessGroup
    from .lifecycle import offload, on_offload, on_reload, on_report, reload
    from .lifecycle import offload as destroy_process_groups
    from .lifecycle import reload as reload_process_groups
    from .patching import Installation, install, is_installed, uninstall
    from .report import GroupReport, GroupStatus, Report, Status
    from .standing import status

__all__ = [
    "DisagreementError",
    "DistributedContext",
    "DistributedEnvironment",
    "GroupDestroyedError",
    "GroupOffloadedError",
    "GroupPickleError",
    "GroupReport",
    "GroupState",
    "GroupStatus",
    "Installation",
    "InsufficientMemoryError",
    "InvalidOptionError",
    "NotInstalledError",
    "PatchConflictError",
    "PeerFailedError",
    "RebuildError",
    "ReleaseError",
    "ReloadableProcessGroup",
    "ReloadpgError",
    "RendezvousTimeoutError",
    "Report",
    "Status",
    "StrategyPolicy",
    "__version__",
    "barrier",
    "configure_network_environment",
    "destroy_distributed",
    "destroy_process_groups",
    "detect_environment",
    "detect_ib_interface",
    "ensure_process_group",
    "get_rank",
    "init_distributed",
    "install",
    "is_installed",
    "is_rank_zero",
    "offload",
    "offloaded",
    "on_offload",
    "on_reload",
    "on_report",
    "process_group_scope",
    "rank_zero_first",
    "rank_zero_only",
    "reload",
    "reload_process_groups",
    "resolve_mesh_dims",
    "set_seed",
    "status",
    "uninstall",
]

__version__ = "0.1.0"

_HOMES = {
    "blocks": ("offloaded",),
    "choice": ("StrategyPolicy",),
    "environment": (
        "DistributedContext",
        "DistributedEnvironment",
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
    ),
    "errors": (
        "DisagreementError",
        "GroupDestroyedError",
        "GroupOffloadedError",
        "GroupPickleError",
        "InsufficientMemoryError",
        "InvalidOptionError",
        "NotInstalledError",
        "PatchConflictError",
        "PeerFailedError",
        "RebuildError",
        "ReleaseError",
        "ReloadpgError",
        "RendezvousTimeoutError",
    ),
    "group": ("GroupState", "ReloadableProcessGroup"),
    "lifecycle": (
        "offload",
        "on_offload",
        "on_reload",
        "on_report",
        "reload",
    ),
    "patching": ("Installation", "install", "is_installed", "uninstall"),
    "report": ("GroupReport", "GroupStatus", "Report", "Status"),
    "standing": ("status",),
}
_ALIASES = {"destroy_process_groups": "offload", "reload_process_groups": "reload"}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    target = _ALIASES.get(name, name)
    if target not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[target]}", __name__), target)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
