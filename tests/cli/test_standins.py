"""``reloadpg standins run`` reports uses of released communicators, in its output and exit code."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from cli.cli_process import command

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

PROGRAM = """
import ctypes, sys, torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1).cuda())
pointer = dist.group.WORLD._get_backend(torch.device("cuda"))._comm_ptr()

def size():
    ctypes.CDLL(None).ncclCommCount(ctypes.c_void_p(pointer), ctypes.byref(ctypes.c_int()))

if sys.argv[1] == "before":
    size()
dist.destroy_process_group()
if sys.argv[1] == "after":
    size()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("use", "ends", "code"), [("before", 0, 0), ("after", 0, 1), ("after", 3, 3)]
)
def test_a_use_after_release_is_reported(use: str, ends: int, code: int) -> None:
    """With exit code 1, unless the program has failed with another one."""
    run = command("standins", "run", "--", sys.executable, "-c", PROGRAM, use, str(ends), RANK="0")
    assert run.returncode == code, run.stderr
    text = "reloadpg standins: use after release: "
    found = [line for line in run.stderr.splitlines() if line.startswith(text)]
    assert len(found) == (use == "after")
    for line in found:
        pattern = r"rank 0, pid \d+: ncclCommCount uses communicator .* after its release"
        assert re.match(pattern, line.removeprefix(text))
