"""The pytest plugin, used as another project uses it: in a pytest of its own, on real ranks.

Each suite in ``suites`` runs once, in a process; the tests here look at what came of its tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SUITES = Path(__file__).parent / "suites"
SHELL = {"autoinstall": {"RELOADPG_AUTOINSTALL": "1"}}
"""What the shell of a suite has set."""


@dataclass(frozen=True)
class Outcome:
    """How one test of a suite ended: passed, failed, error or skipped, and the text of it."""

    how: str
    text: str


@dataclass(frozen=True)
class Suite:
    tests: dict[str, Outcome]
    output: str
    records: Path

    def __getitem__(self, name: str) -> Outcome:
        return self.tests[name]


def run_pytest(
    directory: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Pytest in a process of its own, with this plugin alone."""
    environ = {
        **os.environ,
        **(env or {}),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
        "RECORDS": str(directory),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "reloadpg.testing.plugin", "-c", os.devnull),
            *("--rootdir", str(directory), "-p", "no:cacheprovider", "--strict-markers"),
            *("--basetemp", str(directory / "tmp"), *arguments),
        ],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Suite]:
    """Runs a suite of ``suites`` at its first use, and returns what came of it."""
    done: dict[str, Suite] = {}

    def run(name: str) -> Suite:
        if name not in done:
            directory = tmp_path_factory.mktemp(name)
            xml = directory / "results.xml"
            file = SUITES / f"check_{name}.py"
            ran = run_pytest(directory, f"--junitxml={xml}", str(file), env=SHELL.get(name))
            assert xml.exists(), ran.stdout + ran.stderr
            done[name] = Suite(_outcomes(xml), ran.stdout + ran.stderr, directory)
        return done[name]

    return run


def _outcomes(xml: Path) -> dict[str, Outcome]:
    outcomes = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        verdicts = [one for one in case if one.tag in ("failure", "error", "skipped")]
        how = {"failure": "failed"}.get(verdicts[0].tag, verdicts[0].tag) if verdicts else "passed"
        text = "\n".join(f"{one.get('message')}\n{one.text}" for one in verdicts)
        outcomes[str(case.get("name"))] = Outcome(how, text)
    return outcomes


# ---------------------------------------------------------------------------------------------
# the mark ranks


@pytest.mark.parametrize(
    "name",
    [
        "test_the_body_runs_on_ranks",
        "test_values_are_sent[size0]",
        "test_a_method",
        "test_begins_where_all_are_connected",
        "test_has_no_collective",
        "test_run_ranks_is_bound_to_the_test",
        "test_unmarked_runs_here",
    ],
)
def test_what_passes_on_all_ranks_passes(suite: Callable[[str], Suite], name: str) -> None:
    """Functions and methods, with pickled values and the ranks' own fixtures; with a default
    group none begins, and could end, before all ranks are connected."""
    outcome = suite("ranks")[name]
    assert outcome.how == "passed", outcome.text


def test_every_rank_ran_the_body(suite: Callable[[str], Suite]) -> None:
    """Each of the ranks has left its file in the test's temporary folder."""
    (folder,) = (suite("ranks").records / "tmp").glob("test_values_are_sent*0")
    assert sorted(file.name for file in folder.iterdir()) == ["of-0", "of-1", "of-2"]


def test_a_failure_has_the_tracebacks_of_the_ranks(suite: Callable[[str], Suite]) -> None:
    """The failing rank's line with the compared values, its output, and how many failed."""
    outcome = suite("ranks")["test_fails_on_one_rank"]
    assert outcome.how == "failed"
    for text in (
        "1 of 2 ranks failed",
        "===== rank 1: first failure",
        "assert numbers[rank] == 7",
        "AssertionError: assert 2 == 7",
        "words of rank 1",
    ):
        assert text in outcome.text
    assert "words of rank 0" not in outcome.text


