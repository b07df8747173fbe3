"""``trace`` draws a job's operations; the SVG is parsed here."""

from __future__ import annotations

import json
import re
import threading
import xml.etree.ElementTree as ElementTree

import pytest
import worlds
from rank_files import record, running, write_rank

import reloadpg
from reloadpg.cli import main
from reloadpg.cli.timeline import Run, clusters, draw
from reloadpg.cli.trace import read_runs
from reloadpg.observability import TraceWriter, publish_status
from reloadpg.reports import Span
from reloadpg.testing import run_ranks, simulated

pytestmark = pytest.mark.timeout(300)
SVG = "{http://www.w3.org/2000/svg}"


def texts(path):
    """The texts of a picture, with their heights."""
    found = {}
    for one in ElementTree.parse(path).iter(f"{SVG}text"):
        at = re.search(r"translate\([-\d.]+ ([-\d.]+)\)", one.get("transform", ""))
        found["".join(one.itertext()).strip()] = float(at[1] if at else one.get("y"))
    return found


def run(rank, start, length, operation="offload", **values):
    """An operation that waits first and then releases groups."""
    half = length / 2 * 1e3
    spans = [Span("wait.enter", 0.0, half), Span("groups", half, half)]
    return Run(rank, operation, start, start + length, spans, **values)


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
    return [(one.operation, one.started_at, one.released_bytes) for one in reports]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    directory = tmp_path_factory.mktemp("job")
    return directory, run_ranks(_job, 2, args=(str(directory),), timeout=240)


@pytest.mark.parametrize("where", ["status", "traces", "traces/trace-rank1.json"])
def test_each_operation_of_a_job_is_read_once(job, where):
    """A status directory also has traces."""
    directory, reports = job
    runs, named, failures = read_runs(directory / where)
    assert failures == []
    ranks = (1,) if where.endswith("json") else (0, 1)
    assert named == {*ranks}
    for rank in ranks:
        mine = sorted((one for one in runs if one.rank == rank), key=lambda one: one.start)
        assert [one.operation for one in mine] == [operation for operation, _, _ in reports[rank]]
        assert [one.start for one in mine] == pytest.approx([at for _, at, _ in reports[rank]])
        assert [bool(one.error) for one in mine] == [False] * 4 + [True]
        for one, (operation, _, released) in zip(mine, reports[rank], strict=True):
            assert one.source == "simulated"
            levels = [size for _, size in sorted(one.memory)]
            assert all(one.start - 1e-3 <= at <= one.end + 1e-3 for at, _ in one.memory)
            if operation == "offload" and released is not None:
                assert levels[0] - levels[-1] == released
            assert all(min(span.start_ms, span.ms) >= 0 for span in one.spans)
            assert any(span.is_wait for span in one.spans)
    assert len(runs) == 5 * len(ranks)
    assert max(released or 0 for _, _, released in reports[0]) > 0


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_written(job, tmp_path, capsys, suffix):
    """With a lane per rank, the failure, and memory. Equal operations give an equal picture."""
    output = tmp_path / f"timeline.{suffix}"
    assert main(["trace", str(job[0] / "status"), "-o", str(output), "--last", "4"]) == 0
    assert "4 operations. The last 4 of 5 operations" in capsys.readouterr().out
    written = output.read_bytes()
    assert {"svg": b"<svg ", "png": b"PNG"}[suffix] in written
    if suffix == "svg":
        drawn = texts(output)
        assert {"rank 0", "rank 1", "failed", "waits for other ranks", "offload failed"} <= {*drawn}
        assert "memory in use (simulated)" in drawn
        assert any("ZeroDivisionError" in one for one in drawn)
        assert main(["trace", str(job[0] / "status"), "-o", str(output), "--last", "4"]) == 0
        assert output.read_bytes() == written


# -- the picture ----------------------------------------------------------------------------------


