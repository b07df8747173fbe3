"""``trace``: a picture of a job's operations, read back as what it is, an XML document."""

from __future__ import annotations

import json
import random
import re
import threading
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
import worlds
from rank_files import record, running, write_rank

import reloadpg
from reloadpg.cli import main
from reloadpg.cli.timeline import Part, Run, drawn
from reloadpg.cli.trace import read_runs
from reloadpg.observability import TraceWriter, publish_status
from reloadpg.testing import run_ranks, simulated

pytestmark = pytest.mark.timeout(180)
SVG = "{http://www.w3.org/2000/svg}"


def elements(picture, tag):
    return list(ElementTree.fromstring(picture).iter(f"{SVG}{tag}"))


def texts(picture):
    return ["".join(one.itertext()) for one in elements(picture, "text")]


def titles(picture):
    return [one.findtext(f"{SVG}title") for one in elements(picture, "rect") if len(one)]


def run(rank, start, length, operation="offload", **values):
    """An operation that waits first, and then releases groups."""
    middle = start + length / 2
    parts = [Part("wait.enter", start, middle), Part("groups", middle, start + length)]
    values.setdefault("parts", parts)
    return Run(rank, operation, start, start + length, **values)


# -- a real job -----------------------------------------------------------------------------------


def _job(rank, world_size, directory):
    """Two cycles and a failure, with memory that comes and goes; published and traced."""
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
    return directory, run_ranks(_job, 2, args=(str(directory),), timeout=120)


@pytest.mark.parametrize("where", ["status", "traces", "traces/trace-rank1.json"])
def test_the_files_of_a_job_have_all_operations_once(job, where):
    """The status directory has a trace too; its status files add the last operation once only."""
    directory, reports = job
    runs, failures = read_runs(directory / where)
    assert failures == []
    ranks = (1,) if where.endswith("json") else (0, 1)
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
            assert all(one.start - 1e-3 <= part.start <= part.end for part in one.parts)
            assert any(part.is_wait for part in one.parts)
    assert len(runs) == 5 * len(ranks)
    assert max(released or 0 for _, _, released in reports[0]) > 0


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_picture_is_written(job, tmp_path, capsys, suffix):
    """A lane a rank, phases and waits with their times, the failure, and memory as a line."""
    output = tmp_path / f"timeline.{suffix}"
    assert main(["trace", str(job[0] / "status"), "-o", str(output), "--last", "4"]) == 0
    assert "8 operations. The last 4 of 5 operations" in capsys.readouterr().out
    written = output.read_text()
    assert written.startswith("<!doctype html>" if suffix == "html" else "<svg ")
    picture = re.search(r"<svg .*</svg>", written, re.DOTALL)[0]
    words = texts(picture)
    assert [one for one in words if one.startswith("rank ")] == ["rank 0", "rank 1"]
    assert {"failed", "memory in use (simulated)"} <= {*words}  # the legend
    assert sum("offload: " in one and "; failed: " in one for one in titles(picture)) == 2
    for rank in (0, 1):
        for part in ("reload, groups: ", "offload, wait.enter: ", "reload: "):
            assert any(title.startswith(f"rank {rank}, {part}") for title in titles(picture))
    hatched = [one for one in elements(picture, "rect") if one.get("fill") == "url(#wait)"]
    assert len(hatched) > 8
    solid = [one for one in elements(picture, "polyline") if one.get("stroke-width") == "1.6"]
    assert len(solid) >= 8


# -- the picture ----------------------------------------------------------------------------------


def boxes(picture):
    """Where the texts are, by a wide guess at the widths of letters."""
    for one in elements(picture, "text"):
        size, words = float(one.get("font-size")), "".join(one.itertext())
        width = 0.6 * size * len(words)
        left = (
            float(one.get("x"))
            - {"start": 0, "middle": 0.5, "end": 1}[one.get("text-anchor")] * width
        )
        yield words, left, float(one.get("y")) - 0.75 * size, left + width, float(one.get("y"))


def any_job(seed):
    """Some ranks and operations of all lengths, from a millisecond to minutes."""
    chance = random.Random(seed)
    names = ("wait.enter", "callbacks", "device", "store", "groups", "collect", "another")
    ranks, at, runs = chance.choice([1, 2, 3, 16, 40]), 1_700_000_000.0, []
    for number in range(chance.randrange(1, 8)):
        length = 10 ** chance.uniform(-3, 2)
        for rank in range(ranks):
            late = length * chance.random()
            step = (length * 1.01 - late) / len(names)
            starts = [at + late + step * number for number in range(len(names))]
            parts = [Part(n, a, a + step) for n, a in zip(names, starts, strict=True)]
            memory = [(at + late, chance.randrange(1 << 34)), (at + length, 5)]
            runs.append(
                run(
                    rank,
                    at + late,
                    length * 1.01 - late,
                    "offload" if number % 2 == 0 else "reload",
                    parts=parts[: chance.randrange(1, 8)],
                    memory=memory if seed % 2 else (),
                    source="device" if seed % 2 else "",
                    error="failed" if chance.random() < 0.1 else "",
                    running=number == 0 and chance.random() < 0.1,
                )
            )
        at += length * 1.01 + 10 ** chance.uniform(-4, 4)
    return runs


