"""`run_ranks`: real ranks, what they see, how their failures are told, and that nothing stays."""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import reloadpg.errors
from reloadpg.testing import RankOutcome, RanksFailedError, _rank_pool, run_ranks

distributed: Any = torch.distributed  # whose stores are not exported as types
ROOT = str(Path(reloadpg.errors.__file__).parents[1])
START_METHODS = ["forkserver", "spawn"]
STORES = ["parent", "rank0"]
LIMIT = 60.0
"""Seconds within which anything in this file must have happened."""


def wait_gone(pids: list[int], limit: float = LIMIT) -> None:
    """Block until none of the processes exists; fail after `limit` seconds."""
    deadline = time.monotonic() + limit
    for pid in pids:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                ready = select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]
            finally:
                os.close(fd)
            assert ready, f"process {pid} is still there"


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Reports:
    """A FIFO on which processes of any parentage report one line each."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDWR)
        self._buffer = b""

    def read(self, count: int) -> list[list[int]]:
        deadline = time.monotonic() + LIMIT
        while self._buffer.count(b"\n") < count:
            remaining = max(deadline - time.monotonic(), 0)
            assert select.select([self._fd], [], [], remaining)[0], self._buffer
            self._buffer += os.read(self._fd, 4096)
        *lines, self._buffer = self._buffer.split(b"\n")
        return [[int(word) for word in line.split()] for line in lines]

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    fifo = Reports(tmp_path / "fifo")
    yield fifo
    fifo.close()


def report(path: str, *numbers: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, (" ".join(map(str, numbers)) + "\n").encode())
    os.close(fd)


def rest() -> None:
    """Do nothing until killed, whatever can be ignored being ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1000)


