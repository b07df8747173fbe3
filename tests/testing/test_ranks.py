"""``run_ranks``: real ranks, their environment, reports of failures, and the cleanup."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import reloadpg
from reloadpg.testing import RankOutcome, RanksFailedError, run_ranks

distributed: Any = torch.distributed  # whose stores are not exported as types
ROOT = str(Path(reloadpg.__file__).parents[1])
LIMIT = 280.0
"""Seconds within which everything in this file must have happened."""


def wait_gone(pids: list[int]) -> None:
    """Block until none of the processes exists."""
    deadline = time.monotonic() + LIMIT
    for pid in pids:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            ready = select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]
            os.close(fd)
            assert ready, f"process {pid} is still there"


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def report(folder: str, *pids: int) -> None:
    """Write process ids to a file in a folder; the file is complete once it exists."""
    part = Path(folder, f"{os.getpid()}.part")
    part.write_text(" ".join(map(str, pids)))
    part.rename(part.with_suffix(".pids"))


def reported(folder: Path | str, count: int) -> list[list[int]]:
    """Wait for this number of reports; return the process ids of each."""
    deadline = time.monotonic() + LIMIT
    while len(files := list(Path(folder).glob("*.pids"))) < count:
        assert time.monotonic() < deadline, files
        time.sleep(0.01)
    return [[int(pid) for pid in file.read_text().split()] for file in files]


def sleep_indefinitely() -> None:
    """Ignore signals and sleep until killed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1000)