@pytest.mark.parametrize("seed", range(24))
def test_no_text_covers_another_and_nothing_is_outside(seed):
    """Whatever the lengths are, and however many ranks."""
    picture = drawn(any_job(seed), note="The last 6 of 600 operations")
    root = ElementTree.fromstring(picture)
    width, height = float(root.get("width")), float(root.get("height"))
    placed = list(boxes(picture))
    for words, left, top, right, bottom in placed:
        assert 0 <= left <= right <= width, words
        assert 0 <= top <= bottom <= height, words
    for one, other in combinations(placed, 2):
        beside = one[3] <= other[1] or other[3] <= one[1]
        assert beside or one[4] <= other[2] or other[4] <= one[2], (one, other)
    for shape in elements(picture, "rect"):
        x, y = float(shape.get("x", 0)), float(shape.get("y", 0))
        assert x + float(shape.get("width")) <= width + 1
        assert y + float(shape.get("height")) <= height


def test_lengths_are_in_proportion_within_an_operation():
    """A wait of a quarter of the time is a quarter of the bar; the gap says how long it was."""
    parts = [Part("wait.enter", 1000.0, 1000.1), Part("groups", 1000.1, 1000.4)]
    later = run(0, 1060.4, 0.4, "reload", parts=parts[:0])
    picture = drawn([run(0, 1000.0, 0.4, parts=parts), later])
    width = {
        one.findtext(f"{SVG}title"): float(one.get("width"))
        for one in elements(picture, "rect")
        if len(one)
    }
    whole = width["rank 0, offload: 400 ms"]
    assert width["rank 0, offload, wait.enter: 100 ms"] == pytest.approx(whole / 4, abs=0.2)
    assert width["rank 0, offload, groups: 300 ms"] == pytest.approx(whole * 3 / 4, abs=0.2)
    assert {"60.0 s", "offloaded"} <= {*texts(picture)}


def test_words_of_a_job_are_escaped():
    """An error may hold anything."""
    error = "RebuildError: <ProcessGroup> & \"others\" 'failed'"
    picture = drawn([run(0, 0.0, 1.0, error=error)])
    (title,) = [one for one in titles(picture) if "failed" in one]
    assert title.endswith(error)
    assert "offload failed" in texts(picture)


# -- the files ------------------------------------------------------------------------------------


def test_an_operation_in_progress_is_drawn_up_to_the_last_sign_of_life(tmp_path):
    """From the status files alone: who waits since when, and who works."""
    waits = running(waiting=True, phase="released", started_at=1000.0, since=1004.0)
    write_rank(tmp_path, 0, 2, time=1010.0, running=waits, last_report=None)
    works = running(started_at=1001.0, since=1003.0)
    write_rank(tmp_path, 1, 2, time=1009.0, running=works, last_report=None)
    first, second = read_runs(tmp_path)[0]
    assert (first.start, first.end, first.running) == (1000.0, 1010.0, True)
    assert first.parts == [Part("wait.released", 1004.0, 1010.0)]
    assert (second.end, second.parts) == (1009.0, [])
    picture = drawn([first, second])
    assert "rank 0, offload: 10.0 s, not ended" in titles(picture)
    assert "not ended" in texts(picture)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"traceEvents": 5}', b'{"traceEvents": [5, {"pid": 0, "ts": "x"}]}'],
)
def test_files_of_others_are_no_operations(tmp_path, capsys, content):
    """Named if they cannot be read; without an operation nothing is written: exit code 1."""
    (tmp_path / "other.json").write_bytes(content)
    (tmp_path / "rank-0.json").write_text(json.dumps(record(0, 1, last_report=[1])))
    output = tmp_path / "picture.svg"
    assert main(["trace", str(tmp_path), "-o", str(output)]) == 1
    said = capsys.readouterr().err
    assert "no offload or reload was found" in said
    assert ("unreadable: other.json: " in said) == (content in (b"", b"{"))
    assert not output.exists()


def test_what_is_asked_for_must_be_possible(tmp_path, monkeypatch, capsys):
    """No job, or a picture of another kind: exit code 2, and what to do."""
    monkeypatch.delenv("RELOADPG_STATUS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["trace"]) == 2
    assert "RELOADPG_STATUS_DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        main(["trace", ".", "-o", "picture.png"])
    assert wrong.value.code == 2
    assert "does not end in .svg or .html" in capsys.readouterr().err


def test_of_a_large_job_the_first_ranks_are_drawn(tmp_path, capsys):
    """And that is said on the picture."""
    for rank in range(5):
        write_rank(tmp_path, rank, 5)
    output = tmp_path / "picture.svg"
    assert main(["trace", str(tmp_path), "-o", str(output), "--ranks", "2"]) == 0
    assert "The first 2 of 5 ranks" in capsys.readouterr().out
    words = texts(output.read_text())
    assert [one for one in words if one.startswith("rank ")] == ["rank 0", "rank 1"]
    assert any("The first 2 of 5 ranks" in one for one in words)