def test_a_hang_and_a_death_are_failures(suite: Callable[[str], Suite]) -> None:
    """Within the mark's limit, with the stack of the rank that hangs; with the exit code."""
    hang, death = (suite("ranks")[f"test_{name}_on_one_rank"] for name in ("hangs", "dies"))
    assert (hang.how, death.how) == ("failed", "failed")
    assert "still running at the time limit of 4 s" in hang.text
    assert "in test_hangs_on_one_rank" in hang.text
    assert "exited with code 7" in death.text
    assert suite("ranks")["test_run_ranks_has_a_limit"].how == "failed"
    assert "time limit of 2 s" in suite("ranks")["test_run_ranks_has_a_limit"].text


def test_skips_and_expected_failures_are_the_tests_own(suite: Callable[[str], Suite]) -> None:
    """What all ranks do, the test does; what one does alone is a failure that says so."""
    found = suite("ranks")
    for name in ("test_skips", "test_skips_without_a_collective"):
        assert found[name].how == "skipped"
        assert "no such machine" in found[name].text
    assert found["test_expected_to_fail"].how == "skipped"  # JUnit has no word for xfail
    assert found["test_marked_as_expected_to_fail"].how == "skipped"
    alone = found["test_skips_on_one_rank"]
    assert alone.how == "failed"
    assert "rank 0: skipped only here" in alone.text
    assert "rank 1: passed" in alone.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_argument_that_cannot_be_sent", "'lock' of a test on ranks cannot be pickled"),
        ("test_mark_without_sense", "world_size=0 must be at least 1"),
        ("test_async", "needs a plain test function"),
        ("test_rank_fixture_without_the_mark", "the fixture rank is for tests on ranks"),
        ("test_reloads_without_ranks[as-is]", "needs the mark ranks"),
    ],
)
def test_what_cannot_be_run_says_why(suite: Callable[[str], Suite], name: str, words: str) -> None:
    """And the body is not run."""
    outcome = suite("ranks")[name]
    assert outcome.how in ("failed", "error")
    assert words in outcome.text
    assert "never run" not in outcome.text


def test_unittest_cases_are_refused(suite: Callable[[str], Suite]) -> None:
    """They run by themselves, so the mark would be ignored."""
    outcome = suite("unittest")["test_method"]
    assert outcome.how in ("failed", "error")
    assert "needs a plain test function" in outcome.text


# ---------------------------------------------------------------------------------------------
# what tests leave behind


@pytest.mark.parametrize(
    "name",
    [
        "test_sim_is_set_up[simulated_accelerator0]",
        "test_sim_is_as_before",
        "test_settings_are_taken_back",
        "test_no_leak",
        "test_nothing_left_on_ranks",
    ],
)
def test_clean_tests_pass(suite: Callable[[str], Suite], name: str) -> None:
    """In the test's process and on ranks; settings and faults do not outlast their test."""
    outcome = suite("leaks")[name]
    assert outcome.how == "passed", outcome.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_sim_communicator_left", ["1 communicators still exist"]),
        ("test_leak_around_the_test", ["still in c10d's tables", "C++ still finds a group"]),
        ("test_leak_in_a_block", ["pg_names has 2 entries, 1 before"]),
        (
            "test_reloadable_groups_and_communicators_left_on_ranks",
            [
                "2 of 2 ranks failed",
                "(reloadable, sim, ranks [0, 1]) is still in c10d's tables",
                "reloadable group '0' is not destroyed",
                "still holds a communicator of group '0'",
            ],
        ),
    ],
)
def test_leaks_fail_the_test(suite: Callable[[str], Suite], name: str, words: list[str]) -> None:
    """With what was left, by name."""
    outcome = suite("leaks")[name]
    assert outcome.how in ("failed", "error")
    for text in words:
        assert text in outcome.text


def test_a_failed_body_is_not_asked_for_leaks(suite: Callable[[str], Suite]) -> None:
    """Its own error is what there is to read."""
    outcome = suite("leaks")["test_body_failure_is_told_first"]
    assert "LookupError: of the body" in outcome.text
    assert "left behind" not in outcome.text
    assert "still exist" not in outcome.text


# ---------------------------------------------------------------------------------------------
# the mark reload_each_phase


