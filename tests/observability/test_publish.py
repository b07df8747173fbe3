"""Publishing and exporting never break or delay a job, and end with it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import worlds
from reports import report

import reloadpg
from reloadpg import observability
from reloadpg.groups.registry import registry
from reloadpg.observability import publish, trace
from reloadpg.observability.exporters import subscribe
from reloadpg.testing import run_ranks

LIMIT_S = 120.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait until a condition holds; the limit is for a test that would fail."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to be"
    return value


def read(path: Path) -> dict[str, Any]:
    """The record; empty if there is none. What is there must be whole."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return record


def _single_rank(**options: Any) -> None:
    reloadpg.install(backends={"gloo"}, min_size=1, **options)
    worlds.init("gloo")


# ---------------------------------------------------------------------------------------------


def _heartbeat(rank, world_size, directory):
    path = Path(directory, "rank-0.json")
    publisher = publish.Publisher(Path(directory), heartbeat=0.01)
    publisher.start()
    not_yet = until(lambda: read(path))  # the launcher's rank is known before any group is
    _single_rank()
    with_world = until(lambda: len(found := read(path)["status"]["groups"]) == 1 and found)
    group = dist.new_group([0], group_desc="late")
    until(lambda: len(read(path)["status"]["groups"]) == 2)
    first = read(path)["time"]
    later = until(lambda: (now := read(path)["time"]) > first and now)
    dist.destroy_process_group(group)
    until(lambda: len(read(path)["status"]["groups"]) == 1)
    publisher.stop()
    return not_yet["installed"], with_world[0]["desc"], later > first


def test_the_heartbeat_publishes_groups_before_any_operation(tmp_path: Path) -> None:
    """The installation, groups that are created and destroyed, and the time."""
    assert run_ranks(_heartbeat, 1, args=(str(tmp_path / "new"),)) == [(False, "default_pg", True)]


def writing() -> bool:
    """Whether a thread of this process is in the midst of a write."""
    frames = sys._current_frames().values()
    return any(
        line.name == "replace_file" for one in frames for line in traceback.extract_stack(one)
    )


def _stuck_disk(rank, world_size, directory):
    # Who opens a pipe for writing waits for somebody who reads, as with a disk that hangs.
    pipe = Path(directory, f".rank-0.json.{os.getpid()}.part")
    os.mkfifo(pipe)
    _single_rank()
    end = observability.publish_status(directory)
    until(writing)
    with reloadpg.offloaded():
        pass
    cycled = writing()
    nothing = [path.name for path in Path(directory).iterdir()] == [pipe.name]
    pipe.read_text()
    end()
    file = Path(directory, "rank-0.json")
    until(file.is_file)  # the pipe has got this name, and the last record follows
    return cycled, nothing, read(file)["status"]["cycles"]


def test_a_disk_that_hangs_does_not_delay_the_job(tmp_path: Path) -> None:
    """The job runs a cycle while the write of its file does not return."""
    assert run_ranks(_stuck_disk, 1, args=(str(tmp_path),)) == [(True, True, 1)]


def _no_directory(rank, world_size, file):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("reloadpg").addHandler(handler)
    publisher = publish.Publisher(Path(file), heartbeat=0.01)
    publisher.start()
    until(lambda: messages)
    time.sleep(0.5)  # it is tried again, many times
    _single_rank()
    with reloadpg.offloaded():
        pass
    Path(file).unlink()
    record = until(lambda: read(Path(file, "rank-0.json")))
    publisher.stop()
    return [text for text in messages if "status file" in text], record["rank"]


def test_a_directory_that_cannot_be_created_is_one_warning(tmp_path: Path) -> None:
    """The job continues, and the file is written once the directory can be created."""
    (tmp_path / "file").touch()
    (((warning,), rank),) = run_ranks(_no_directory, 1, args=(str(tmp_path / "file"),))
    assert "cannot be written" in warning
    assert rank == 0


def _in_child(body):
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


