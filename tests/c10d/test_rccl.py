"""The calls of a suspend with AMD's RCCL: the library's name, and which functions it has.

The library here is a small one of that name, which records the calls. RCCL itself was not run.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.torch_version import TorchVersion

from reloadpg.c10d import nccl

SOURCE = r"""
#include <stdint.h>
static int state[8];
int ncclGetVersion(int *version) { *version = 22807; return 0; }
const char *ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "other"; }
int calls(int which) { return state[which]; }
#ifdef SUSPENDS
int ncclCommSuspend(void *comm, int flags) {
  if (comm != (void *)0x5000) return 5;
  state[0] += flags;
  return 0;
}
int ncclCommResume(void *comm) { return comm == (void *)0x5000 ? (state[1]++, 0) : 5; }
#endif
"""

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has loaded a real NCCL"),
    pytest.mark.skipif(
        TorchVersion(torch.__version__) < "2.12",
        reason="Backend.suspend is in torch 2.12 and later",
    ),
]


class ProcessGroupNCCL:
    """What is read of torch's class, which a build for the CPU lacks."""

    suspend = staticmethod(getattr(torch._C._distributed_c10d.Backend, "suspend", None))

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def name(self) -> str:
        return "nccl"

    def _comm_ptr(self) -> int:
        return self.pointer

    @staticmethod
    def get_runtime_nccl_version() -> tuple[int, int, int]:
        return 2, 28, 7


def load(folder: Path, *flags: str) -> Any:
    """Build a library named librccl.so.1, and load it, as torch's build for ROCm has."""
    source, library = folder / "rccl.c", folder / "librccl.so.1"
    source.write_text(SOURCE)
    linked = ["-shared", "-fPIC", "-Wl,-soname,librccl.so.1"]
    subprocess.run(["g++", "-x", "c", *flags, *linked, source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc]
    return loaded


@pytest.mark.ranks(1)
def test_a_suspend_calls_rccl_where_it_has_the_functions(tmp_path: Path) -> None:
    """Also of a version in which NCCL has none; a suspend and a resume are one call each."""
    library = load(tmp_path, "-DSUSPENDS")
    group: Any = ProcessGroupNCCL(0x5000)
    other: Any = ProcessGroupNCCL(0x6000)
    assert nccl.suspend_obstacle(group) == ""
    for _ in range(2):
        nccl.suspend_backend(group)
        nccl.resume_backend(group)
    assert [library.calls(which) for which in range(2)] == [2, 2]
    with pytest.raises(RuntimeError, match="ncclCommSuspend: invalid usage"):
        nccl.suspend_backend(other)


@pytest.mark.ranks(1)
def test_an_rccl_without_the_functions_is_an_obstacle(tmp_path: Path) -> None:
    """The groups are recreated then, and the report has this reason."""
    load(tmp_path)
    group: Any = ProcessGroupNCCL(0x5000)
    assert "NCCL 2.28.7 cannot suspend" in nccl.suspend_obstacle(group)


@pytest.mark.ranks(1)
def test_an_engine_that_does_not_give_its_communicator_is_an_obstacle(tmp_path: Path) -> None:
    """``ProcessGroupNCCL2`` of torch 2.14, which ``TORCH_DIST_USE_NCCL2=1`` chooses there."""
    load(tmp_path, "-DSUSPENDS")

    class ProcessGroupNCCL2:
        suspend = staticmethod(ProcessGroupNCCL.suspend)
        name = ProcessGroupNCCL.name

    backend: Any = ProcessGroupNCCL2()
    assert "the communicators of ProcessGroupNCCL2" in nccl.suspend_obstacle(backend)