def daemon_grandchild() -> int:
    """Start a process that leaves session, group and parent behind; return its pid."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            rest()
        os.write(write, str(pid).encode())
        os._exit(0)
    return int(os.read(read, 100))


# ----- functions that run as ranks


def describe(rank: int, world_size: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return rank, world_size, args, kwargs, os.getpid()


def environment(rank: int, world_size: int) -> dict[str, str]:
    return dict(os.environ)


def reduce_ranks(rank: int, world_size: int) -> int:
    distributed.init_process_group("gloo")
    value = torch.tensor([rank + 1])
    distributed.all_reduce(value)
    distributed.destroy_process_group()
    return int(value)


def reduce_twice(rank: int, world_size: int, closed: str) -> list[int]:
    first = reduce_ranks(rank, world_size)
    # Rank 0 hosts the store. A rank that is quicker would connect to the one that is going away.
    if rank == 0:
        Path(closed).touch()
    while not Path(closed).exists():
        time.sleep(0.01)
    return [first, reduce_ranks(rank, world_size)]


def threads_and_cpu(rank: int, world_size: int) -> tuple[int, float]:
    return torch.get_num_threads(), time.process_time()


def hash_randomized(rank: int, world_size: int) -> int:
    return sys.flags.hash_randomization


def hang_in_rank_1(rank: int, world_size: int) -> None:
    while rank == 1:
        time.sleep(1)


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    def __hash__(self) -> int:
        return self.x


def move(rank: int, world_size: int, point: Point) -> tuple[Point, torch.Tensor]:
    return Point(point.x + rank), torch.full((3,), float(rank))


def fail_in_turn(rank: int, world_size: int, fifo: str) -> None:
    """Rank 1 fails first; rank 0 sees it die and fails as a consequence; rank 2 waits."""
    distributed.init_process_group("gloo")
    store = distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        store.wait(["watched"])
        raise ValueError("the cause")
    if rank == 0:
        fd = os.pidfd_open(int(store.get("pid")))
        store.set("watched", "")
        select.select([fd], [], [])
        raise OSError("the consequence")
    store.wait(["never"])


def end_by(rank: int, world_size: int, how: str) -> Any:
    print("said before", flush=False)
    if how == "returns lambda":
        return lambda: None
    if rank != world_size - 1:
        return "fine"
    ways: dict[str, Callable[[], Any]] = {
        "raise": lambda: 1 / 0,
        "os._exit(3)": lambda: os._exit(3),
        "os._exit(0)": lambda: os._exit(0),
        "sys.exit(4)": lambda: sys.exit(4),
        "sys.exit(0)": lambda: sys.exit(0),
        "sys.exit(text)": lambda: sys.exit("some text"),
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "null pointer": lambda: ctypes.string_at(0),
        "SIGRTMIN+5": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 5),
    }
    ways[how]()
    raise AssertionError("still here")


def kill_rank_1(rank: int, world_size: int) -> str:
    store = distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        rest()
    pid = int(store.get("pid"))
    os.kill(pid, signal.SIGKILL)
    wait_gone([pid])
    return "survived"


def store_after_rank_0(rank: int, world_size: int) -> bool:
    """Whether the store still answers when rank 0 has been killed."""
    distributed.init_process_group("gloo")
    store = distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("pid", str(os.getpid()))
        rest()
    pid = int(store.get("pid"))
    os.kill(pid, signal.SIGKILL)
    wait_gone([pid])
    try:
        store.set("key", "value")
        return bool(store.get("key") == b"value")
    except distributed.DistError:
        return False


def hang(rank: int, world_size: int) -> None:
    if rank == 0:
        return
    helper = threading.Thread(target=wait_in_helper, daemon=True)
    helper.start()
    wait_in_main(helper)


def wait_in_main(helper: threading.Thread) -> None:
    helper.join()


def wait_in_helper() -> None:
    threading.Event().wait()


def leave_grandchildren(rank: int, world_size: int, fifo: str, then_hang: bool) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    report(fifo, os.getpid(), child.pid, daemon_grandchild())
    if then_hang:
        rest()


def kill_supervisor(rank: int, world_size: int, fifo: str, server_too: bool) -> None:
    store = distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    report(fifo, os.getpid(), daemon_grandchild())
    if rank == 0:
        store.set("reported", "")
    else:
        store.wait(["reported"])
        if server_too:
            server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(server), signal.SIGKILL)
        os.kill(os.getppid(), signal.SIGKILL)
    rest()


def chat(rank: int, world_size: int) -> None:
    print("from python")
    print("to stderr", file=sys.stderr)
    subprocess.run(["echo", "from a child"], check=True)
    raise ValueError("now look at the output")


def nested(rank: int, world_size: int) -> list[int]:
    return run_ranks(reduce_ranks, 2, timeout=LIMIT)


def wait_for_ever(rank: int, world_size: int) -> None:
    rest()


def stay_after_return(rank: int, world_size: int, fifo: str) -> str:
    """Rank 0 returns, but its process waits for a thread; rank 1 fails then."""
    if rank == 1:
        with open(fifo) as file:
            raise ValueError(file.readline())
    threading.Thread(target=wait_in_helper).start()
    report(fifo, 1)
    return "returned"


# ----- what ranks see


@pytest.mark.parametrize("start_method", [None, *START_METHODS])
def test_results_come_in_rank_order_from_separate_processes(start_method: Any) -> None:
    """Each rank gets (rank, world_size, *args, **kwargs) in a process of its own."""
    results = run_ranks(
        describe, 3, args=("a", 2), kwargs={"key": [1]}, start_method=start_method, timeout=LIMIT
    )
    assert [result[:4] for result in results] == [
        (rank, 3, ("a", 2), {"key": [1]}) for rank in range(3)
    ]
    assert len({os.getpid(), *(result[4] for result in results)}) == 4


@pytest.mark.parametrize("start_method", START_METHODS)
def test_environment_of_a_rank(start_method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks see the caller's current environment, but not the job that the caller runs in."""
    monkeypatch.setenv("OF_THE_CALLER", "yes")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    seen = run_ranks(
        environment,
        2,
        start_method=start_method,
        env={"ADDED": "1", "OMP_NUM_THREADS": "3", "GROUP_RANK": None, "LOCAL_RANK": "9"},
        timeout=LIMIT,
    )
    for rank, environ in enumerate(seen):
        assert environ["OF_THE_CALLER"] == "yes"
        assert (environ["RANK"], environ["WORLD_SIZE"]) == (str(rank), "2")
        assert (environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"]) == ("9", "2")
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert (environ["ADDED"], environ["OMP_NUM_THREADS"]) == ("1", "3")
        assert "GROUP_RANK" not in environ
        assert "TORCHELASTIC_RUN_ID" not in environ
        ours = [name for name in environ if name.startswith(("RELOADPG_", "PYTHONSAFE"))]
        assert not [name for name in ours if name not in os.environ]
    monkeypatch.delenv("OF_THE_CALLER")
    assert "OF_THE_CALLER" not in run_ranks(environment, 1, start_method=start_method)[0]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("start_method", START_METHODS)
def test_init_process_group_just_works(start_method: Any, store: Any) -> None:
    """`init_process_group("gloo")` without arguments connects the ranks of the run."""
    results = run_ranks(reduce_ranks, 2, start_method=start_method, store=store, timeout=LIMIT)
    assert results == [3, 3]


def leave_at_once(rank: int, world_size: int, fate: str, returned: str) -> list[str]:
    """Rank 0 returns; the others look whether its process is there, and go on as they are told."""
    marker, looked = Path(returned), Path(f"{returned}.looked")
    if rank == 0:
        marker.write_text(str(os.getpid()))
        return []
    while not marker.exists() or not marker.read_text():
        time.sleep(0.01)
    process = Path(f"/proc/{marker.read_text()}")
    if rank == 1:
        while not looked.exists():
            time.sleep(0.01)
        if fate == "raise":
            raise ValueError("on purpose")
        if fate == "die":
            os._exit(3)
        return []
    time.sleep(0.3)  # rank 0 would be gone by now
    left = [] if process.exists() else ["gone"]
    looked.touch()
    while fate != "return" and process.exists():
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("fate", ["return", "raise", "die"])
def test_a_rank_that_has_returned_stays_for_the_others(
    fate: str, start_method: Any, tmp_path: Path
) -> None:
    """Its connections are there until all have returned; or one has failed, and then it ends."""
    outcomes = run_ranks(
        leave_at_once,
        3,
        args=(fate, str(tmp_path / "returned")),
        start_method=start_method,
        timeout=LIMIT,
        check=False,
    )
    assert [outcome.ok for outcome in outcomes] == [True, fate == "return", True]
    assert outcomes[2].result == []
    assert not any(outcome.timed_out or outcome.ended for outcome in outcomes)


def test_ranks_that_stay_do_not_count_as_hung(tmp_path: Path) -> None:
    """At the time limit only those are named that have not returned."""
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(hang_in_rank_1, 3, timeout=3)
    assert [outcome.ok for outcome in failed.value.outcomes] == [True, False, True]
    assert failed.value.outcomes[1].timed_out
    assert "1 of 3 ranks failed" in str(failed.value)


def test_groups_can_be_initialised_again_with_the_store_in_rank_0(tmp_path: Path) -> None:
    """With `store="rank0"` the store dies with the group, so a second one reads no old keys."""
    closed = (str(tmp_path / "closed"),)
    results = run_ranks(reduce_twice, 2, args=closed, store="rank0", timeout=LIMIT)
    assert results == [[3, 3], [3, 3]]


@pytest.mark.parametrize("store", STORES)
def test_concurrent_runs_do_not_meet(store: Any) -> None:
    """Runs at the same time have ports of their own: each reduces over its own ranks only."""
    sizes = [2, 3, 2, 3, 2, 3, 2, 3]
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda n: run_ranks(reduce_ranks, n, store=store, timeout=LIMIT), sizes)
        )
    assert results == [[n * (n + 1) // 2] * n for n in sizes]


@pytest.mark.parametrize(("store", "answers"), [("parent", True), ("rank0", False)])
def test_who_hosts_the_store(store: Any, answers: bool) -> None:
    """A store in the parent survives rank 0's death; a store in rank 0 does not."""
    outcomes = run_ranks(store_after_rank_0, 2, store=store, check=False, timeout=LIMIT)
    assert outcomes[0].signal == signal.SIGKILL
    assert outcomes[1].exception is None
    assert outcomes[1].result is answers


def test_port_of_the_store_in_rank_0_is_reserved() -> None:
    """While a run with `store="rank0"` lasts, another process cannot listen on its port."""
    port = int(run_ranks(try_to_listen, 1, store="rank0", timeout=LIMIT)[0])
    with socket.socket() as free:  # and afterwards it is free again
        free.bind(("", port))


def try_to_listen(rank: int, world_size: int) -> str:
    port = int(os.environ["MASTER_PORT"])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    return str(port)


def test_forkserver_ranks_are_cheap_and_single_threaded() -> None:
    """A forked rank computes on one thread, and has not paid for importing torch."""
    fresh = run_ranks(threads_and_cpu, 1, start_method="spawn", timeout=LIMIT)[0]
    forked = run_ranks(threads_and_cpu, 1, start_method="forkserver", timeout=LIMIT)[0]
    assert (fresh[0], forked[0]) == (1, 1)
    assert forked[1] < fresh[1] / 4


def test_server_has_no_threads() -> None:
    """The process that ranks are forked from has a single thread: fork copies only one."""
    assert _rank_pool.POOL.server_facts("forkserver")["threads"] == 1


def test_spawn_gives_a_fresh_interpreter() -> None:
    """Variables that only an interpreter start reads take effect with `spawn`."""
    env = {"PYTHONHASHSEED": "0"}
    assert run_ranks(hash_randomized, 1, env=env, start_method="spawn", timeout=LIMIT) == [0]
    assert run_ranks(hash_randomized, 1, start_method="spawn", timeout=LIMIT) == [1]


@pytest.mark.parametrize("start_method", START_METHODS)
def test_arguments_and_results_of_any_picklable_type(start_method: Any) -> None:
    """Classes of the test module and CPU tensors travel in both directions."""
    results = run_ranks(move, 2, args=(Point(5),), start_method=start_method, timeout=LIMIT)
    assert [result[0] for result in results] == [Point(5), Point(6)]
    assert torch.equal(results[1][1], torch.ones(3))


def test_a_rank_can_run_ranks() -> None:
    """`run_ranks` works inside a rank."""
    assert run_ranks(nested, 1, timeout=LIMIT) == [[3, 3]]


# ----- failures


def test_first_failure_comes_first_with_its_traceback(reports: Reports) -> None:
    """The error shows the rank that failed first on top, then consequences, then the hung."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(fail_in_turn, 3, args=(reports.path,), timeout=LIMIT)
    message = str(caught.value)
    first, second, third = (message.index(f"===== rank {rank}:") for rank in (1, 0, 2))
    assert first < message.index("first failure") < message.index("ValueError: the cause") < second
    assert "in fail_in_turn" in message[first:second]
    assert "_rank_process.py" not in message
    assert second < message.index("OSError: the consequence") < third
    assert "still running 1 s after the first failure" in message[third:]
    assert "in fail_in_turn" in message[third:]
    assert [outcome.ok for outcome in caught.value.outcomes] == [False] * 3
    assert not [o.pid for o in caught.value.outcomes if o.pid is None or exists(o.pid)]


WAYS_TO_END: list[tuple[str, int | None, int | None, str]] = [
    ("raise", 1, None, "ZeroDivisionError: division by zero"),
    ("os._exit(3)", 3, None, "exited with code 3 before the function returned"),
    ("os._exit(0)", 0, None, "exited with code 0 before the function returned"),
    ("sys.exit(4)", 4, None, "SystemExit: 4"),
    ("sys.exit(0)", 0, None, "SystemExit: 0"),
    ("sys.exit(text)", 1, None, "SystemExit: some text"),
    ("SIGKILL", None, signal.SIGKILL, "killed by SIGKILL"),
    ("SIGSEGV", None, signal.SIGSEGV, "killed by SIGSEGV"),
    ("null pointer", None, signal.SIGSEGV, "killed by SIGSEGV"),
    ("SIGRTMIN+5", None, signal.SIGRTMIN + 5, "killed by signal 39"),
    ("returns lambda", 1, None, "its result of type function cannot be pickled"),
]


@pytest.mark.parametrize(
    ("how", "exitcode", "number", "text", "start_method"),
    [(*way, "forkserver") for way in WAYS_TO_END]
    + [(*way, "spawn") for way in WAYS_TO_END if way[0] in ("raise", "sys.exit(0)", "SIGSEGV")],
)
def test_every_way_to_end_is_told(
    how: str, exitcode: int | None, number: int | None, text: str, start_method: Any
) -> None:
    """Exit code, signal and reason are those of the rank; a missing result is never success."""
    world_size = 1 if start_method == "spawn" else 2
    with pytest.raises(RanksFailedError, match="no process is left") as caught:
        run_ranks(end_by, world_size, args=(how,), start_method=start_method, timeout=LIMIT)
    outcome = caught.value.outcomes[-1]
    assert (outcome.exitcode, outcome.signal) == (exitcode, number)
    assert outcome.exception is not None
    assert text in outcome.exception
    assert not outcome.ok
    assert not outcome.timed_out
    assert text in str(caught.value)
    assert outcome.output.startswith("said before\n")
    if number == signal.SIGSEGV:
        assert "in end_by" in outcome.output  # faulthandler's traceback


def test_unchecked_outcomes_let_the_others_go_on() -> None:
    """With `check=False` a killed rank is an outcome, and the surviving rank finishes."""
    outcomes: list[RankOutcome] = run_ranks(kill_rank_1, 2, check=False, timeout=LIMIT)
    assert (outcomes[0].ok, outcomes[0].result) == (True, "survived")
    assert (outcomes[0].exitcode, outcomes[0].signal) == (0, None)
    assert (outcomes[1].ok, outcomes[1].result) == (False, None)
    assert (outcomes[1].exitcode, outcomes[1].signal) == (None, signal.SIGKILL)
    assert not outcomes[1].timed_out


@pytest.mark.parametrize("check", [True, False])
def test_ranks_that_hang_show_their_python_stacks(check: bool) -> None:
    """At the time limit the stacks of all threads of the running ranks are in the report."""
    started = time.monotonic()
    if check:
        with pytest.raises(RanksFailedError, match="at the time limit of 3 s") as caught:
            run_ranks(hang, 3, timeout=3)
        message, outcomes = str(caught.value), caught.value.outcomes
        assert message.count("in wait_in_main") == 2
        assert message.count("in wait_in_helper") == 2
        assert "===== rank 0" not in message
    else:
        outcomes = run_ranks(hang, 3, timeout=3, check=False)
    assert time.monotonic() - started < 30
    assert [outcome.timed_out for outcome in outcomes] == [False, True, True]
    assert outcomes[0].ok
    assert outcomes[0].stack is None
    for outcome in outcomes[1:]:
        assert outcome.stack is not None
        assert "in wait_in_main" in outcome.stack
        assert "in wait_in_helper" in outcome.stack
        assert "_rank_server.py" not in outcome.stack
        assert outcome.signal == signal.SIGKILL
        assert outcome.pid is not None
        assert not exists(outcome.pid)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_time_limit_before_the_ranks_are_up(start_method: Any) -> None:
    """Ranks that are still starting at the time limit count as hung, without stacks."""
    outcomes = run_ranks(wait_for_ever, 2, start_method=start_method, timeout=1e-6, check=False)
    assert [(o.timed_out, o.signal) for o in outcomes] == [(True, signal.SIGKILL)] * 2


def test_a_process_that_does_not_end_after_its_function_is_told(reports: Reports) -> None:
    """A fresh interpreter that waits for a thread after the function returned has failed."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(stay_after_return, 2, args=(reports.path,), start_method="spawn", timeout=LIMIT)
    outcome = caught.value.outcomes[0]
    assert outcome.exception is not None
    assert "the function had returned, but the process was still running" in outcome.exception
    assert "in wait_in_helper" in str(outcome.stack)


def test_output_is_in_the_error_and_nowhere_else(capfd: pytest.CaptureFixture[str]) -> None:
    """What ranks and their children print is captured and shown with the failure."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(chat, 1, timeout=LIMIT)
    lines = str(caught.value).splitlines()
    assert lines[-3:] == ["from python", "to stderr", "from a child"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"world_size": 0}, ValueError, "world_size must be at least 1"),
        ({"timeout": 0}, ValueError, "timeout must be positive"),
        ({"timeout": float("nan")}, ValueError, "timeout must be positive"),
        ({"start_method": "fork"}, ValueError, "start_method must be"),
        ({"store": "rank1"}, ValueError, "store must be"),
        ({"fn": lambda rank, world_size: None}, TypeError, "fn cannot be pickled"),
        ({"fn": 3}, TypeError, "fn must be callable"),
        ({"args": (threading.Lock(),)}, TypeError, "args cannot be pickled"),
        ({"kwargs": {"f": lambda: None}}, TypeError, "kwargs cannot be pickled"),
    ],
)
def test_wrong_arguments_start_nothing(
    arguments: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments that cannot work are refused before any process or server is started."""
    monkeypatch.setattr(_rank_pool.RankPool, "open_job", lambda *_: pytest.fail("started"))
    with pytest.raises(error, match=text):
        run_ranks(**{"fn": describe, "world_size": 1, **arguments})


# ----- nothing is left behind


@pytest.mark.parametrize(
    ("start_method", "then_hang"), [("forkserver", False), ("forkserver", True), ("spawn", False)]
)
def test_grandchildren_end_with_the_run(
    reports: Reports, start_method: Any, then_hang: bool
) -> None:
    """Children of ranks are gone after the run, even daemons in sessions of their own."""
    args = (reports.path, then_hang)
    timeout = 4 if then_hang else LIMIT
    with pytest.raises(RanksFailedError, match="time limit") if then_hang else nullcontext():
        run_ranks(leave_grandchildren, 2, args=args, timeout=timeout, start_method=start_method)
    pids = [pid for line in reports.read(2) for pid in line]
    assert len(pids) == 6
    assert [pid for pid in pids if exists(pid)] == []


def test_job_directories_and_descriptors_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After runs that succeed or fail, this process and the server hold what they held before."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_ranks(describe, 1, timeout=LIMIT)
    pid = _rank_pool.POOL.server_facts("forkserver")["pid"]

    def held() -> tuple[int, int, list[Path]]:
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir(f"/proc/{pid}/fd")),
            list(tmp_path.iterdir()),
        )

    before = held()
    assert before[2] == []
    for _ in range(3):
        run_ranks(describe, 2, store="rank0", timeout=LIMIT)
        run_ranks(describe, 2, store="parent", timeout=LIMIT)
        with pytest.raises(RanksFailedError):
            run_ranks(end_by, 2, args=("SIGKILL",), timeout=LIMIT)
    deadline = time.monotonic() + LIMIT
    while held() != before:  # the server may still be closing its copy of the last socket
        assert time.monotonic() < deadline, (before, held())


