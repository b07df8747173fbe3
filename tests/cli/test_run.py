"""``reloadpg run`` restarts a rank that was killed, while the others continue."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.launching import clean_environment

PROGRAM = """
import os, signal, sys
import torch
import torch.distributed as dist
import reloadpg

reloadpg.install(backends={"gloo"}, recoverable=True, timeout=120)
dist.init_process_group("gloo")
rejoined = reloadpg.recovery.rejoin().changed
rank = dist.get_rank()
torch.manual_seed(rejoined)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Linear(4, 4), init_sync=False, find_unused_parameters=True
)
optimizer = torch.optim.AdamW(model.parameters())
for step in reloadpg.recovery.retrying(range(4), state=(model, optimizer), timeout=120):
    with step as number:
        if sys.argv[1] == "error" and number == 2:
            raise ValueError("of the program")
        model(torch.full((2, 4), float(rank + number))).sum().backward()
        if (sys.argv[1], rank, number, rejoined) == ("kill", 2, 2, False):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
total = sum(parameter.double().sum().item() for parameter in model.parameters())
# One write, as all ranks have one pipe, and with -u print() writes the newline separately.
line = f"rank {rank} rejoined {rejoined} steps {number + 1} total {total!r}\\n"
print(line, end="", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def started(*words: str, interface: str = "lo", before: tuple[str, ...] = ()) -> subprocess.Popen:
    """Start the command in a separate process group."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", "reloadpg", "run", *words],
        env={**clean_environment(), "GLOO_SOCKET_IFNAME": interface},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(*launchers: subprocess.Popen) -> tuple[list[int], str]:
    """Wait for commands; return exit codes and output. No process is left."""
    output = ""
    try:
        for one in launchers:
            output += one.communicate(timeout=240)[0]
    finally:
        for one in launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
    return [one.returncode for one in launchers], output


def totals(output: str) -> set[str]:
    """The sums of weights that the ranks printed."""
    return {line.split("total ")[1] for line in output.splitlines() if "total " in line}


@pytest.mark.matrix  # what the command reads in the store depends on torch
@pytest.mark.slow
def test_a_killed_rank_is_restarted(program: Path, tmp_path: Path) -> None:
    """With the state of the others. The weights equal those of a run without a kill."""
    options = ("--nproc-per-node=4", "--master-port=0", f"--log-dir={tmp_path / 'logs'}")
    codes, output = ended(started(*options, str(program), "kill"))
    assert codes == [0], output
    assert "rank 2 ended with SIGKILL; restart 1 of 3" in output
    assert "before it was in a recoverable job" not in output
    assert output.count("rejoined True") == 1
    assert output.count("steps 4") == 4
    assert len([*(tmp_path / "logs").glob("rank-2/*/**/stdout.log")]) == 2
    codes, without = ended(started("--nproc-per-node=4", "--master-port=0", str(program), "none"))
    assert codes == [0], without
    assert totals(output) == totals(without)
    assert len(totals(output)) == 1


@pytest.mark.slow
def test_a_job_that_cannot_continue_ends(program: Path) -> None:
    """All initial processes have raised, or no restart is left."""
    options = ("--nproc-per-node=2", "--master-port=0", "--max-restarts=9")
    codes, output = ended(started(*options, str(program), "error"))
    assert codes == [1], output
    assert "after all others had ended" in output
    assert "before it was in a recoverable job" not in output
    codes, output = ended(started(*options, "--max-restarts=0", str(program), "error"))
    assert codes == [1], output
    assert "has used its 0 restarts (--max-restarts)" in output


SHARDED = """
import os, signal
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import reloadpg

reloadpg.install(backends={"gloo"}, recoverable=True, timeout=120)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
rejoined = reloadpg.recovery.rejoin().changed
for step in reloadpg.recovery.retrying(range(4), state=(model,), timeout=120):
    with step as number:
        model(torch.ones(2, 4)).sum().backward()
        if (dist.get_rank(), number, rejoined) == (1, 2, False):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_job_whose_sharded_state_is_lost_ends(tmp_path: Path) -> None:
    """After one restart, as no process has the shard."""
    path = tmp_path / "program.py"
    path.write_text(SHARDED)
    options = ("--nproc-per-node=2", "--master-port=0", "--max-restarts=9")
    codes, output = ended(started(*options, str(path)))
    assert codes == [1], output
    assert "reloadpg run: ended: the state of rank 1 was lost with its process" in output
    assert "restart 1 of 9" in output
    assert "restart 2 of 9" not in output


@pytest.mark.slow
def test_a_program_that_is_not_recoverable_is_reported_once(tmp_path: Path) -> None:
    """With the missing call."""
    path = tmp_path / "program.py"
    path.write_text("raise SystemExit(3)")
    codes, output = ended(started("--master-port=0", "--max-restarts=1", str(path)))
    assert codes == [1], output
    assert output.count("rank 0 ended before it was in a recoverable job, so it cannot") == 1


LATE = """
import os, pathlib, sys, time
noted = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    noted.with_suffix(".new").write_text(str(os.getpid()))
    noted.with_suffix(".new").rename(noted)
    sys.exit(0)
while not noted.exists() or os.path.exists(f"/proc/{noted.read_text()}"):
    time.sleep(0.01)
sys.exit(3)
"""


@pytest.mark.slow
def test_no_rank_is_restarted_after_others_have_completed(tmp_path: Path) -> None:
    """A new process could not meet them."""
    path = tmp_path / "program.py"
    path.write_text(LATE)
    options = ("--nproc-per-node=2", "--master-port=0")
    codes, output = ended(started(*options, str(path), str(tmp_path / "noted")))
    assert codes == [1], output
    assert "rank 1 ended with exit code 3 after other ranks had completed" in output
    assert "restart" not in output


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, linked as 10.99.1.1 and 10.99.1.2."""
    if shutil.which("ip") is None or os.getuid():
        pytest.skip("network namespaces need root, and the program ip")
    names = [f"run{os.getpid()}{letter}" for letter in "ab"]

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
        if done.returncode:
            pytest.skip(f"no network namespaces here: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "net0", "type", "veth", "peer", "net0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"10.99.1.{number}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


@pytest.mark.slow
def test_a_killed_rank_on_the_second_host_is_restarted(program: Path, hosts: list[str]) -> None:
    """Two commands with one address; the store is on the first host."""
    launchers = [
        started(
            *("--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}"),
            *("--master-addr=10.99.1.1", "--master-port=29533", str(program), "kill"),
            interface="net0",
            before=("ip", "netns", "exec", name),
        )
        for number, name in enumerate(hosts)
    ]
    codes, output = ended(*launchers)
    assert codes == [0, 0], output
    assert "rank 2 ended with SIGKILL; restart 1 of 3" in output
    assert len(totals(output)) == 1
    assert output.count("total ") == 4
