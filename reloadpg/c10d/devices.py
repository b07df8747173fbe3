"""The accelerator of this process, if it is in use. Never initializes one.

Any call into an accelerator's runtime creates a context of several hundred MB on the device, so
these functions do nothing until the process has initialized the accelerator itself.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..texts import counted


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


def current_index() -> int | None:
    return torch.accelerator.current_device_index() if runtime() is not None else None


def use_index(index: int | None) -> None:
    if index is not None:
        torch.accelerator.set_device_index(index)


def synchronize() -> None:
    """Wait until the current device has finished all work queued on it. Local, blocking."""
    if runtime() is not None:
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Release the unused memory of torch's caching allocator, so that communicators can use it."""
    module = runtime()
    if module is not None and hasattr(module, "empty_cache"):
        module.empty_cache()