def test_killed_supervisor_takes_its_ranks_along(reports: Reports) -> None:
    """If the process between server and ranks is killed, the run fails and leaves nothing."""
    with pytest.raises(RanksFailedError, match="lost: the process that supervises the ranks"):
        run_ranks(kill_supervisor, 2, args=(reports.path, False), timeout=LIMIT)
    wait_gone([pid for line in reports.read(2) for pid in line])
    assert run_ranks(reduce_ranks, 2, timeout=LIMIT) == [3, 3]


def test_ranks_end_when_server_and_supervisor_are_killed(reports: Reports) -> None:
    """Ranks do not outlive their supervisor when the server cannot clean up after it either."""
    with pytest.raises(RanksFailedError, match="lost: the process that supervises the ranks"):
        run_ranks(kill_supervisor, 2, args=(reports.path, True), timeout=LIMIT)
    pids = reports.read(2)
    try:
        wait_gone([rank for rank, _ in pids])
    finally:
        for _, grandchild in pids:  # the documented limit: these have lost everyone
            with suppress(ProcessLookupError):
                os.kill(grandchild, signal.SIGKILL)
    assert run_ranks(reduce_ranks, 2, timeout=LIMIT) == [3, 3]


def test_killed_server_is_replaced() -> None:
    """A server that was killed between two runs is started again by the next one."""
    pid = _rank_pool.POOL.server_facts("forkserver")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_gone([pid])
    assert run_ranks(reduce_ranks, 2, timeout=LIMIT) == [3, 3]
    assert _rank_pool.POOL.server_facts("forkserver")["pid"] != pid