@pytest.mark.parametrize(
    ("name", "cycles"),
    [
        ("synchronous", 4),
        ("asynchronous", 2),
        ("smaller_groups_and_sends", 1),
        ("every_group", 1),
        ("simulated_with_points", 3),
        ("body_installs_for_itself", 1),
    ],
)
def test_reloads_come_before_each_phase(
    suite: Callable[[str], Suite], name: str, cycles: int
) -> None:
    """On every rank as many as there are phases, and none in the run as it is."""
    found = suite("phases")
    runs = [found[f"test_{name}[{run}]"] for run in ("as-is", "reloaded")]
    assert [run.how for run in runs] == ["passed", "passed"], runs
    short = {"simulated_with_points": "points", "body_installs_for_itself": "itself"}
    prefix = short.get(name, name.partition("_")[0])
    ranks = 4 if name == "every_group" else 2
    for rank in range(ranks):
        record = (found.records / f"{prefix}-{rank}").read_text()
        assert record == f"{cycles} {cycles}"
    as_is = [(found.records / f"{prefix}-as-is-{rank}").exists() for rank in range(ranks)]
    assert all(as_is) is (name != "body_installs_for_itself")


def test_a_run_that_reloads_nothing_is_a_failure(suite: Callable[[str], Suite]) -> None:
    """It would show nothing."""
    found = suite("phases")
    assert found["test_without_a_phase[as-is]"].how == "passed"
    outcome = found["test_without_a_phase[reloaded]"]
    assert outcome.how == "failed"
    assert "had nothing to reload: no phase began" in outcome.text


def test_ranks_that_begin_different_phases_are_named(suite: Callable[[str], Suite]) -> None:
    """The rank that waits says for whom, before the limit of the test."""
    outcome = suite("phases")["test_one_rank_alone[reloaded]"]
    assert outcome.how == "failed"
    assert "RendezvousTimeoutError" in outcome.text
    assert suite("phases")["test_one_rank_alone[as-is]"].how == "passed"


def test_code_that_reloads_break_is_found(suite: Callable[[str], Suite]) -> None:
    """What the mark is for: passes as it is, fails with reloads."""
    found = suite("phases")
    assert found["test_breaks_under_reloads[as-is]"].how == "passed"
    outcome = found["test_breaks_under_reloads[reloaded]"]
    assert outcome.how == "failed"
    assert "with reloads before each collective phase" in outcome.text


# ---------------------------------------------------------------------------------------------
# RELOADPG_AUTOINSTALL in the shell


@pytest.mark.parametrize(
    "name",
    [
        "test_phases[as-is]",
        "test_phases[reloaded]",
        "test_not_inherited[forkserver]",
        "test_not_inherited[spawn]",
        "test_the_marks_own[forkserver]",
        "test_the_marks_own[spawn]",
    ],
)
def test_ranks_are_installed_as_their_test_says(suite: Callable[[str], Suite], name: str) -> None:
    """Whatever the shell has set; the mark's own ``env`` counts."""
    outcome = suite("autoinstall")[name]
    assert outcome.how == "passed", outcome.text


# ---------------------------------------------------------------------------------------------
# what it costs those who do not use it


def test_loading_the_plugin_imports_no_torch(tmp_path: Path) -> None:
    """Every project of an environment loads it; a test that asks for nothing pays nothing."""
    (tmp_path / "test_plain.py").write_text(
        "import sys\n"
        "def test_plain(request):\n"
        "    assert request.config.pluginmanager.has_plugin('reloadpg.testing.plugin')\n"
        "    heavy = {'torch', 'numpy', 'wrapt', 'reloadpg.testing.ranks'} & set(sys.modules)\n"
        "    assert not heavy\n"
    )
    ran = run_pytest(tmp_path, "test_plain.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_marks_are_declared(tmp_path: Path) -> None:
    """``pytest --markers`` describes them, and ``--strict-markers`` accepts them."""
    ran = run_pytest(tmp_path, "--markers")
    assert "@pytest.mark.ranks(world_size" in ran.stdout
    assert "@pytest.mark.reload_each_phase(" in ran.stdout