def _fork(rank, world_size, directory):
    path, own = Path(directory, "rank-0.json"), Path(directory, "own")

    def with_a_group_of_its_own():
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
        store = dist.HashStore()
        worlds.init("gloo", store=store, rank=0, world_size=1)
        end = observability.publish_status(own)
        until(lambda: read(own / "rank-0.json"))
        end()

    def with_the_parents_group():
        reloadpg.install(backends={"gloo"}, min_size=1)
        observability.publish_status(directory)()

    reloadpg.install(backends={"gloo"}, min_size=1)
    observability.serve_status()
    observability.publish_status(directory)
    until(lambda: read(path))
    with publish._process._lock:  # as if another thread were at it
        codes = [_in_child(with_a_group_of_its_own)]
        worlds.init("gloo")
        codes += [_in_child(with_the_parents_group)]
    untouched = read(path)["pid"] == os.getpid()
    with reloadpg.offloaded():
        pass
    record = until(lambda: (found := read(path))["status"]["cycles"] == 1 and found)
    return codes, untouched, record["pid"] == os.getpid(), read(own / "rank-0.json")["rank"]


def test_a_forked_child_does_not_write_the_file_of_its_parent(tmp_path: Path) -> None:
    """It has no publishing thread until it is a rank itself, and the parent continues."""
    assert run_ranks(_fork, 1, args=(str(tmp_path),)) == [([0, 0], True, True, 0)]