def test_a_rank_that_did_not_call_is_marked_in_its_lane(tmp_path):
    """Where the others failed, with the first line of each error."""
    error = "RebuildError: <ProcessGroup> & 'others'\nmore"
    ended = [run(rank, 1000.0, 0.4) for rank in range(3)]
    failed = [run(rank, 1060.4, 0.4, "reload", error=error * (rank == 2)) for rank in (0, 2)]
    output = tmp_path / "picture.svg"
    draw([*ended, *failed], range(3), output)
    drawn = texts(output)
    assert drawn["did not call reload"] == pytest.approx(drawn["rank 1"], abs=5)
    assert drawn["rank 2"] < drawn["RebuildError: <ProcessGroup> & 'others'"]
    assert {"offload 400 ms", "reload failed", "offloaded", "60.0 s"} <= {*drawn}
    draw(ended, range(3), output)
    assert not any("did not call" in one for one in texts(output))


def test_consecutive_operations_have_separate_axes(tmp_path):
    """No error is drawn over another one."""
    done = [run(rank, 1000.0, 0.05) for rank in range(3)]
    failed = [run(rank, 1000.1, 0.05, "reload", error=f"First of {rank}") for rank in range(3)]
    again = [run(rank, 1000.2, 5.0, error=f"Second of {rank}") for rank in (0, 1)]
    assert clusters([*again, *failed, *done]) == [done, failed, again]
    first, at_once, later = run(0, 1000.0, 0.05), run(0, 1000.052, 0.05), run(1, 1001.0, 0.05)
    assert clusters([first, at_once, later]) == [[first], [at_once], [later]]
    output = tmp_path / "picture.svg"
    draw([*done, *failed, *again], range(3), output)
    drawn = texts(output)
    assert {"offload 50 ms", "reload failed", "offload failed"} <= {*drawn}
    assert {f"First of {rank}" for rank in range(3)} <= {*drawn}
    assert drawn["did not call offload"] == pytest.approx(drawn["rank 2"], abs=5)


# -- the files ------------------------------------------------------------------------------------


def test_an_operation_in_progress_ends_at_the_last_heartbeat(tmp_path):
    """From the status files alone."""
    waits = running(waiting=True, phase="released", started_at=1000.0, since=1004.0)
    write_rank(tmp_path, 0, 3, time=1010.0, running=waits, last_report=None)
    works = running(started_at=1001.0, since=1003.0)
    write_rank(tmp_path, 1, 3, time=1009.0, running=works, last_report=None)
    (first, second), ranks, _ = read_runs(tmp_path)
    assert ranks == {0, 1, 2}  # the third has no file
    assert (first.start, first.end, first.running) == (1000.0, 1010.0, True)
    assert first.spans == [Span("wait.released", 4000.0, 6000.0)]
    assert (second.end, second.spans) == (1009.0, [])
    output = tmp_path / "picture.svg"
    draw([first, second], ranks, output)
    drawn = texts(output)
    assert "not ended" in drawn
    assert drawn["did not call offload"] == pytest.approx(drawn["rank 2"], abs=5)


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"traceEvents": [5, {"pid": 0, "ts": "x"}]}'])
def test_unreadable_files_are_named(tmp_path, capsys, content):
    """Without an operation, nothing is written: exit code 1."""
    (tmp_path / "other.json").write_bytes(content)
    (tmp_path / "rank-0.json").write_text(json.dumps(record(0, 1, last_report=[1])))
    output = tmp_path / "picture.svg"
    assert main(["trace", str(tmp_path), "-o", str(output)]) == 1
    said = capsys.readouterr().err
    assert "no offload or reload was found" in said
    assert ("unreadable: other.json: " in said) == (b"traceEvents" not in content)
    assert ("other.json: not a trace file of reloadpg" in said) == (content == b"[1]")
    assert not output.exists()


def test_invalid_arguments_are_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RELOADPG_STATUS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["trace"]) == 2
    assert "RELOADPG_STATUS_DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        main(["trace", ".", "-o", "picture.html"])
    assert wrong.value.code == 2
    assert "does not end in .svg, .png or .pdf" in capsys.readouterr().err


def test_only_the_first_ranks_of_a_large_job_are_drawn(tmp_path, capsys):
    """The picture and the output say so."""
    for rank in range(5):
        write_rank(tmp_path, rank, 5, running=running())
    output = tmp_path / "picture.svg"
    assert main(["trace", str(tmp_path), "-o", str(output), "--ranks", "2"]) == 0
    assert "The first 2 of 5 ranks" in capsys.readouterr().out
    drawn = texts(output)
    assert [one for one in drawn if one.startswith("rank ")] == ["rank 0", "rank 1"]
    assert any("The first 2 of 5 ranks" in one for one in drawn)
