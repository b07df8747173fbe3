"""Publishing does not break or delay a job, and ends with it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg.observability import publish

LIMIT_S = 120.0


def until(condition: Callable[[], Any]) -> Any:
    """Poll until a condition holds; the limit is for a test that fails."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not hold"
    return value


def read(path: Path) -> dict[str, Any]:
    """The record, or an empty dictionary. A file must be complete."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return record


def _single_rank(**options: Any) -> None:
    reloadpg.install(backends={"gloo"}, min_size=1, **options)
    worlds.init("gloo")


# ---------------------------------------------------------------------------------------------


@contextmanager
def publishing(directory: Path, heartbeat: float = 0.01) -> Iterator[None]:
    publisher = publish.Publisher(directory, heartbeat=heartbeat)
    publisher.start()
    yield
    publisher.stop()


@pytest.mark.ranks(1)
def test_the_heartbeat_publishes_changes_between_operations(tmp_path: Path) -> None:
    """The installation, groups that are created and destroyed, and the time."""
    path = tmp_path / "new" / "rank-0.json"

    def shown() -> tuple[str, int]:
        return read(path)["state"], read(path)["groups"]

    with publishing(path.parent):
        until(lambda: read(path))  # the launcher's rank is known before any group is
        assert shown() == ("not installed", 0)
        _single_rank()
        until(lambda: shown() == ("live", 1))
        group = dist.new_group([0])
        until(lambda: shown() == ("live", 2))
        first = read(path)["time"]
        until(lambda: read(path)["time"] > first)
        dist.destroy_process_group(group)
        until(lambda: shown() == ("live", 1))


@pytest.mark.ranks(1)
def test_the_state_of_each_set_is_published(tmp_path: Path) -> None:
    """Only that of sets in which this rank has groups."""
    path = tmp_path / "rank-0.json"
    with publishing(path.parent):
        _single_rank(sets=["engine", "server"])
        until(lambda: read(path).get("state") == "live")
        with reloadpg.region("engine"):
            dist.new_group([0])
        with reloadpg.offloaded("trainer"):
            until(lambda: read(path)["state"] == "trainer offloaded, engine live")


def writing() -> bool:
    """Whether a thread of this process is writing a file."""
    frames = sys._current_frames().values()
    return any(
        line.name == "replace_file" for one in frames for line in traceback.extract_stack(one)
    )


@pytest.mark.ranks(1)
def test_a_write_that_hangs_does_not_delay_the_job(tmp_path: Path) -> None:
    # Opening a pipe for writing blocks until it is read, as with a disk that hangs.
    pipe, file = tmp_path / f".rank-0.json.{os.getpid()}.part", tmp_path / "rank-0.json"
    os.mkfifo(pipe)
    os.environ["RELOADPG_STATUS_DIR"] = str(tmp_path)
    _single_rank()
    until(writing)
    with reloadpg.offloaded():
        pass
    assert writing()
    assert [*tmp_path.iterdir()] == [pipe]
    pipe.read_text()
    until(file.is_file)  # the pipe was renamed to it; the next record replaces it
    until(lambda: file.is_file() and read(file)["last_ms"].keys() == {"offload", "reload"})


@pytest.mark.ranks(1)
def test_a_directory_that_cannot_be_created_is_warned_of_once(tmp_path: Path) -> None:
    """The job continues. The file is written once the directory can be created."""
    file = tmp_path / "file"
    file.touch()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg").addHandler(handler)
    with publishing(file):
        until(lambda: warnings)
        time.sleep(0.5)  # it is tried again, many times
        _single_rank()
        with reloadpg.offloaded():
            pass
        file.unlink()
        until(lambda: read(file / "rank-0.json"))
    assert ["cannot be written" in text for text in warnings] == [True]


def _in_child(body: Callable[[], None]) -> int:
    """Run something in a forked child; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.ranks(1)
