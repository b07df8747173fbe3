"""The accelerator devices of this rank, if one is in use. Never initializes one.

Which device is a rank's is a fact of its job, while the current device is one of each thread: in a
new thread it is device 0. So :func:`of_rank` decides, and every use of a device asks it.

Any call into an accelerator's runtime creates a context of several hundred MB on the device. So
these functions do nothing until the process has initialized the accelerator itself, and use no
device on which it has no context. The current device of the calling thread stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from ..texts import counted
from .tables import known_groups, world

_of_groups: WeakKeyDictionary[ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()
"""The devices on which groups had communicators when they were last released."""


def runtime() -> ModuleType | None:
    """``torch.cuda`` or the module of another accelerator; None if none is in use."""
    accelerator = torch.accelerator.current_accelerator()  # as built; does not call the driver
    if accelerator is None:
        return None
    module: ModuleType = torch.get_device_module(accelerator)
    started = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if started() else None


def name_devices() -> str:
    """Describe the accelerators of this machine, by NVML; empty without one. Creates no context."""
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if accelerator is not None else 0
    return f"{counted(count, f'{accelerator.type} device')}" if accelerator and count else ""


# -- which devices are this rank's --------------------------------------------------------------


def of_rank() -> tuple[int, ...]:
    """Indices of this rank's devices, the one to connect on first; empty if none is in use. Local.

    The default group's device, if it is bound to one; else the devices with communicators
    (:func:`record`); else, before the first offload, the device with a context on which torch has
    allocated most. The current device of the calling thread decides only between equals.
    """
    module, default = runtime(), world()
    if module is None:
        return ()
    if default is not None and (bound := _bound(default)) is not None:
        return (bound,)
    here = torch.accelerator.current_device_index()
    if found := {index for group in known_groups() for index in _of_groups.get(group, ())}:
        return tuple(sorted(found, key=lambda index: (index != here, index)))
    # A library, or set_device(0), may have created the context of another device.
    held = getattr(module, "memory_reserved", lambda index: 0)
    used = with_context() or (here,)
    return (min(used, key=lambda index: (-held(index), index != here, index)),)


def index_of_rank() -> int | None:
    """The index of this rank's device, on which to connect; None if none is in use. Local."""
    return next(iter(of_rank()), None)


def index_for(group: ProcessGroup) -> int | None:
    """The index of the device on which to connect a group; None if none is in use. Local."""
    if runtime() is None:
        return None
    if (bound := _bound(group)) is not None:
        return bound
    index, found = index_of_rank(), _of_groups.get(group, ())
    return index if index in found or not found else found[0]


def difference() -> str:
    """Say that the calling thread's current device is not this rank's; empty if it is."""
    found = of_rank()
    if not found or (here := torch.accelerator.current_device_index()) in found:
        return ""
    kind = _type()
    return (
        f"the current device of the calling thread is {kind}:{here}, and this rank's communicators "
        f"are on {', '.join(f'{kind}:{index}' for index in found)}, which was used"
    )


def record(found: Mapping[ProcessGroup, tuple[int, ...]]) -> None:
    """Record on which devices these groups have communicators. Local."""
    _of_groups.update({group: indices for group, indices in found.items() if indices})


def with_context() -> tuple[int, ...]:
    """Indices of the devices on which this process has a context; empty if unknown. Local."""
    if runtime() is None or not hasattr(torch._C, _HAS_CONTEXT) or _type() != "cuda":
        return ()
    return tuple(filter(_has_context, range(torch.accelerator.device_count())))


_HAS_CONTEXT = "_cuda_hasPrimaryContext"


def _has_context(index: int) -> bool:
    """Whether this process has a context on a device; True if unknown."""
    known: Callable[[int], bool] | None = getattr(torch._C, _HAS_CONTEXT, None)
    return known is None or _type() != "cuda" or known(index)


def _type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "" if accelerator is None else accelerator.type


def _bound(group: ProcessGroup) -> int | None:
    device: torch.device | None = group.bound_device_id
    return device.index if device is not None and device.type == _type() else None


# -- use of them --------------------------------------------------------------------------------


@contextmanager
def current(index: int | None) -> Iterator[bool]:
    """Make a device current in this thread within this block, if it has a context; None for none.

    Yields whether it is.
    """
    module = runtime()
    if module is None or index is None or not _has_context(index):
        yield False
        return
    with module.device(index):  # its end creates no context on the device of before
        yield True


def use_index(index: int | None) -> None:
    """Make a device current in this thread, if it has a context. For threads of this library."""
    if index is not None and _has_context(index):
        torch.accelerator.set_device_index(index)


def synchronize(index: int | None = None) -> None:
    """Wait until a device, by default each of this rank's, has finished all work. Local, blocking.

    Not by ``torch.accelerator.synchronize(index)``, which creates a context on the current device.
    """
    for each in of_rank() if index is None else (index,):
        with current(each) as usable:
            if usable:
                torch.accelerator.synchronize()


def empty_cache() -> None:
    """Release the unused memory of torch's caching allocator, so that communicators can use it."""
    module = runtime()
    if module is not None and hasattr(module, "empty_cache"):
        module.empty_cache()