def daemon_grandchild() -> int:
    """Start a process in another session, without a parent; return its pid."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            sleep_indefinitely()
        os.write(write, str(pid).encode())
        os._exit(0)
    return int(os.read(read, 100))


# ---------------------------------------------------------------------------------------------
# the environment of ranks


def reduce_ranks(rank: int, world_size: int) -> int:
    distributed.init_process_group("gloo")
    value = torch.tensor([rank + 1])
    distributed.all_reduce(value)
    distributed.destroy_process_group()
    return int(value)


def describe_rank(rank: int, world_size: int) -> dict[str, Any]:
    from helpers import import_place

    return {
        "environment": dict(os.environ),
        "interpreter": (sys.path, sys.argv, os.getcwd(), sys.flags.hash_randomization),
        "temporary": tempfile.mkdtemp(),
        "threads": torch.get_num_threads(),
        "frozen": gc.get_freeze_count(),
        "forked with torch": os.getppid() == import_place.PROCESS and import_place.AFTER_TORCH,
        "installed": reloadpg.is_installed(),
        "sum": reduce_ranks(rank, world_size),
    }


def parsed(variables: str) -> dict[str, str | None]:
    return dict(variable.split("=") for variable in variables.split())


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    variables = "ADDED=1 LOCAL_RANK=9 OMP_NUM_THREADS=2 PYTHONHASHSEED=0"
    install = "RELOADPG_AUTOINSTALL=1 RELOADPG_BACKENDS=gloo"
    environment = {**parsed(f"{variables} {install}"), "GROUP_RANK": None}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OF_THE_CALLER", "ROLE_RANK", "TORCHELASTIC_RUN_ID"):
            patch.setenv(name, "7")
        return run_ranks(
            describe_rank,
            2,
            env=environment,
            preload=["helpers.import_place"],
            timeout=LIMIT,
        )


def test_a_rank_inherits_the_environment_without_the_callers_job(seen: Any) -> None:
    """``env`` adds and removes variables."""
    for rank, found in enumerate(seen):
        environment = found["environment"]
        expected = parsed(
            f"OF_THE_CALLER=7 ADDED=1 RANK={rank} WORLD_SIZE=2 LOCAL_RANK=9 LOCAL_WORLD_SIZE=2 "
            "MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=2 MKL_NUM_THREADS=1"
        )
        assert {name: environment[name] for name in expected} == expected
        absent = {"GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID", "RELOADPG_RANK_LOADING"}
        assert not absent & {*environment}
        assert found["interpreter"][:3] == (sys.path, sys.argv, os.getcwd())


def test_a_run_has_a_separate_temporary_folder(seen: Any) -> None:
    """It is removed."""
    for found in seen:
        environment = found["environment"]
        assert Path(found["temporary"]).parent == Path(environment["TMPDIR"])
        assert not Path(environment["TMPDIR"]).parent.exists()


def test_a_rank_has_torch_imported(seen: Any) -> None:
    """It takes the number of threads and the installation from its environment.

    Collections in a rank skip the imported modules, so they copy none of the pages that the
    rank shares with the server.
    """
    for found in seen:
        assert (found["threads"], found["sum"], found["installed"]) == (2, 3, True)
        assert found["interpreter"][3] != 0  # read at the start only
        assert found["forked with torch"]
        assert found["frozen"] > 100_000


def reduce_and_nest(rank: int, world_size: int, closed: str) -> list[int]:
    sums = [reduce_ranks(rank, world_size)]
    # Rank 0 hosts the store: a faster rank would connect to the old one.
    if rank == 0:
        Path(closed).touch()
    while not Path(closed).exists():
        time.sleep(0.01)
    sums.append(reduce_ranks(rank, world_size))
    return [*sums, *(run_ranks(reduce_ranks, 2, timeout=LIMIT) if rank == 0 else ())]


@pytest.mark.slow
def test_a_rank_can_initialise_twice_and_run_ranks_itself(tmp_path: Path) -> None:
    """With the store in rank 0, which ends with the group: no old keys are left."""
    args = (str(tmp_path / "closed"),)
    results = run_ranks(reduce_and_nest, 2, args=args, store="rank0", timeout=LIMIT)
    assert results == [[3, 3, 3, 3], [3, 3]]


@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_concurrent_runs_have_separate_stores(store: Any) -> None:
    sizes = [2, 3, 2]
    with ThreadPoolExecutor(3) as pool:
        results = pool.map(lambda n: run_ranks(reduce_ranks, n, store=store, timeout=LIMIT), sizes)
    assert list(results) == [[n * (n + 1) // 2] * n for n in sizes]


# ---------------------------------------------------------------------------------------------
# ranks wait for each other


def return_early(rank: int, world_size: int, end: str, folder: str) -> bool:
    """Rank 0 returns; rank 2 checks whether its process exists; rank 1 ends in the given way."""
    checked = Path(folder, "checked")
    if rank == 0:
        report(folder, os.getpid())
        return True
    ((pid,),) = reported(folder, 1)
    if rank == 1:
        Path(folder, "rank 1").write_text(str(os.getpid()))
        while not checked.exists():
            time.sleep(0.01)
        ends = {"return": lambda: True, "die": lambda: os._exit(3)}
        return bool(ends[end]())
    time.sleep(0.3)  # rank 0 would be gone by now
    stayed = exists(pid)
    checked.touch()
    if end != "return":
        wait_gone([int(Path(folder, "rank 1").read_text())])
        time.sleep(0.3)
        stayed = stayed and exists(pid)
    return stayed


@pytest.mark.parametrize("end", ["return", "die"])
def test_a_rank_that_has_returned_stays_until_the_others_have_ended(
    end: str, tmp_path: Path
) -> None:
    """So its connections stay open."""
    args = (end, str(tmp_path))
    outcomes = run_ranks(return_early, 3, args=args, timeout=LIMIT, check=False)
    assert [outcome.ok for outcome in outcomes] == [True, end == "return", True]
    assert outcomes[2].result
    assert not any(outcome.killed for outcome in outcomes)


# ---------------------------------------------------------------------------------------------
# failures


WAYS_TO_END: dict[str, tuple[Callable[[], Any], int | None, int | None, str]] = {
    "returns": (lambda: "fine", 0, None, ""),
    "raises": (lambda: 1 / 0, 1, None, "ZeroDivisionError: division by zero"),
    "os._exit(3)": (lambda: os._exit(3), 3, None, "exited with code 3 before the function"),
    "os._exit(0)": (lambda: os._exit(0), 0, None, "exited with code 0 before the function"),
    "sys.exit(4)": (lambda: sys.exit(4), 1, None, "SystemExit: 4"),
    "SIGKILL": (lambda: os.kill(os.getpid(), 9), None, 9, "killed by signal 9 (Killed)"),
    "null pointer": (lambda: ctypes.string_at(0), None, 11, "killed by signal 11 (Seg"),
    "lambda": (lambda: WAYS_TO_END, 1, None, "its result of type dict cannot be pickled"),
}


def end_in_all_ways(rank: int, world_size: int, ways: list[str]) -> Any:
    print("said before", flush=False)
    print("to stderr", file=sys.stderr)
    subprocess.run(["echo", "from a child"], check=True)
    return WAYS_TO_END[ways[rank]][0]()


def test_each_way_to_end_is_reported(capfd: Any) -> None:
    """By exit code, signal, reason and output. With ``check=False`` the other ranks continue."""
    ways = [*WAYS_TO_END]
    outcomes: list[RankOutcome] = run_ranks(
        end_in_all_ways, len(ways), args=(ways,), timeout=LIMIT, check=False
    )
    for way, outcome in zip(ways, outcomes, strict=True):
        _, exitcode, number, text = WAYS_TO_END[way]
        assert (outcome.exitcode, outcome.signal) == (exitcode, number), way
        assert (outcome.ok, outcome.result) == ((True, "fine") if not text else (False, None)), way
        assert text in (outcome.exception or "")
        assert text in (outcome.reason or "")
        assert not outcome.killed
        lines = outcome.output.splitlines()
        assert lines[:3] == ["said before", "to stderr", "from a child"]
        assert ("in end_in_all_ways" in outcome.output) is (way == "null pointer")  # faulthandler
    assert capfd.readouterr() == ("", "")


def fail_in_turn(rank: int, world_size: int) -> None:
    """Rank 1 fails first; rank 0 sees it die and fails as a consequence; rank 2 waits.

    The time that they have after the first failure is over when rank 2 has seen rank 0 die.
    """
    from helpers import supervising

    distributed.init_process_group("gloo")
    store = distributed.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    if rank == 1:
        store.wait(["watched 1", "watched 0"])
        raise ValueError("the cause\nand more")
    fd = os.pidfd_open(int(store.get(f"pid {1 - rank // 2}")))
    store.set(f"watched {1 - rank // 2}", "")
    select.select([fd], [], [])
    if rank == 0:
        raise OSError("the consequence")
    supervising.advance(100)
    store.wait(["never"])


def test_the_message_begins_with_the_first_failure() -> None:
    """Then come its traceback, later failures, and the stacks of ranks that hang."""
    with pytest.raises(RanksFailedError, match=r"no process is left") as caught:
        run_ranks(fail_in_turn, 3, preload=["helpers.supervising"], timeout=LIMIT)
    message = str(caught.value)
    assert message.startswith("rank 1: ValueError: the cause; 3 of 3 ranks failed")
    first, second, third = (message.index(f"===== rank {rank}:") for rank in (1, 0, 2))
    assert first < message.index("first failure") < message.index("and more") < second
    assert "in fail_in_turn" in message[first:second]
    assert "_rank.py" not in message[:third]
    assert second < message.index("OSError: the consequence") < third
    assert "still running 1 s after the first failure" in message[third:]
    assert "in fail_in_turn" in message[third:]
    assert [outcome.killed for outcome in caught.value.outcomes] == [False, False, True]


def crash_of_one(rank: int, world_size: int, directory: str) -> None:
    """Rank 0 raises before rank 1 crashes, as if a connection was closed."""
    failed = Path(directory, "failed")
    if rank == 0:
        failed.touch()
        json.loads("no json")
    while not failed.exists():
        time.sleep(0.01)
    crash_below(10)


def crash_below(frames: int) -> None:
    if frames:
        crash_below(frames - 1)
    ctypes.string_at(0)


def test_a_crash_is_reported_before_an_earlier_exception(tmp_path: Path) -> None:
    """It is the likely cause. The stack of the crash begins where it happened."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(crash_of_one, 2, args=(str(tmp_path),), timeout=LIMIT)
    message = str(caught.value)
    assert message.startswith(
        "rank 1: killed by signal 11 (Segmentation fault); 2 of 2 ranks failed"
    )
    assert message.index("===== rank 1: ") < message.index("===== rank 0: ")
    assert f'File "{ctypes.__file__}", line' in message.partition("===== rank 0: ")[0]
    assert "in crash_of_one" in message
    assert 'json.loads("no json")' in message
    assert "JSONDecodeError" in message