def test_a_forked_child_does_not_write_its_parents_file(tmp_path: Path) -> None:
    """It has no publishing thread until it is a rank itself. The parent continues."""
    path, own = tmp_path / "rank-0.json", tmp_path / "own"
    options: Any = {"backends": {"gloo"}, "min_size": 1}

    def with_a_group_of_its_own() -> None:
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
        os.environ["RELOADPG_STATUS_DIR"] = str(own)
        reloadpg.install(**options)
        worlds.init("gloo", store=dist.HashStore(), rank=0, world_size=1)
        until(lambda: read(own / "rank-0.json"))

    def with_the_parents_group() -> None:
        reloadpg.install(**options)
        publish._publishers[os.getpid()].stop()

    os.environ["RELOADPG_STATUS_DIR"] = str(tmp_path)
    reloadpg.install(**options)
    until(lambda: read(path))
    assert _in_child(with_a_group_of_its_own) == 0
    worlds.init("gloo")
    assert _in_child(with_the_parents_group) == 0
    assert read(own / "rank-0.json")["rank"] == 0
    assert read(path)["pid"] == os.getpid()
    with reloadpg.offloaded():
        pass
    until(lambda: read(path)["last_ms"].keys() == {"offload", "reload"})
    assert read(path)["pid"] == os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["right after an operation", "in order"])
def test_the_last_record_is_written_at_process_exit(ends: str, tmp_path: Path) -> None:
    """Also of a process that exits right after an operation. The last figures are kept."""
    in_order = ends == "in order"
    code = (
        "import torch.distributed as dist, reloadpg\n"
        "from reloadpg.observability import publish\n"
        "publish._LAST_WRITE_S = 60\n"  # at most: the wait is over when the record is there
        "reloadpg.install(backends={'gloo'}, min_size=1)\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    code += "reloadpg.offload()\n"
    code += "reloadpg.reload()\ndist.destroy_process_group()\n" if in_order else ""
    env = {**os.environ, "RELOADPG_STATUS_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    env |= {"RANK": "0"} if in_order else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    record = read(tmp_path / "rank-0.json")
    assert record["absent"] == "exited"
    assert (record["world_size"], record["groups"]) == (1, 1)
    if in_order:
        assert (record["state"], record["generation"]) == ("no group yet", 1)
    else:
        assert (record["state"], record["last_ms"].keys()) == ("offloaded", {"offload"})


def test_nothing_is_published_without_the_variable_or_without_a_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RELOADPG_STATUS_DIR", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    publish.start()
    assert publish._publishers == {}
    publisher = publish.Publisher(tmp_path)
    publisher.start()
    publisher.stop()
    assert not any(tmp_path.iterdir())


READS = """
import sys, threading
import reloadpg

reloadpg.install, reloadpg.status, reloadpg.on_report
from reloadpg.lifecycle.callbacks import callbacks
assert not [name for name in sys.modules if name.startswith("reloadpg.observability")]
assert callbacks.report == []
reloadpg.install(backends={"gloo"})
import logging
assert "RankHandler" in str(logging.getLogger("reloadpg").handlers)
assert "reloadpg-status" in [thread.name for thread in threading.enumerate()]
assert len(callbacks.report) == 1
"""


def test_only_an_installation_starts_it(tmp_path: Path) -> None:
    """To read the names of the package starts and loads nothing of it."""
    env = {**os.environ, "RELOADPG_STATUS_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", READS], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks(1)
def test_no_other_thread_reads_the_status_during_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of communicators must not be read while they may be released."""
    _single_rank()
    path = tmp_path / "rank-0.json"
    looks: list[str] = []
    status = reloadpg.status

    def noted() -> Any:
        looks.append(threading.current_thread().name)
        return status()

    def await_record() -> None:
        first = read(path)["time"]
        until(lambda: read(path)["time"] > first)

    def on_offload() -> None:
        await_record()  # a look that was due before the operation is over
        looks.clear()
        dist.new_group([0])  # something to see, in the middle of an operation
        await_record()
        assert looks == []

    monkeypatch.setattr(reloadpg, "status", noted)
    reloadpg.on_offload(on_offload)
    with publishing(tmp_path, heartbeat=0.001):
        until(lambda: read(path).get("groups"))
        reloadpg.offload()
    assert "MainThread" in looks


@pytest.mark.ranks(1)
def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    """With any umask."""
    os.umask(0)
    status = tmp_path / "status"
    with publishing(status):
        _single_rank()
        until((status / "rank-0.json").exists)
    modes = {path.name: path.stat().st_mode & 0o777 for path in status.iterdir()}
    assert modes == {"rank-0.json": 0o600}
    assert status.stat().st_mode & 0o777 == 0o700
    target = tmp_path / "target"
    target.write_text("untouched")
    part, file = tmp_path / f".file.{os.getpid()}.part", tmp_path / "file"
    part.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        publish.replace_file(file, "new")
    part.unlink()
    file.symlink_to(target)
    publish.replace_file(file, "new")
    assert target.read_text() == "untouched"
    assert (file.is_symlink(), file.read_text()) == (False, "new")
