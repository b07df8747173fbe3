"""Release NCCL communicators while they are not needed, and keep every process group object.

``reloadpg.install()`` makes the groups that ``torch.distributed`` creates reloadable.
``reloadpg.offload()`` releases their memory. ``reloadpg.reload()`` rebuilds them behind the same
objects. Importing this package does not import torch.

``reloadpg.recovery`` continues after faults, ``reloadpg.environment`` brings a job up and down,
``reloadpg.integrations`` has a module for each framework, and ``reloadpg.errors`` and
``reloadpg.reports`` have what functions raise and return. Other packages build on
``reloadpg.extend``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import DisagreementError as DisagreementError
from .errors import GroupOffloadedError as GroupOffloadedError
from .errors import PeerFailedError as PeerFailedError
from .errors import ReloadpgError as ReloadpgError
from .errors import RendezvousTimeoutError as RendezvousTimeoutError

if TYPE_CHECKING:  # for type checkers; at run time __getattr__ finds the names
    from . import environment as environment
    from . import extend as extend
    from . import integrations as integrations
    from . import recovery as recovery
    from . import reports as reports
    from .groups.proxy import ReloadableProcessGroup as ReloadableProcessGroup
    from .groups.region import region as region
    from .groups.register_group import register_group as register_group
    from .lifecycle.block import offloaded as offloaded
    from .lifecycle.callbacks import on_offload as on_offload
    from .lifecycle.callbacks import on_reload as on_reload
    from .lifecycle.callbacks import on_report as on_report
    from .lifecycle.install import install as install
    from .lifecycle.install import is_installed as is_installed
    from .lifecycle.install import uninstall as uninstall
    from .lifecycle.offload import offload as offload
    from .lifecycle.pending import Pending as Pending
    from .lifecycle.reload import reload as reload
    from .lifecycle.status import status as status
    from .reports import Report as Report
    from .reports import Status as Status

__version__ = "0.1.0"

_TESTED_TORCH = ((2, 8), (2, 15))
"""The oldest and the newest tested version of torch."""

_MODULES = ("environment", "extend", "integrations", "recovery", "reports")

_HOMES = {
    "groups.register_group": "register_group",
    "groups.proxy": "ReloadableProcessGroup",
    "groups.region": "region",
    "lifecycle.block": "offloaded",
    "lifecycle.callbacks": "on_offload on_reload on_report",
    "lifecycle.install": "install is_installed uninstall",
    "lifecycle.offload": "offload",
    "lifecycle.pending": "Pending",
    "lifecycle.reload": "reload",
    "lifecycle.status": "status",
    "reports": "Report Status",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(
    [
        *_HOME_OF,
        "DisagreementError",
        "GroupOffloadedError",
        "PeerFailedError",
        "ReloadpgError",
        "RendezvousTimeoutError",
        "__version__",
    ]
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Before any module of ours: RELOADPG_AUTOINSTALL installs at its end.
    import_module("torch")
    if name == "install":
        _observe_installations()
    value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return value


def _observe_installations() -> None:
    """Let each installation start what builds on the core. Local, idempotent."""
    from .lifecycle.install import observers

    if _observe not in observers:
        observers.append(_observe)


def _observe() -> None:
    from .observability import start

    start()


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "errors", "__doc__", "__file__", "__name__", "__path__"]
