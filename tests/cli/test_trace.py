"""``trace`` shows a job's operations."""

from __future__ import annotations

import json
import threading

import pytest
from helpers import worlds
from helpers.rank_files import record, running, write_rank

import reloadpg
from reloadpg.cli import main
from reloadpg.cli.trace import operations, page, read_operations
from reloadpg.observability import TraceWriter, publish_status
from reloadpg.reports import Report, Span
from reloadpg.testing import run_ranks, simulated

pytestmark = pytest.mark.timeout(300)


def report(rank, start, length, operation="offload", **values):
    """An operation that waits first and then releases groups."""
    half = length / 2 * 1e3
    spans = (Span("wait.enter", 0.0, half), Span("groups", half, half))
    given = {"rank": rank, "started_at": start, "total_ms": length * 1e3, "spans": spans, **values}
    return Report(operation, True, 1, **given)


def texts(shown, ranks):
    """The page, with one space between words."""
    return [" ".join(line.text.split()) for line in page(shown, ranks)]


# -- a real job -----------------------------------------------------------------------------------


def _job(rank, world_size, directory):
    """Two cycles and a failure on the simulated accelerator; published and traced."""
    simulated.register()
    reloadpg.install()
    end = publish_status(f"{directory}/status")
    writer = TraceWriter(f"{directory}/traces/trace.json")
    worlds.init(simulated.NAME)
    reports = []
    reloadpg.on_report(reports.append)
    for _ in range(2):
        reloadpg.offload()
        reloadpg.reload(connect="eager")
    remove = reloadpg.on_offload(lambda: 1 / 0)
    with pytest.raises(reloadpg.ReloadpgError):
        reloadpg.offload()
    remove()
    end()
    for thread in threading.enumerate():
        if thread.name == "reloadpg-status":  # a slow machine may let it write longer than end()
            thread.join()
    writer.close()
    return reports


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    directory = tmp_path_factory.mktemp("job")
    return directory, run_ranks(_job, 2, args=(str(directory),), timeout=240)


@pytest.mark.parametrize("where", ["status", "traces", "traces/trace-rank1.json"])
def test_each_operation_of_a_job_is_read_once(job, where):
    """A status directory also has traces."""
    directory, reports = job
    shown, named, failures = read_operations(directory / where)
    assert failures == []
    ranks = (1,) if where.endswith("json") else (0, 1)
    assert named == {*ranks}
    assert [{call.rank for call in operation} for operation in shown] == [{*ranks}] * 5
    for rank in ranks:
        mine = [call for operation in shown for call in operation if call.rank == rank]
        for read, returned in zip(mine, reports[rank], strict=True):
            assert read.operation == returned.operation
            assert read.started_at == pytest.approx(returned.started_at)
            assert read.phases_ms == pytest.approx(returned.phases_ms, abs=1e-3)
            assert read.released_bytes == returned.released_bytes
            assert read.memory_source == "simulated"
        assert [bool(call.error) for call in mine] == [False] * 4 + [True]
    assert max(call.released_bytes or 0 for call in reports[0]) > 0


def test_the_page_of_a_job(job, capsys):
    """Memory before and after, waits, and the failure."""
    assert main(["trace", str(job[0] / "status"), "--last", "3"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == f"reloadpg trace: {job[0]}/status: 3 operations of 5"
    heads = [line for line in lines if " at " in line and line.split()[0] in ("offload", "reload")]
    assert [head.split()[0] for head in heads] == ["offload", "reload", "offload"]
    assert heads[2].endswith("failed")
    assert sum("rank began ms ms waits ms simulated MiB phases note" in line for line in lines) == 3
    assert sum(" -> " in line for line in lines) >= 4
    assert any("ZeroDivisionError" in line for line in lines)


# -- the page -------------------------------------------------------------------------------------


def test_a_rank_that_did_not_call_has_a_row():
    """Where the others failed, with the first line of each error."""
    error = "RebuildError: <ProcessGroup> & 'others'\nmore"
    ended = [report(rank, 1000.0, 0.4) for rank in range(3)]
    failed = [report(rank, 1060.4, 0.4, "reload", error=error * (rank == 2)) for rank in (0, 2)]
    lines = texts(operations([*failed, *ended]), range(3))
    assert "0 0.00 400.00 200.00 groups 200.0" in lines
    assert "2 0.00 400.00 200.00 groups 200.0 RebuildError: <ProcessGroup> & 'others'" in lines
    assert "1 - - - did not call it" in lines
    assert not any("did not call" in line for line in texts([ended], range(4)))


def test_calls_of_one_rank_are_separate_operations():
    """Also where they follow each other at once, and where one rank takes long."""
    done = [report(rank, 1000.0, 0.05) for rank in range(3)]
    failed = [report(rank, 1000.1, 0.05, "reload") for rank in range(3)]
    again = [report(rank, 1000.2, 5.0) for rank in (0, 1)]
    assert operations([*again, *failed, *done]) == [done, failed, again]
    first, at_once, later = (
        report(0, 1000.0, 0.05),
        report(0, 1000.052, 0.05),
        report(1, 1001.0, 0.05),
    )
    assert operations([first, at_once, later]) == [[first], [at_once], [later]]


# -- the files ------------------------------------------------------------------------------------


def test_an_operation_in_progress_ends_at_the_last_heartbeat(tmp_path):
    """From the status files alone."""
    waits = running(waiting=True, phase="released", started_at=1000.0, since=1004.0)
    write_rank(tmp_path, 0, 3, time=1010.0, running=waits, last_report=None)
    works = running(started_at=1001.0, since=1003.0)
    write_rank(tmp_path, 1, 3, time=1009.0, running=works, last_report=None)
    shown, ranks, _ = read_operations(tmp_path)
    assert ranks == {0, 1, 2}  # the third has no file
    ((first, second),) = shown
    assert (first.started_at, first.total_ms) == (1000.0, 10_000.0)
    assert first.spans == (Span("wait.released", 4000.0, 6000.0),)
    assert (second.total_ms, second.spans) == (8000.0, ())
    lines = texts(shown, sorted(ranks))
    assert lines[1].endswith("runs for 10000.0 ms")
    assert lines[-3:] == [
        "0 0.00 10000.00 6000.00 not ended",
        "1 1000.00 8000.00 0.00 not ended",
        "2 - - - did not call it",
    ]


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"traceEvents": [5, {"pid": 0, "ts": "x"}]}'])
def test_unreadable_files_are_named(tmp_path, capsys, content):
    """Without an operation: exit code 1."""
    (tmp_path / "other.json").write_bytes(content)
    (tmp_path / "rank-0.json").write_text(json.dumps(record(0, 1, last_report=[1])))
    assert main(["trace", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "no offload or reload was found" in said
    assert ("unreadable: other.json: " in said) == (b"traceEvents" not in content)
    assert ("other.json: not a trace file of reloadpg" in said) == (content == b"[1]")


def test_without_a_directory_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.delenv("RELOADPG_STATUS_DIR", raising=False)
    assert main(["trace"]) == 2
    assert "RELOADPG_STATUS_DIR" in capsys.readouterr().err


def test_only_the_first_ranks_of_a_large_job_are_shown(tmp_path, capsys):
    """The page says so."""
    for rank in range(5):
        write_rank(tmp_path, rank, 5, running=running())
    assert main(["trace", str(tmp_path), "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("1 operation of 1, the first 2 of 5 ranks")
    assert [line.split()[0] for line in lines[5:]] == ["0", "1"]