@pytest.mark.parametrize("ends", ["right after an operation", "in order"])
def test_the_last_record_is_written_at_the_end_of_the_process(ends: str, tmp_path: Path) -> None:
    """A process that ends right after an operation leaves its report, and does not hang.

    The figures stay after an orderly end: not generation 0 and an unknown number of ranks.
    """
    in_order = ends == "in order"
    code = (
        "import torch.distributed as dist, reloadpg\n"
        "from reloadpg import observability\n"
        "from reloadpg.observability import publish\n"
        "publish._LAST_WRITE_S = 60\n"  # at most: the wait is over when the record is there
        "reloadpg.install(backends={'gloo'}, min_size=1)\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    code += "" if in_order else "observability.publish_status()\n"
    code += "reloadpg.offload()\n"
    code += "reloadpg.reload()\ndist.destroy_process_group()\n" if in_order else ""
    env = {**os.environ, "RELOADPG_STATUS_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    env |= {"RANK": "0"} if in_order else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    record = read(tmp_path / "rank-0.json")
    if in_order:
        assert record["exited"]
        assert not record["status"]["initialized"]
        assert (record["world_size"], record["status"]["generation"]) == (1, 1)
        assert [group["desc"] for group in record["status"]["groups"]] == ["default_pg"]
    else:
        assert record["last_report"]["operation"] == "offload"
        assert record["status"]["state"] == "offloaded"


def test_without_the_variable_nothing_is_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a thread nor a file. A process that is not a rank writes none either."""
    monkeypatch.delenv("RELOADPG_STATUS_DIR", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    observability.publish_status()
    assert publish._process._publisher is None
    publisher = publish.Publisher(tmp_path)
    publisher.start()
    publisher.stop()
    assert not any(tmp_path.iterdir())


def _while_busy(rank, world_size, directory):
    _single_rank()
    path = Path(directory, "rank-0.json")
    looks = []
    status = reloadpg.status

    def noted():
        looks.append(threading.current_thread().name)
        return status()

    reloadpg.status = noted
    publisher = publish.Publisher(Path(directory), heartbeat=0.001)
    publisher.start()
    until(lambda: read(path).get("status"))
    inside = []

    def on_offload():
        looks.clear()
        dist.new_group([0])  # something to see, in the middle of an operation
        first = read(path)["time"]
        until(lambda: read(path)["time"] > first)
        inside.extend(looks)

    reloadpg.on_offload(on_offload)
    reloadpg.offload()
    publisher.stop()
    return inside, "MainThread" in looks


def test_only_the_thread_of_an_operation_reads_the_status_during_it(tmp_path: Path) -> None:
    """So the memory of communicators is not read while they may be released."""
    assert run_ranks(_while_busy, 1, args=(str(tmp_path),)) == [([], True)]


def _look_while_it_is_encoded(rank, world_size):
    _single_rank()
    record = publish.process_record()
    record.changed = lambda: None
    record.refresh()
    looks = [reloadpg.offload]

    def dumps(value, **options):
        text = json.dumps(value, **options)
        if "status" in value and looks:
            looks.pop()()
        return text

    with mock.patch.object(publish, "json", SimpleNamespace(dumps=dumps)):
        texts = [record.text() for _ in range(2)]
    return [json.loads(text)["status"]["state"] for text in texts]


def test_a_change_while_the_record_is_encoded_is_in_the_next_record() -> None:
    """The thread that writes encodes the record that it has."""
    assert run_ranks(_look_while_it_is_encoded, 1) == [["live", "offloaded"]]


def _first_offload(rank, world_size, directory):
    path = Path(directory, "rank-0.json")
    publisher = publish.Publisher(Path(directory), heartbeat=1000.0)
    publisher.start()
    until(lambda: read(path))
    _single_rank()
    inside = []
    reloadpg.on_offload(lambda: inside.append(until(lambda: (r := read(path))["running"] and r)))
    reloadpg.offload()
    publisher.stop()
    (record,) = inside
    return (
        record["status"]["state"],
        len(record["status"]["groups"]),
        record["running"]["operation"],
    )


def test_the_first_operation_is_published_when_it_begins(tmp_path: Path) -> None:
    """Also if no heartbeat has seen the groups before."""
    assert run_ranks(_first_offload, 1, args=(str(tmp_path),)) == [("live", 1, "offload")]


def test_an_exporter_that_fails_is_disabled_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not called again."""
    calls, before = [], list(registry.callbacks.report)

    def broken(_: object) -> None:
        calls.append(1)
        raise OSError("disk full")

    remove = subscribe("the test", broken)
    for _ in range(2):
        for callback in [one for one in registry.callbacks.report if one not in before]:
            callback(report())
    remove()
    assert calls == [1]
    (record,) = caplog.records
    assert "the test failed and is now disabled" in record.getMessage()
    assert registry.callbacks.report == before


WITHOUT = """
import sys
sys.modules["prometheus_client"] = sys.modules["opentelemetry"] = None
from reloadpg.observability import ReloadpgCollector, export_spans
print(export_spans()())
ReloadpgCollector()
"""


def test_without_the_optional_packages_spans_do_nothing_and_metrics_name_the_extra() -> None:
    """OpenTelemetry and the Prometheus client may both be missing."""
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.stdout == "None\n", done.stderr
    assert "pip install 'reloadpg[prometheus]'" in done.stderr


def _files_of_a_job(rank, world_size, directory):
    os.umask(0)
    publish.publish_status(Path(directory, "status"))
    _single_rank()
    reloadpg.offload()
    reloadpg.reload()
    until(Path(directory, "status", "trace-rank-0.json").exists)
    dist.destroy_process_group()


def test_files_are_readable_by_their_user_alone_and_follow_no_link(tmp_path: Path) -> None:
    """With any umask. A link in the place of a file is replaced, and its target is unchanged."""
    run_ranks(_files_of_a_job, 1, args=(str(tmp_path),), timeout=LIMIT_S)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "status").iterdir()}
    assert modes == {"rank-0.json": 0o600, "trace-rank-0.json": 0o600}
    assert (tmp_path / "status").stat().st_mode & 0o777 == 0o700
    target = tmp_path / "target"
    target.write_text("untouched")
    part = tmp_path / f".file.{os.getpid()}.part"
    for link in (part, tmp_path / "file"):
        link.symlink_to(target)
    trace.replace_file(tmp_path / "file", "new")
    assert target.read_text() == "untouched"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
