"""RELOADPG_NCCL: another NCCL's host code runs in addition to the stand-in, which moves the data.

A small library is in the place of NVIDIA's, which is not part of this repository. Where the
variable is given, ``tests/testing/test_standins_host.py``, ``tests/nccl`` and ``tests/gpu`` run
over NVIDIA's code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.nccl_job import ENGINES, MIB, engine_variables
from testing.nccl_calls import SUCCESS, Nccl, device_mib

from reloadpg.testing import run_ranks, standins

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]
SOURCE = Path(__file__).parents[1] / "helpers" / "host_code.cpp"


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library in the place of NVIDIA's."""
    library = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    folder = standins.build()
    names = (folder / "libraries").read_text().split()
    runtime = next(name for name in names if name.startswith("libcudart.so."))
    major = runtime.rpartition(".")[2]
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-w", f"-DCUDART_MAJOR={major}"]
    command += [f"-I{Path(standins.__file__).parent}", str(SOURCE), "-o", str(library)]
    subprocess.run([*command, f"-L{folder}", f"-l:{runtime}", "-ldl"], check=True, timeout=120)
    return str(library)


@pytest.fixture
def given(nccl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs use the library and log its calls."""
    monkeypatch.setenv(standins.NCCL, nccl)
    monkeypatch.setenv("HOST_CODE_LOG", str(tmp_path / "log"))


def called(rank: int) -> list[str]:
    """The calls since the last look."""
    path = Path(f"{os.environ['HOST_CODE_LOG']}.{rank}")
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def calls(rank: int, size: int) -> None:
    nccl = Nccl(rank, size)
    assert nccl.version() == 23099
    comm = nccl.connected()
    assert nccl.all_reduce(comm) == SUCCESS
    assert called(rank) == ["(", "all-reduce 1 type 7", ")"]  # the first one
    assert device_mib() == 2
    transfer = nccl.send if rank == 0 else nccl.recv
    for _ in range(2):
        assert transfer(comm, 1 - rank) == SUCCESS
    assert called(rank) == ["(", "send 1" if rank == 0 else "receive 0", ")"]
    assert nccl("CommSuspend", comm, 1) == SUCCESS
    assert standins.pinned_bytes() == 2 * MIB
    assert nccl("CommResume", comm) == SUCCESS
    assert standins.pinned_bytes() == 0
    assert nccl.memory_stat(comm, 2) == 1002
    assert nccl("CommFinalize", comm) == SUCCESS
    assert nccl("CommDestroy", comm) == SUCCESS
    assert nccl("CommAbort", nccl.create()) == SUCCESS
    assert called(rank) == ["suspend 1", "resume", "finalize", "destroy", "abort"]
    assert device_mib() == 0


@pytest.mark.usefixtures("given")
def test_calls_go_to_both() -> None:
    run_ranks(calls, 2, standins=True)


def configured(rank: int, size: int, blocking: bool) -> None:
    torch.cuda.set_device(rank)
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 2, 4
    options.config.split_share = 1
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device, pg_options=options)
    group = dist.new_group([0, 1])
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3
    found = called(rank)
    assert f"init blocking {int(blocking)} CTAs 2 4 share 1" in found
    assert any(line.startswith("split") for line in found)
    assert found[-3:] == ["(", "all-reduce 3 type 7", ")"]
    dist.destroy_process_group()
    assert called(rank).count("destroy") == 2
    assert device_mib() == 0


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "nonblocking"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_configuration_passes_through(engine: str, blocking: bool) -> None:
    variables = engine_variables(engine)
    if not blocking:
        if engine != ENGINES[0]:
            pytest.skip("this engine of torch creates blocking communicators")
        variables["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
    run_ranks(configured, 2, standins=True, env=variables, args=(blocking,))


def test_a_command_runs_over_the_given_library(nccl: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOST_CODE_LOG": str(tmp_path / "log"), "RANK": "0"}
    command = [sys.executable, "-m", "reloadpg", "standins", "run", "--nccl", nccl]
    done = subprocess.run(
        [*command, "--", "printenv", standins.NCCL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == nccl, done.stderr


def test_a_library_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Also one with a static CUDA runtime, as NVIDIA's own builds have."""
    with (
        pytest.raises(standins.StandinsError, match="is not a file"),
        standins.job(nccl=tmp_path / "none"),
    ):
        pass
    with (
        pytest.raises(standins.StandinsError, match="contains a static CUDA runtime"),
        standins.job(nccl=sys.executable),
    ):
        pass