class SlowToFlush:
    def flush(self) -> None:
        time.sleep(0.5)


def hang(rank: int, world_size: int, folder: str) -> None:
    """Rank 0 returns once the others hang. Then the time limit is over."""
    if rank == 0:
        reported(folder, world_size - 1)
        sys.stdout = SlowToFlush()  # type: ignore[assignment] # and so to exit
    else:
        args = (folder, rank == 1)
        wait_in_main(threading.Thread(target=wait_in_helper, args=args, daemon=True))


def wait_in_main(helper: threading.Thread) -> None:
    helper.start()
    helper.join()


def wait_in_helper(folder: str, ends: bool = False) -> None:
    report(folder)
    if ends:
        from helpers import supervising

        supervising.await_return()
        supervising.advance(LIMIT)
    threading.Event().wait()


def test_hanging_ranks_are_named_with_the_stacks_of_their_threads(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="the time limit of 280 s; 2 of 3 ranks") as caught:
        run_ranks(hang, 3, args=(str(tmp_path),), preload=["helpers.supervising"], timeout=LIMIT)
    assert str(caught.value).count("in wait_in_main") == 2
    outcomes = caught.value.outcomes
    assert [o.killed for o in outcomes] == [False, True, True]
    assert [o.signal for o in outcomes] == [None, signal.SIGKILL, signal.SIGKILL]
    assert outcomes[0].ok
    for outcome in outcomes[1:]:
        assert "in wait_in_main" in str(outcome.exception)
        assert "in wait_in_helper" in str(outcome.exception)


