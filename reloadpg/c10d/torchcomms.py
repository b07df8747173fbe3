"""TorchComms: the communicators of torch's groups under ``TORCH_DISTRIBUTED_USE_TORCHCOMMS=1``.

Each backend is then a ``_BackendWrapper`` around a communicator of the package ``torchcomms``,
which torch also keeps in ``_world.comms``. Seen with its gloo backend on torch 2.15.0 (torchcomms
at 59426ba4b). Of its NCCL backend the source was read; it has not run.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as _c10d

HAS_TORCHCOMMS = hasattr(_c10d, "_BackendWrapper")
"""Whether torch can import the package; it may be disabled."""

TORCHCOMMS_SUPPORT = (
    "TorchComms is enabled: its gloo groups are released, rebuilt and recovered, one at a time, "
    "and never suspended; its NCCL backend was not tested"
)

TORCHCOMMS_RECOVERY = {
    "TORCHCOMM_ABORT_ON_ERROR": ("0", "TorchComms ends the process after a failed collective"),
    # How long a failed collective waits for a dump before it raises; 15 s by default.
    "TORCHCOMM_HEALTH_CHECK_WAIT_MS": ("200", ""),
}
"""As the settings of torch's NCCL engines: :func:`~reloadpg.c10d.recovery_settings`."""


def uses_torchcomms() -> bool:
    """Whether torch creates its groups with TorchComms now.

    Torch writes rank and size into the process's environment for the time of each creation.
    """
    enabled = getattr(_c10d, "_use_torchcomms_enabled", None)
    return enabled is not None and bool(enabled())


def torchcomms_obstacle() -> str:
    """Say why this torch's groups cannot be rebuilt with TorchComms; empty if they can.

    Before 2.15 torch splits a parent for each new group. On plain torch 2.13 about 60 groups in a
    row hang, and so does a group of some ranks before one that includes others.
    """
    if not uses_torchcomms() or hasattr(_c10d, "_create_torchcomms_backend"):
        return ""
    return (
        f"torch {torch.__version__} hangs when it creates groups with TorchComms "
        "(TORCH_DISTRIBUTED_USE_TORCHCOMMS=1; seen on plain torch 2.13). Unset the variable, or "
        "use torch 2.15 or later"
    )


def is_torchcomm(backend: object) -> bool:
    return isinstance(backend, getattr(_c10d, "_BackendWrapper", ()))


def _communicators(part: Any) -> list[Any]:
    """The TorchComms communicators of a group, or of one of its backends."""
    found = [part]
    with suppress(RuntimeError, AttributeError):  # a backend; a group that has none
        found = [part._get_backend(device) for device in part._device_types]
    return [backend.get_comm() for backend in found if is_torchcomm(backend)]


def own_communicators(group: ProcessGroup) -> None:
    """Remove a group's communicators from torch's list, so that they end with the group.

    When the default group is destroyed, torch calls ``finalize()`` for all of the list, which
    raises for a communicator that an offload has finalized.
    """
    for comm in _communicators(group):
        with suppress(ValueError):
            cast(Any, _c10d._world).comms.remove(comm)


def abort_part(part: Any) -> None:
    """Abort a group, or one of its backends, unless that would end the process.

    TorchComms' gloo cannot abort. Its NCCL, by the source, ends the process in ``abort()``, unless
    ``TORCHCOMM_ABORT_ON_ERROR=0`` was set when the communicator was created, and not by a split.
    Both close their connections with the last reference, which the caller drops.
    """
    comms = _communicators(part) if HAS_TORCHCOMMS else []
    able = [comm for comm in comms if comm.is_abort_supported()]
    ends = any(comm.get_options().abort_process_on_timeout_or_error for comm in able)
    if not comms or (able and not ends):
        part.abort()