def start_script(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Run this file as a script, with a temporary directory of its own."""
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("start_method", "number"),
    [
        ("forkserver", signal.SIGKILL),
        ("forkserver", signal.SIGTERM),
        ("forkserver", signal.SIGINT),
        ("spawn", signal.SIGKILL),
    ],
)
def test_death_of_the_caller_ends_everything(
    tmp_path: Path, reports: Reports, start_method: str, number: int
) -> None:
    """Ranks, grandchildren, servers and files end with a caller that is killed or interrupted.

    The caller has also forked a child that holds copies of all its sockets and lives on.
    """
    with start_script(tmp_path, "hang", reports.path, start_method) as script:
        lines = reports.read(4)
        (bystander,) = (line[0] for line in lines if len(line) == 1)
        (server,) = (line[0] for line in lines if len(line) == 2)
        pids = [pid for line in lines if len(line) == 3 for pid in line]
        assert len(pids) == 6
        assert all(exists(pid) for pid in [*pids, server, bystander])
        try:
            script.send_signal(number)
            assert script.wait(LIMIT) == -number
            wait_gone([*pids, server])
            assert exists(bystander)
        finally:
            os.kill(bystander, signal.SIGKILL)
        if number == signal.SIGINT:
            assert script.stderr is not None
            assert b"KeyboardInterrupt" in script.stderr.read()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_forked_child_of_the_caller_has_servers_of_its_own(tmp_path: Path) -> None:
    """After `os.fork` both processes can run ranks."""
    with start_script(tmp_path, "fork") as script:
        _, errors = script.communicate(timeout=LIMIT)
        assert script.returncode == 0, errors.decode()


# ----- finding the function


def test_call_without_main_guard_is_refused_in_the_rank(tmp_path: Path) -> None:
    """A script that calls `run_ranks` at its top level gets an error, not a cascade of ranks."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from reloadpg.testing import run_ranks\n"
        "def fn(rank, world_size):\n    return rank\n"
        "run_ranks(fn, 1)\n"
    )
    done = run_python(str(script))
    assert done.returncode != 0
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_function_typed_into_an_interpreter_is_refused() -> None:
    """`python -c` has no file that ranks could import: a TypeError says so."""
    done = run_python(
        "-c",
        "from reloadpg.testing import run_ranks\n"
        "def fn(rank, world_size):\n    return rank\n"
        "run_ranks(fn, 1)\n",
    )
    assert "TypeError: fn or an argument is defined in an interactive __main__" in done.stderr


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with only the library, not the working directory, on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": ROOT, "PYTHONSAFEPATH": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_the_callers_module_wins_over_another_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an import of the function's module name finds another file, the right one is loaded."""
    for folder in ("right", "wrong"):
        (tmp_path / folder).mkdir()
        source = f"def fn(rank, world_size):\n    return {folder!r}\n"
        (tmp_path / folder / "same_name.py").write_text(source)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path / "right")
        module = importlib.import_module("same_name")
    monkeypatch.syspath_prepend(tmp_path / "wrong")
    try:
        assert run_ranks(module.fn, 1, timeout=LIMIT) == ["right"]
    finally:
        del sys.modules["same_name"]