def offload_alone(rank: int, world_size: int) -> None:
    """Rank 0 returns without the call. Rank 1 waits for it until the time limit is over."""
    reloadpg.install(backends={"gloo"}, timeout=LIMIT)
    distributed.init_process_group("gloo")
    reloadpg.offload()
    reloadpg.reload()  # so that the ranks know each other's processes
    if rank == 1:
        threading.Thread(target=end_the_run, daemon=True).start()
        reloadpg.offload()


def end_the_run() -> None:
    from helpers import supervising

    while (running := reloadpg.status().running) is None or not running.waiting:
        time.sleep(0.01)
    supervising.await_return()
    supervising.advance(LIMIT)


def test_a_rank_that_waits_for_one_that_has_returned_is_reported_as_waiting() -> None:
    """The process of the other rank has not ended: nothing says that it died."""
    with pytest.raises(RanksFailedError, match="the time limit of 280 s; 1 of 2 ranks") as caught:
        run_ranks(offload_alone, 2, preload=["helpers.supervising"], timeout=LIMIT)
    returned, waits = caught.value.outcomes
    assert returned.ok
    assert not returned.killed
    assert waits.killed
    assert "in offload_alone" in str(waits.exception)
    assert "PeerFailedError" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"world_size": 0}, ValueError, "world_size must be a number of at least 1, got 0"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan is not a time between"),
        ({"preload": "megatron.core"}, TypeError, "is not a list of modules"),
        ({"preload": ["torch", "tortch"]}, ValueError, "preload: no module named tortch;"),
        ({"preload": ["no_package.part"]}, ValueError, "no module named no_package.part;"),
        ({"store": "rank1"}, ValueError, "store must be"),
        (
            {"fn": lambda rank, world_size: None},
            TypeError,
            "cannot be pickled.*top level of a module",
        ),
        ({"fn": 3}, TypeError, "fn must be callable"),
        ({"args": (threading.Lock(),)}, TypeError, "cannot be pickled"),
    ],
)
def test_invalid_arguments_start_no_process(
    arguments: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseProcess, "start", lambda _: pytest.fail("started"))
    with pytest.raises(error, match=text):
        run_ranks(**{"fn": hang, "world_size": 1, **arguments})


# ---------------------------------------------------------------------------------------------
# nothing is left behind


