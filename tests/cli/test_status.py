"""``status``: the ranks of a running job as a table."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from cli.rank_files import record, running, write_rank

from reloadpg.cli import main
from reloadpg.cli.status import WAITING_S, JobView, page
from reloadpg.observability.record import Reading, decoded, read_directory
from reloadpg.processes import process_table, start_of
from reloadpg.reports import OperationStatus


def read(rank, size, now=None, **values):
    """A rank's record, as it is read now."""
    written = json.dumps(record(rank, size, **values))
    return decoded(written).looked_up(time.time() if now is None else now)


def view(*ranks, now=None, **values):
    """A job whose ranks have these records, read now."""
    return JobView(Reading(ranks, time=time.time() if now is None else now, **values))


def messages(job):
    return {one.check: one.message for one in job.findings}


# -- the page ------------------------------------------------------------------------------------

AT = re.compile(r"\d\d:\d\d:\d\d")
PAGE = """\
missing        rank 4 of a job of 8: no readable record
               -> check that it runs, and that reloadpg is installed in it with the same status \
directory
not installed  rank 2
               -> call reloadpg.install() on every rank, before the groups are created
failed         rank 1
               -> fix the cause, then call reload() on all ranks
silent         rank 6 (pid 106): last update at AT (2 min ago)
               -> it may hang in a call that holds Python's GIL, have ended, or be on a host whose \
clock is behind: py-spy dump --pid 106 on node0
error          rank 0: E: 0
error          ranks 1, 5: RebuildError: out of memory
error          rank 3: E: 3
error          1 more error: see the status files

rank  state          updated  host   gen  offload ms  reload ms  groups  held MiB
----  -------------  -------  -----  ---  ----------  ---------  ------  --------
   0  live           0 s      node0    3          20         40       2       200
   1  failed         0 s      node0    3          20         40       2       200
   2  not installed  0 s      node0    0          20         40       0         -
   3  live           0 s      node1    2          20         40       2       200
   5  live           3 s      node0    3          20         40       2       200
   6  silent         2 min    node0    3          20         40       2       200
   7  live           0 s      node0    3          20         40       2       200"""


def test_problems_are_shown_with_remedies_above_the_table():
    """An error of several ranks is shown once, and few different ones.

    A record that is late once is not silent.
    """
    now, memory = time.time(), "RebuildError: out of memory"
    job = view(
        read(0, 8, error="E: 0"),
        read(1, 8, state="failed", error=memory),
        read(2, 8, state="not installed"),
        read(3, 8, error="E: 3", generation=2, host="node1"),
        read(5, 8, error=memory, time=now - 3),
        read(6, 8, time=now - 100),
        read(7, 8, error="E: 7"),
        now=now,
    )
    head, _, shown = page(job).split("\n", 2)
    assert AT.sub("AT", shown) == PAGE
    assert head.endswith(": 7 of 8 ranks: 4 live, 1 failed, 1 not installed, 1 silent")
    assert not job.ok


def test_a_failed_set_of_groups_is_a_problem():
    job = view(*(read(rank, 2, state="trainer failed, engine live") for rank in range(2)))
    assert messages(job)["failed"] == "ranks 0-1"
    assert "2 of 2 ranks: 2 trainer failed, engine live" in page(job)


def test_a_job_without_problems_has_a_short_page():
    job = view(read(0, 2), read(1, 2))
    assert messages(job) == {}
    assert len(page(job).splitlines()) == 2 + 4
    assert job.ok


def test_bypassed_groups_of_one_rank_with_a_communicator_are_counted():
    """They are no problem: the job runs, and an offload leaves their memory."""
    job = view(read(0, 3, alone=2), read(1, 3), read(2, 3, alone=1))
    expected = "ranks 0, 2: 3 bypassed groups of one rank with a communicator"
    assert messages(job) == {"one rank": expected}
    assert "install(min_size=1)" in page(job)
    assert job.ok


# -- an operation in progress --------------------------------------------------------------------


def test_a_running_operation_shows_its_progress():
    """Over all ranks, at the top of the page. It is no problem while no rank waits."""
    done = running(groups_done=9, doing="group 5")
    job = view(read(0, 2, running=running()), read(1, 2, running=done))
    assert messages(job)["groups"] == "12 of 24 groups done"
    assert job.ok
    lines = page(job).splitlines()
    assert lines[0].endswith("2 of 2 ranks: 2 in offload")
    assert lines[2].split()[:3] == ["offload", "in", "progress"]
    assert job.in_progress.missing == {}


@pytest.mark.parametrize("waited", [WAITING_S - 1.0, WAITING_S + 1.0])
def test_a_long_wait_is_a_problem(waited):
    """Of half a minute. The page always shows what the others do."""
    now = time.time()
    waits = running(waiting=True, phase="released", since=now - waited)
    job = view(
        read(0, 5, time=now, running=waits),
        read(1, 5, running=running(phase="released", doing="group 5")),
        read(2, 5, running=running(sequence=3)),
        read(3, 5, running=running(operation="reload", sequence=3)),
        read(4, 5, state="not installed"),
        now=now,
    )
    assert job.in_progress.missing == {
        "still working: group 5": [1],
        "in another offload": [2],
        "in reload": [3],
        "reloadpg not installed": [4],
    }
    assert job.in_progress.stuck is (waited > WAITING_S)
    levels = {one.level for one in job.findings if one.check == "waits for"}
    assert levels == {"problem" if waited > WAITING_S else ""}


