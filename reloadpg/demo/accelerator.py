"""What the demo runs on: NCCL on the GPUs of this machine, or else the simulated accelerator.

On both, released memory is measured. On a GPU it is what the driver counts as free; on the
simulated accelerator what its communicators held, and beside it the resident memory of the
process as the operating system counts it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from ..testing import simulated

__all__ = ["COMMUNICATOR_BYTES", "Accelerator", "accelerator_named", "cuda_devices"]

COMMUNICATOR_BYTES = 8 << 20
"""What one communicator of the simulated accelerator holds on each rank."""


def cuda_devices() -> int:
    """Number of GPUs that NCCL can use here. Starts no CUDA context."""
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    return torch.cuda.device_count() if usable else 0


class Accelerator(ABC):
    """One kind of device and the backend of its groups.

    Attributes:
        backend: name of the backend.
        device: this rank's device.
    """

    backend: str
    device: torch.device

    @abstractmethod
    def prepare(self) -> None:
        """Make the device and the backend usable in this process."""

    @abstractmethod
    def in_use(self) -> dict[str, int]:
        """Bytes in use now, by who counts them; the demo reports what the first one says. Local."""


class Cuda(Accelerator):
    """NVIDIA GPUs, one a rank."""

    backend = "nccl"

    def __init__(self, local_rank: int) -> None:
        self.device = torch.device("cuda", local_rank)

    def prepare(self) -> None:
        torch.cuda.set_device(self.device)
        torch.use_deterministic_algorithms(True)

    def in_use(self) -> dict[str, int]:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what the caching allocator keeps is the trainer's, not NCCL's
        free, total = torch.cuda.mem_get_info(self.device)
        return {"device": total - free}


class Simulated(Accelerator):
    """The simulated accelerator: gloo transport, and real memory for each communicator."""

    backend = simulated.NAME
    device = torch.device("cpu")

    def prepare(self) -> None:
        simulated.register()
        simulated.configure(bytes_per_communicator=COMMUNICATOR_BYTES)

    def in_use(self) -> dict[str, int]:
        return {"accelerator": simulated.stats().held_bytes, "resident": _resident_bytes()}


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def accelerator_named(name: str) -> Accelerator:
    """``cuda`` or ``simulated``, for the rank that the launcher's environment names."""
    return Cuda(int(os.environ["LOCAL_RANK"])) if name == "cuda" else Simulated()