TEST_MODULE = """
from helper import VALUE
from reloadpg.testing import run_ranks

class Local:
    value = VALUE

def fn(rank, world_size, local):
    return type(local).__module__, local.value + rank, __file__

def test_it():
    results = run_ranks(fn, 2, args=(Local(),), start_method="START", timeout=50)
    assert results == [(__name__, 40, __file__), (__name__, 41, __file__)]
"""


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_test_modules_are_found_in_every_import_mode(tmp_path: Path, mode: str) -> None:
    """Ranks find functions of test modules without `__init__.py`, under the caller's name."""
    for name in ("one", "two") if mode == "importlib" else ("one",):
        folder = tmp_path / "tests" / name
        folder.mkdir(parents=True)
        start = "spawn" if name == "two" else "forkserver"
        (folder / "test_same.py").write_text(TEST_MODULE.replace("START", start))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("VALUE = 40\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = lib\n")
    done = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--import-mode={mode}", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert f"{2 if mode == 'importlib' else 1} passed" in done.stdout


def fork_bystander(fifo: str) -> None:
    """Fork while the run goes on, so that the child holds copies of the sockets of the run."""
    while not list(Path(os.environ["TMPDIR"]).glob("*/0.out")):
        time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(1000)
    report(fifo, pid)


def main(role: str, *arguments: str) -> None:
    if role == "hang":
        fifo, start_method = arguments
        pid = _rank_pool.POOL.server_facts(start_method)["pid"]
        report(fifo, pid, os.getpid())
        threading.Thread(target=fork_bystander, args=(fifo,), daemon=True).start()
        run_ranks(
            leave_grandchildren,
            2,
            args=(fifo, True),
            start_method=start_method,  # type: ignore[arg-type]
            timeout=LIMIT,
        )
    else:
        assert run_ranks(reduce_ranks, 2, timeout=LIMIT) == [3, 3]
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = int(run_ranks(reduce_ranks, 2, timeout=LIMIT) != [3, 3])
            finally:
                sys.stderr.flush()
                sys.exit(code)
        assert run_ranks(reduce_ranks, 2, timeout=LIMIT) == [3, 3]
        assert os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    # A test run that a shell put in the background has SIGINT ignored, and so has its child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*sys.argv[1:])