@pytest.mark.parametrize("why", ["gone", "stopped", "silent", "exited", "not seen"])
def test_a_wait_for_a_lost_rank_is_a_problem_at_once(why):
    now = time.time()
    ranks = [read(0, 2, time=now, running=running(waiting=True, since=now))]
    if why != "not seen":
        ranks.append(replace(read(1, 2), absent=why))
    job = view(*ranks)
    assert job.in_progress.missing == {why: [1]}
    assert not job.ok
    assert [one.level for one in job.findings if one.check == "waits for"] == ["problem"]


def test_an_ended_process_of_this_host_is_gone_at_once_though_its_record_is_new():
    """By its start time, if the id is in use again; a process of a container is taken to run."""
    now, table = time.time(), process_table()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        known = {"pid": process.pid, "started": start_of(process.pid), "process_table": table}
        new = read(0, 1, time=now, **known)
        assert new.absent == ""
        assert replace(new, started="1").looked_up(now).absent == "gone"
        process.kill()
        while start_of(process.pid) and new.looked_up(now).absent != "gone":
            time.sleep(0.01)
        assert new.looked_up(now).absent == "gone"  # not reaped yet
    assert new.looked_up(now).absent == "gone"
    assert replace(new, process_table="another").looked_up(now).absent == ""
    assert replace(new, absent="exited").looked_up(now).absent == "exited"


# -- reading ------------------------------------------------------------------------------------


def test_a_record_is_read_back_with_its_types():
    written = replace(
        read(0, 2, timeout_s=5.0),
        running=OperationStatus("offload", 4, "enter", True, 1.0, 2.0),
    )
    assert decoded(written.to_json()) == written


STRANGE = {
    "half": b'{"rank": 0, "sta',
    "list": b"[1, 2]",
    "no rank": b'{"state": "live"}',
    "another version": json.dumps(record(0, 2, version=2)).encode(),
    "binary": bytes(range(256)),
    "text": json.dumps(record(0, 2, time="now")).encode(),
}


@pytest.mark.parametrize("content", STRANGE.values(), ids=STRANGE)
def test_an_unreadable_file_is_named_and_the_others_are_read(tmp_path, content):
    write_rank(tmp_path, 1, 2)
    (tmp_path / "rank-0.json").write_bytes(content)
    reading = read_directory(tmp_path)
    assert [one.rank for one in reading.ranks] == [1]
    assert len(reading.failures) == 1
    assert reading.failures[0].startswith("rank-0.json: not a record of this version of reloadpg: ")
    assert "unreadable  rank-0.json: " in page(JobView(reading))
    said = messages(JobView(reading))
    assert said["missing"] == "rank 0 of a job of 2: no readable record"


def test_a_record_with_a_strange_time_is_shown():
    assert "live" in page(view(read(0, 2, time=1e300)))


def test_records_of_an_earlier_larger_job_are_ignored(tmp_path):
    """Of two records of a rank the later one counts."""
    for rank in (0, 2, 3):
        write_rank(tmp_path, rank, 4, host="old", time=time.time() - 5000)
    (tmp_path / "rank-00.json").write_text(json.dumps(record(0, 2, host="new")))
    write_rank(tmp_path, 1, 2)
    job = JobView(read_directory(tmp_path))
    assert [(one.rank, one.host) for one in job.ranks] == [(0, "new"), (1, "node0")]
    assert (job.reading.world_size, job.reading.missing) == (2, [])
    assert job.ok


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    """The status directory of a job of two ranks."""
    write_rank(tmp_path, 0, 2)
    write_rank(tmp_path, 1, 2)
    return tmp_path


def test_the_directory_is_an_argument_or_a_variable(job, monkeypatch, capsys):
    """Without either, exit code 2 and what to set."""
    monkeypatch.setenv("RELOADPG_STATUS_DIR", str(job))
    assert main(["status"]) == 0
    assert "2 of 2 ranks: 2 live" in capsys.readouterr().out
    monkeypatch.delenv("RELOADPG_STATUS_DIR")
    assert main(["status"]) == 2
    assert "set RELOADPG_STATUS_DIR" in capsys.readouterr().err
    assert main(["status", str(job)]) == 0


def test_a_job_that_has_exited_is_exit_code_1(job, capsys):
    """An orderly end is a warning, not a problem."""
    for rank in range(2):
        write_rank(job, rank, 2, absent="exited")
    assert main(["status", str(job)]) == 1
    written = capsys.readouterr().out
    assert written.splitlines()[0].endswith("2 of 2 ranks: 2 exited")
    (finding,) = JobView(read_directory(job)).findings
    assert (finding.level, finding.check) == ("warning", "exited")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "no rank of a job was found in {}"),
        ("missing", "{} does not exist"),
        ("file", "{} is not a directory"),
    ],
)
def test_a_directory_without_ranks_is_exit_code_1(tmp_path, capsys, name, words):
    (tmp_path / "file").touch()
    assert main(["status", str(tmp_path / name)]) == 1
    written = capsys.readouterr().out
    assert words.format(tmp_path / name) in written
    assert "set RELOADPG_STATUS_DIR" in written