def leave_grandchildren(rank: int, world_size: int, folder: str, then_hang: bool) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    supervisor = os.getppid()
    report(folder, os.getpid(), child.pid, daemon_grandchild(), supervisor, parent_of(supervisor))
    if then_hang:
        sleep_indefinitely()


def leave_them_and_fail(rank: int, world_size: int, folder: str) -> None:
    """Rank 2 fails once the others have their grandchildren."""
    if rank == 2:
        raise ValueError(len(reported(folder, 2)))
    leave_grandchildren(rank, world_size, folder, True)


@pytest.mark.parametrize("hangs", [True, False])
def test_daemons_of_ranks_end_with_the_run(tmp_path: Path, hangs: bool) -> None:
    """Also those in other sessions, and of ranks that are killed."""
    if hangs:
        with pytest.raises(RanksFailedError, match=r"^rank 2: ValueError: 2; "):
            run_ranks(leave_them_and_fail, 3, args=(str(tmp_path),), timeout=LIMIT)
    else:
        run_ranks(leave_grandchildren, 2, args=(str(tmp_path), False), timeout=LIMIT)
    assert [pid for pids in reported(tmp_path, 2) for pid in pids[:4] if exists(pid)] == []


def kill_supervisor(rank: int, world_size: int, folder: str) -> None:
    from helpers import supervising

    supervising.await_pids_sent()
    child = os.fork()
    if child != 0:
        report(folder, os.getpid(), child)
        os.kill(os.getppid(), signal.SIGKILL)
    sleep_indefinitely()


def server_and_variable(rank: int, world_size: int) -> tuple[int, str | None]:
    return parent_of(os.getppid()), os.environ.get("OF_THE_SERVER")


@pytest.mark.slow
def test_a_killed_supervisor_fails_the_run_and_a_killed_server_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks end with their children. New ranks have the environment of the caller."""
    with pytest.raises(RanksFailedError, match="lost: the process that supervises the ranks"):
        args, preload = (str(tmp_path),), ["helpers.supervising"]
        run_ranks(kill_supervisor, 1, args=args, preload=preload, timeout=LIMIT)
    wait_gone(reported(tmp_path, 1)[0])
    ((server, _),) = run_ranks(server_and_variable, 1, timeout=LIMIT)
    os.kill(server, signal.SIGKILL)
    wait_gone([server])
    monkeypatch.setenv("OF_THE_SERVER", "1")
    ((other, variable),) = run_ranks(server_and_variable, 1, timeout=LIMIT)
    assert (other != server, variable) == (True, "1")
    monkeypatch.delenv("OF_THE_SERVER")
    assert run_ranks(server_and_variable, 1, timeout=LIMIT) == [(other, None)]


def test_runs_leave_no_directories_or_descriptors() -> None:
    """In this process and in the fork server."""
    server, folder = run_ranks(server_and_folder, 1, timeout=LIMIT)[0]

    def held() -> Counter[str]:
        """Descriptors by process, and the names in the runs' folder."""
        found = Counter(os.listdir(folder))
        for pid in (os.getpid(), server):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # it was closed
                    found[f"{pid} {descriptor.readlink()}"] += 1
        return found

    before = held()
    assert not [name for name in before if name.startswith("ranks-")]
    for store in ("rank0", "parent"):
        run_ranks(server_and_variable, 2, store=store, timeout=LIMIT)  # type: ignore[arg-type]
        with pytest.raises(RanksFailedError):
            run_ranks(end_in_all_ways, 2, args=(["raises", "returns"],), timeout=LIMIT)
    deadline = time.monotonic() + LIMIT
    while new := held() - before:  # the server may still be closing its copy of the last pipe
        assert time.monotonic() < deadline, new


