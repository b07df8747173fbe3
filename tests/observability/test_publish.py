"""Publishing and exporting do not break or delay a job, and end with it."""

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
from typing import Any

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


def test_the_heartbeat_publishes_changes_between_operations(tmp_path: Path) -> None:
    """The installation, groups that are created and destroyed, and the time."""
    assert run_ranks(_heartbeat, 1, args=(str(tmp_path / "new"),)) == [(False, "default_pg", True)]


def writing() -> bool:
    """Whether a thread of this process is writing a file."""
    frames = sys._current_frames().values()
    return any(
        line.name == "replace_file" for one in frames for line in traceback.extract_stack(one)
    )


def _stuck_disk(rank, world_size, directory):
    # Opening a pipe for writing blocks until it is read, as with a disk that hangs.
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
    until(file.is_file)  # the pipe was renamed to it; the last record replaces it
    return cycled, nothing, read(file)["status"]["cycles"]


def test_a_write_that_hangs_does_not_delay_the_job(tmp_path: Path) -> None:
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


def test_a_directory_that_cannot_be_created_is_warned_of_once(tmp_path: Path) -> None:
    """The job continues. The file is written once the directory can be created."""
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
    with publish._process._lock:  # as if another thread held it
        codes = [_in_child(with_a_group_of_its_own)]
        worlds.init("gloo")
        codes += [_in_child(with_the_parents_group)]
    untouched = read(path)["pid"] == os.getpid()
    with reloadpg.offloaded():
        pass
    record = until(lambda: (found := read(path))["status"]["cycles"] == 1 and found)
    return codes, untouched, record["pid"] == os.getpid(), read(own / "rank-0.json")["rank"]


def test_a_forked_child_does_not_write_its_parents_file(tmp_path: Path) -> None:
    """It has no publishing thread until it is a rank itself. The parent continues."""
    assert run_ranks(_fork, 1, args=(str(tmp_path),)) == [([0, 0], True, True, 0)]


@pytest.mark.parametrize("ends", ["right after an operation", "in order"])
def test_the_last_record_is_written_at_process_exit(ends: str, tmp_path: Path) -> None:
    """Also of a process that exits right after an operation. The last figures are kept."""
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


def test_nothing_is_published_without_the_variable_or_without_a_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_no_other_thread_reads_the_status_during_an_operation(tmp_path: Path) -> None:
    """The memory of communicators must not be read while they may be released."""
    assert run_ranks(_while_busy, 1, args=(str(tmp_path),)) == [([], True)]


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


def test_an_operation_is_published_when_it_begins(tmp_path: Path) -> None:
    """Even if no heartbeat has seen the groups before."""
    assert run_ranks(_first_offload, 1, args=(str(tmp_path),)) == [("live", 1, "offload")]


def test_an_exporter_that_fails_is_disabled_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def _without_packages(rank, world_size):
    sys.modules["prometheus_client"] = sys.modules["opentelemetry"] = None
    observability.export_spans()()
    with pytest.raises(ImportError) as caught:
        observability.ReloadpgCollector()
    return str(caught.value)


def test_spans_and_metrics_without_their_packages() -> None:
    """Spans do nothing; metrics name the extra to install."""
    (message,) = run_ranks(_without_packages, 1)
    assert "pip install 'reloadpg[prometheus]'" in message


def _files_of_a_job(rank, world_size, directory):
    os.umask(0)
    publish.publish_status(Path(directory, "status"))
    _single_rank()
    reloadpg.offload()
    reloadpg.reload()
    until(Path(directory, "status", "trace-rank-0.json").exists)
    dist.destroy_process_group()


def test_files_are_private_and_replace_links(tmp_path: Path) -> None:
    """With any umask. The target of a link is unchanged."""
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
