"""Interpreters that exit during an operation: exit codes, and finalizers without output."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch.distributed as dist

PRELUDE = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import reloadpg
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
if BACKEND == "sim":
    from reloadpg.testing import simulated
    simulated.register()
reloadpg.install(backends={BACKEND}, timeout=timedelta(seconds=BOUND))
dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
group = dist.new_group([0, 1])
dist.barrier()
"""

NOISE = ("Traceback", "Exception ignored", "terminate called", "Fatal", "exception not rethrown")


@dataclass
class Ended:
    code: int
    stderr: str
    stdout: str

    @property
    def printed(self) -> str:
        """The output of the script; on torch 2.8 gloo prints there, too."""
        lines = self.stdout.strip().splitlines()
        return "\n".join(line for line in lines if not line.startswith("[Gloo] Rank"))

    @property
    def noise(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if any(word in line for word in NOISE)]


def run_interpreters(body: str, bound: float = 120.0, backend: str = "gloo") -> list[Ended]:
    """Run a script in two fresh interpreters, the ranks of a job, until they exit.

    `bound` is the library's timeout in seconds.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        **os.environ,
        "MASTER_PORT": str(server.port),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    prelude = PRELUDE.replace("BOUND", str(bound)).replace("BACKEND", repr(backend))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", prelude + textwrap.dedent(body)],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=280) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [Ended(p.returncode, e, o) for p, (o, e) in zip(ranks, outputs, strict=True)]


def assert_quiet(ended: list[Ended], codes: list[int]) -> None:
    assert [(end.code, end.noise) for end in ended] == [(code, []) for code in codes], ended


@pytest.mark.slow
def test_cycles_cause_no_warning_of_torch() -> None:
    """Torch warns on stderr if the hooks of a group without a default backend are read."""
    body = """
    mixed = dist.new_group([0, 1], backend="cpu:gloo,cuda:gloo")
    for _ in range(2):
        for one in (group, mixed, dist.group.WORLD):
            one._managed.communicator._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)
        reloadpg.offload()
        reloadpg.reload()
    for one in (group, mixed):
        one._managed.communicator._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)
        dist.destroy_process_group(one)
    dist.destroy_process_group()
    """
    ended = run_interpreters(body)
    assert_quiet(ended, [0, 0])
    assert [one.stderr for one in ended if "hooks" in one.stderr] == []


@pytest.mark.parametrize(
    ("options", "operation"),
    [
        pytest.param("backends='gloo', min_size=1", "offload", marks=pytest.mark.slow),
        ("", "reload"),
    ],
)
def test_exit_with_groups_that_were_never_destroyed(options: str, operation: str) -> None:
    """They may be offloaded, or exist until the interpreter clears its modules."""
    body = f"""
    import torch.distributed as dist, reloadpg
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    reloadpg.install({options})
    group = dist.new_group([0])
    reloadpg.{operation}()
    assert reloadpg.status().state == {"offloaded" if options else "live"!r}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},  # or gloo prints if it cannot find the host
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_exit_while_a_thread_is_stuck_in_a_rebuild() -> None:
    """The rebuild has timed out and still blocks its thread; the interpreter exits."""
    ended = run_interpreters(
        """
        reloadpg.offload()
        if rank == 1:
            simulated.inject(simulated.Fault("create", "stall"))
        try:
            reloadpg.reload()
        except reloadpg.RendezvousTimeoutError as error:
            print("timed out")
        """,
        bound=5.0,
        backend="sim",
    )
    assert_quiet(ended, [0, 0])
    assert [end.printed for end in ended] == ["timed out"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["offload", "reload"])
def test_an_uncaught_exception_in_a_callback(operation: str) -> None:
    """All interpreters exit with code 1 and a traceback."""
    ended = run_interpreters(
        f"""
        def fail():
            if rank == 1:
                raise ValueError("a step failed")
        reloadpg.on_{operation}(fail)
        reloadpg.offload()
        reloadpg.reload()
        """
    )
    assert [end.code for end in ended] == [1, 1]
    assert "PeerFailedError" in ended[0].stderr
    assert "ValueError: a step failed" in ended[0].stderr
    assert "ValueError: a step failed" in ended[1].stderr
    # A chained traceback has two heads; the other rank has one.
    assert [len(end.noise) for end in ended] == [1, 2], ended


@pytest.mark.slow
def test_the_interpreter_exits_after_its_pending_operation() -> None:
    """The exit code is that of the program."""
    ended = run_interpreters(
        """
        import atexit, threading
        atexit.register(lambda: print(reloadpg.status().state))
        reloadpg.offload()
        reloadpg.on_reload(threading.main_thread().join, before=True)
        reloadpg.on_report(lambda report: print(report.operation, repr(report.error), flush=True))
        pending = reloadpg.reload(wait=False)
        sys.exit(3 * rank)
        """
    )
    assert_quiet(ended, [0, 3])
    if sys.version_info[:2] == (3, 12):  # starts no thread once the main program has ended
        assert all("can't create new thread at interpreter" in end.printed for end in ended)
    else:
        assert [end.printed for end in ended] == ["reload ''\nlive"] * 2