def server_and_folder(rank: int, world_size: int) -> tuple[int, str]:
    return parent_of(os.getppid()), str(Path(os.environ["TMPDIR"]).parents[1])


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, since it contains sockets of multiprocessing."""
    with tempfile.TemporaryDirectory(prefix="run-ranks-") as name:
        yield Path(name)


def start_script(folder: Path) -> subprocess.Popen[bytes]:
    """Run this file as a script, with a separate temporary folder."""
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(folder / "tmp")},
    )


@pytest.mark.slow
def test_a_run_ends_with_its_caller(folder: Path) -> None:
    """No file is left. A process that the caller has forked may hold copies of its descriptors."""
    with start_script(folder) as script:
        bystander, *ranks = sorted(reported(folder, 3), key=len)
        pids = {pid for rank in ranks for pid in rank[:4]}
        assert len(pids) == 7
        assert all(exists(pid) for pid in [*pids, *bystander])
        try:
            script.kill()
            assert script.wait(LIMIT) == -signal.SIGKILL
            wait_gone([*pids])
            assert not list((folder / "tmp").glob("*/ranks-*"))
        finally:
            os.kill(*bystander, signal.SIGKILL)
        wait_gone([ranks[0][4]])


# ---------------------------------------------------------------------------------------------
# where the function is found


def run_python(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with only the library, not the working directory, on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": ROOT, "PYTHONSAFEPATH": "1", **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.slow
def test_functions_of_main_need_a_guarded_module(tmp_path: Path) -> None:
    """Of a package too. An unguarded script and an interactive interpreter get an error."""
    call = "from reloadpg.testing import run_ranks\ndef fn(rank, size):\n    return rank\n"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        f"{call}if __name__ == '__main__':\n    print(run_ranks(fn, 2))\n"
    )
    (tmp_path / ("long" * 20)).mkdir()
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "TMPDIR": str(tmp_path / ("long" * 20))}
    done = run_python("-m", "package", cwd=tmp_path, **env)
    assert done.stdout == "[0, 1]\n", done.stderr
    (tmp_path / "unguarded.py").write_text(f"{call}run_ranks(fn, 1)\n")
    done = run_python("unguarded.py", cwd=tmp_path)
    assert done.returncode != 0
    assert 'call run_ranks under `if __name__ == "__main__":`' in done.stderr
    guarded = (
        "if __name__ == '__main__':\n    def local(rank, size): ...\n    run_ranks(local, 1)\n"
    )
    (tmp_path / "guarded.py").write_text(f"{call}{guarded}")
    done = run_python("guarded.py", cwd=tmp_path)
    assert "define the function and its arguments' classes above it" in done.stderr
    done = run_python("-c", f"{call}run_ranks(fn, 1)\n", cwd=tmp_path)
    assert "TypeError: fn or an argument is defined in an interactive __main__" in done.stderr


@pytest.mark.slow
def test_another_reloadpg_in_the_working_directory_is_an_error(tmp_path: Path) -> None:
    """The fork server would import it first, although it is not on the caller's path."""
    compiled = shutil.ignore_patterns("__pycache__")  # other processes write there
    shutil.copytree(f"{ROOT}/reloadpg", tmp_path / "reloadpg", ignore=compiled)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "script.py").write_text(
        "import reloadpg.testing\ndef fn(rank, size):\n    return rank\n"
        "if __name__ == '__main__':\n    reloadpg.testing.run_ranks(fn, 1)\n"
    )
    done = run_python("bin/script.py", cwd=tmp_path, PYTHONSAFEPATH="")
    assert f"found {tmp_path}/reloadpg/testing/_rank.py, but the caller uses" in done.stderr


def test_a_rank_loads_the_module_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one of the same name. A module that calls ``run_ranks`` when imported is an error."""
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
        again = "import reloadpg.testing\nreloadpg.testing.run_ranks(print, 1)\n"
        (tmp_path / "right" / "same_name.py").write_text(again)
        with pytest.raises(RanksFailedError, match="while a rank imports the module of its funct"):
            run_ranks(module.fn, 1, timeout=LIMIT)
    finally:
        del sys.modules["same_name"]


def fork_bystander(folder: str) -> None:
    while not list(Path(tempfile.gettempdir()).glob("*/ranks-*/0.out")):
        time.sleep(0.01)
    if os.fork() == 0:
        report(folder, os.getpid())
        sleep_indefinitely()


if __name__ == "__main__":
    threading.Thread(target=fork_bystander, args=sys.argv[1:], daemon=True).start()
    run_ranks(leave_grandchildren, 2, args=(sys.argv[1], True), timeout=LIMIT)
