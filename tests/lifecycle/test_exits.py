"""Interpreters that end in the middle of things: exit codes, and not a word from finalizers."""

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
    def said(self) -> str:
        """What the script printed; on torch 2.8 gloo prints there, too."""
        lines = self.stdout.strip().splitlines()
        return "\n".join(line for line in lines if not line.startswith("[Gloo] Rank"))

    @property
    def noise(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if any(word in line for word in NOISE)]


def run_interpreters(body: str, bound: float = 120.0, backend: str = "gloo") -> list[Ended]:
    """Two fresh interpreters that run the same script as ranks of a job, to their natural end.

    `bound` is the library's, in seconds; only those that hang reach it.
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


def test_exit_while_offloaded() -> None:
    """An interpreter that ends while its groups are offloaded ends as any other."""
    assert_quiet(run_interpreters("reloadpg.offload()"), [0, 0])


@pytest.mark.slow
def test_cycles_make_torch_say_nothing() -> None:
    """Torch warns on stderr when a group without a default backend is asked for its hooks."""
    body = """
    mixed = dist.new_group([0, 1], backend="cpu:gloo,cuda:gloo")
    for _ in range(2):
        for one in (group, mixed, dist.group.WORLD):
            one.communicator._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)
        reloadpg.offload()
        reloadpg.reload()
    for one in (group, mixed):
        one.communicator._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)
        dist.destroy_process_group(one)
    dist.destroy_process_group()
    """
    ended = run_interpreters(body)
    assert_quiet(ended, [0, 0])
    assert [one.stderr for one in ended if "hooks" in one.stderr] == []


def test_exit_with_a_default_group_that_was_never_destroyed() -> None:
    """Also one that is not reloadable: it lives until the interpreter takes its modules apart."""
    body = """
    import torch.distributed as dist, reloadpg
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    reloadpg.install()
    reloadpg.reload()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},  # gloo says if it cannot find the host
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_destroy_while_offloaded() -> None:
    """destroy_process_group() accepts offloaded groups; the proxies are destroyed for good."""
    ended = run_interpreters(
        """
        reloadpg.offload()
        dist.destroy_process_group(group)
        world = dist.group.WORLD
        dist.destroy_process_group()
        print(group.state, world.state, reloadpg.offload().note, dist.is_initialized())
        """
    )
    assert_quiet(ended, [0, 0])
    said = "destroyed destroyed torch.distributed is not initialized False"
    assert [end.said for end in ended] == [said] * 2


@pytest.mark.slow
def test_exit_with_a_worker_that_is_stuck() -> None:
    """A rebuild that was given up blocks its thread; the interpreter ends all the same."""
    ended = run_interpreters(
        """
        reloadpg.offload()
        if rank == 1:
            simulated.inject(simulated.Fault("create", "stall"))
        try:
            reloadpg.reload()
        except reloadpg.RendezvousTimeoutError as error:
            print("gave up")
        """,
        bound=5.0,
        backend="sim",
    )
    assert_quiet(ended, [0, 0])
    assert [end.said for end in ended] == ["gave up"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["offload", "reload"])
def test_an_exception_in_the_middle_of_a_step(operation: str) -> None:
    """Uncaught, it ends the interpreter with code 1 and its own traceback, on all ranks."""
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
def test_sigterm_in_the_middle_of_a_step() -> None:
    """With a handler that exits, the rank ends with that code and the other is told."""
    ended = run_interpreters(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        reloadpg.on_reload(lambda: rank == 1 and os.kill(os.getpid(), signal.SIGTERM))
        reloadpg.offload()
        try:
            reloadpg.reload()
        except reloadpg.PeerFailedError as error:
            print(error.rank, "SystemExit: 143" in str(error))
        """
    )
    assert_quiet(ended, [0, 143])
    assert ended[0].said == "1 True"


@pytest.mark.slow
def test_interrupt_while_waiting_at_a_barrier() -> None:
    """Ctrl-C reaches a rank that waits for others inside the store."""
    ended = run_interpreters(
        """
        import threading
        reloadpg.offload()
        if rank == 0:
            def interrupt_when_waiting():
                while (running := reloadpg.status().running) is None or not running.waiting:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGALRM)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            begun = time.monotonic()
            try:
                threading.Thread(target=interrupt_when_waiting, daemon=True).start()
                reloadpg.reload()
            except KeyboardInterrupt:
                print(time.monotonic() - begun < 60)
        else:
            store.wait(["interrupted"], timedelta(seconds=100))
            try:
                reloadpg.reload()
            except reloadpg.PeerFailedError as error:
                print("KeyboardInterrupt" in str(error))
        store.set("interrupted", "1")
        """
    )
    assert_quiet(ended, [0, 0])
    assert [end.said for end in ended] == ["True", "True"]


@pytest.mark.slow
def test_the_interpreter_ends_when_the_operation_has() -> None:
    """With its own exit code; the operation completes, as on the ranks that wait for it."""
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
    assert [end.said for end in ended] == ["reload ''\nlive"] * 2
