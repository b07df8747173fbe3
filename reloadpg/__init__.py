"""Release NCCL communicators while they are not needed, and keep every process group object.

``reloadpg.install()`` makes the groups that ``torch.distributed`` creates reloadable.
``reloadpg.offload()`` releases their memory. ``reloadpg.reload()`` rebuilds them behind the same
objects. Importing this package does not import torch.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import *  # noqa: F403 - it lists its public names

if TYPE_CHECKING:  # for type checkers; at run time __getattr__ finds the names
    from .environment import barrier as barrier
    from .environment import destroy_distributed as destroy_distributed
    from .environment import detect_environment as detect_environment
    from .environment import ensure_process_group as ensure_process_group
    from .environment import init_distributed as init_distributed
    from .environment import process_group_scope as process_group_scope
    from .environment import resolve_mesh_dims as resolve_mesh_dims
    from .groups.proxy import GroupState as GroupState
    from .groups.proxy import ReloadableProcessGroup as ReloadableProcessGroup
    from .groups.register_group import register_group as register_group
    from .groups.selection import StrategyPolicy as StrategyPolicy
    from .groups.sets import region as region
    from .lifecycle.block import offloaded as offloaded
    from .lifecycle.block import swapped as swapped
    from .lifecycle.callbacks import on_offload as on_offload
    from .lifecycle.callbacks import on_reload as on_reload
    from .lifecycle.callbacks import on_report as on_report
    from .lifecycle.install import Installation as Installation
    from .lifecycle.install import install as install
    from .lifecycle.install import is_installed as is_installed
    from .lifecycle.install import uninstall as uninstall
    from .lifecycle.offload import offload as destroy_process_groups
    from .lifecycle.offload import offload as offload
    from .lifecycle.pending import Pending as Pending
    from .lifecycle.recover import recover as recover
    from .lifecycle.recover import recovery_requested as recovery_requested
    from .lifecycle.rejoin import rejoin as rejoin
    from .lifecycle.reload import reload as reload
    from .lifecycle.reload import reload as reload_process_groups
    from .lifecycle.report import BypassedGroup as BypassedGroup
    from .lifecycle.report import Fault as Fault
    from .lifecycle.report import GroupReport as GroupReport
    from .lifecycle.report import GroupStatus as GroupStatus
    from .lifecycle.report import OperationStatus as OperationStatus
    from .lifecycle.report import Report as Report
    from .lifecycle.report import Reports as Reports
    from .lifecycle.report import SetStatus as SetStatus
    from .lifecycle.report import Status as Status
    from .lifecycle.retrying import retrying as retrying
    from .lifecycle.status import status as status

__version__ = "0.1.0"

_TESTED_TORCH = ((2, 8), (2, 15))
"""The oldest and the newest tested version of torch."""

_HOMES = {
    "environment": """
        barrier destroy_distributed detect_environment ensure_process_group init_distributed
        process_group_scope resolve_mesh_dims
    """,
    "groups.register_group": "register_group",
    "groups.proxy": "GroupState ReloadableProcessGroup",
    "groups.selection": "StrategyPolicy",
    "groups.sets": "region",
    "lifecycle.block": "offloaded swapped",
    "lifecycle.callbacks": "on_offload on_reload on_report",
    "lifecycle.install": "Installation install is_installed uninstall",
    "lifecycle.offload": "offload",
    "lifecycle.pending": "Pending",
    "lifecycle.recover": "recovery_requested recover",
    "lifecycle.rejoin": "rejoin",
    "lifecycle.reload": "reload",
    "lifecycle.report": """
        BypassedGroup Fault GroupReport GroupStatus OperationStatus Report Reports SetStatus Status
    """,
    "lifecycle.retrying": "retrying",
    "lifecycle.status": "status",
}
_ALIASES = {"destroy_process_groups": "offload", "reload_process_groups": "reload"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME_OF, *_ALIASES, *errors.__all__, "__version__"])


def __getattr__(name: str) -> Any:
    target = _ALIASES.get(name, name)
    home = _HOME_OF.get(target)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home != "environment":  # detection needs no torch
        # Before any module of ours: RELOADPG_AUTOINSTALL installs at its end.
        import_module("torch")
    value = globals()[name] = getattr(import_module(f".{home}", __name__), target)
    if name == "install":
        # The core does not import monitoring, so it is connected to installations here.
        import_module(".observability.publish", __name__).start_with_installations()
        for other in _HOME_OF:  # a signal handler that calls status() must not import it
            if _HOME_OF[other] != "environment" and other not in globals():
                with suppress(AttributeError):  # its module is being imported, and imports torch
                    __getattr__(other)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]
