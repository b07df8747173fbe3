"""Torch's flight recorder writes its dump at a timeout, before and after reloads."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import eventually
from helpers.nccl_job import ENGINES, Meetings, engine_variables, start, summed
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

SIZE = 2
SHORT = timedelta(seconds=3)
"""The timeout of the collective that one rank does not call."""
RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "100",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "30000",  # torch ends the process after 2 minutes
}


def hang(rank: int, world_size: int, dump: str, engine: str, reloads: int) -> list[str]:
    """Run a collective that the last rank does not call; return what the dump of this rank has."""
    start(rank)
    meetings = Meetings(world_size)
    assert summed(None, rank) == 3.0
    for _ in range(reloads):
        reloadpg.offload()
        reloadpg.reload(connect="eager")
    meetings.meet()
    dist.distributed_c10d._set_pg_timeout(SHORT, dist.group.WORLD)
    if rank == 0:
        dist.all_reduce(torch.ones(7).cuda(), async_op=True)
    entries = []
    if rank == 0 or engine == "legacy":  # the newer engine notifies no other rank
        own = Path(f"{dump}{rank}")
        assert eventually(lambda: complete(own)), "no dump was written"
        entries = pickle.loads(own.read_bytes())["entries"]
    meetings.meet()
    return [f"{one['input_sizes']} {one['state']}" for one in entries]


def complete(path: Path) -> bool:
    """Whether a dump was written to its end."""
    return path.exists() and path.read_bytes().endswith(pickle.STOP)


def default_prefix(home: Path) -> str:
    """Where this torch writes its dumps, if no variable names a file."""
    old = TorchVersion(torch.__version__) < "2.9"
    return str(home / ".cache/torch" / ("nccl_trace_rank_" if old else "comm_lib_trace_rank_"))


@pytest.mark.parametrize("reloads", [0, 1, 2])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_dump_is_written_at_a_timeout(
    engine: str, named: bool, reloads: int, tmp_path: Path
) -> None:
    """To the file that torch writes before the first reload, on each rank (failure 46)."""
    dump = str(tmp_path / "trace_") if named else default_prefix(tmp_path)
    variables = {"TORCH_FR_DUMP_TEMP_FILE": dump if named else None, "HOME": str(tmp_path)}
    found = run_ranks(
        hang,
        SIZE,
        args=(dump, engine, reloads),
        timeout=100,
        standins=True,
        env={**engine_variables(engine), **RECORDER, **variables, "XDG_CACHE_HOME": None},
    )
    assert any("[[7]]" in entry and "completed" not in entry for entry in found[0])
    assert not any("[[7]]" in entry for entry in found[1])
