"""The pytest plugin in a separate pytest run, as another project uses it, on real ranks.

Each suite in ``suites`` runs once; the tests here check the results of its tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from reloadpg.testing import plugin

ROOT = Path(__file__).parents[2]
SUITES = Path(__file__).parent / "suites"


def run_pytest(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a separate process, with this plugin only and the helpers of tests."""
    environ = {
        **os.environ,
        **env,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "RELOADPG_GRACE_S": "3",
        "OMP_NUM_THREADS": "1",
        "CI": "true",  # pytest gives whole messages then
    }
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "reloadpg.testing.plugin", "-c", os.devnull),
            *("--rootdir", str(directory), "-p", "no:cacheprovider", "--strict-markers"),
            "--noconftest",  # of this project
            *("--basetemp", str(directory / "tmp"), *arguments),
        ],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=560,  # for all tests of a suite; pytest's own limit is 600
        check=False,
    )


@dataclass(frozen=True)
class Suite:
    """The results of a suite: by test, (passed, failed, error or skipped) and why."""

    tests: dict[str, tuple[str, str]]
    output: str


def run_suite(directory: Path, name: str, **env: str) -> Suite:
    xml = directory / "results.xml"
    ran = run_pytest(directory, f"--junitxml={xml}", str(SUITES / f"check_{name}.py"), **env)
    assert xml.exists(), ran.stdout + ran.stderr
    tests = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        ends = [one for one in case if one.tag in ("failure", "error", "skipped")]
        how = ends[0].tag.replace("failure", "failed") if ends else "passed"
        text = "\n".join(f"{one.get('message')}\n{one.text}" for one in ends)
        tests[str(case.get("name"))] = how, text
    return Suite(tests, ran.stdout + ran.stderr)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return run_suite(tmp_path_factory.mktemp("suite"), "suite")


EXPECTED: dict[str, tuple[str, ...]] = {
    "test_body_runs_on_ranks[size0]": ("passed",),
    "test_begins_where_all_are_connected": ("passed",),
    "test_skips_without_a_collective": ("skipped", "no such machine"),
    "test_fails_on_one_rank": (
        *("failed", "===== rank 1: first failure", "assert numbers[rank] == 7", "words of rank 1"),
        "Failed: rank 1: AssertionError: assert 2 == 7; 1 of 2 ranks failed",
    ),
    "test_hangs_on_one_rank": ("failed", "at the time limit of 60 s", "in test_hangs_on_one_rank"),
    "test_skips_on_one_rank": ("failed", "rank 0: skipped only here", "rank 1: passed"),
    "test_expected_to_fail": ("skipped", "known"),  # JUnit has no word for it
    "test_marked_as_expected_to_fail": ("skipped", "a failure on ranks is a failure"),
    "test_argument_that_cannot_be_sent": ("failed", "fn or args cannot be pickled"),
    "test_invalid_mark": ("failed", "world_size must be a number of at least 1, got 0"),
    "test_async": ("error", "needs a plain test function"),
    "test_unittest": ("error", "needs a plain test function"),
    "test_rank_fixture_without_the_mark": ("error", "the fixture rank is for tests on ranks"),
    "test_world_size_fixture_without_the_mark": ("error", "the fixture world_size is for tests"),
    "test_no_leak": ("passed",),
    **{
        f"test_leak_around_the_test[{kind}]": (
            *("error", f"test_leak_around_the_test[{kind}] left process groups behind"),
            *("in c10d's tables", f"(of {kind})"),
            "They were destroyed, for the tests that follow. Destroy them with",
        )
        for kind in ("plain", "reloadable", "offloaded")
    },
    "test_after_leaks": ("passed",),
    "test_leaks_on_ranks": ("failed", "2 of 2 ranks failed", "group '0' (default_pg)"),
    "test_no_leak_on_ranks": ("passed",),
    "test_leak_with_a_default_group": ("failed", "2 of 2 ranks failed", "in c10d's tables"),
    "test_body_failure_with_a_leak": ("failed", "LookupError: of the body"),
}
"""By test of the suite: how it ends, and text of its report."""


RED = {
    "rank": "test_rank_fixture_without_the_mark",
    "world_size": "test_world_size_fixture_without_the_mark",
    "assert_no_group_leaks": "test_leak_around_the_test[plain]",
    "ranks": "test_fails_on_one_rank",
}
"""By fixture or mark: a test of the suite that fails by it, where the rest of the test passes."""


@pytest.mark.slow
def test_the_tests_of_the_suite_end_as_expected(suite: Suite) -> None:
    """With the reason. A refused test is not run."""
    assert {*suite.tests} == {*EXPECTED}
    for name, (how, *texts) in EXPECTED.items():
        ended, report = suite.tests[name]
        assert ended == how, (name, report)
        assert [text for text in texts if text not in report] == [], (name, report)
        for text in ("never run", "words of rank 0", "During handling of"):
            assert text not in report, name


@pytest.mark.slow
def test_each_fixture_and_mark_fails_where_it_has_nothing_to_do(suite: Suite) -> None:
    """None of them can be used without effect."""
    assert {*RED} == {*plugin.__all__, "ranks"}
    assert {name for name, test in RED.items() if suite.tests[test][0] == "passed"} == set()


@pytest.mark.slow
def test_the_time_limit_of_the_ini_file_holds(tmp_path: Path) -> None:
    """``reloadpg_timeout`` is the limit of tests on ranks that name none."""
    (tmp_path / "test_late.py").write_text(
        "import time\nimport pytest\n@pytest.mark.ranks(1)\ndef test_late():\n    time.sleep(60)\n"
    )
    ran = run_pytest(tmp_path, "-o", "reloadpg_timeout=0.5", "test_late.py")
    assert (ran.returncode, "at the time limit of 0.5 s" in ran.stdout) == (1, True), ran.stdout


@pytest.mark.slow
def test_a_failure_is_reported_once_and_begins_with_the_rank(suite: Suite) -> None:
    """Without frames of the library."""
    report = suite.output.partition("test_fails_on_one_rank ____")[2].partition("\n____")[0]
    assert report.splitlines()[1] == "rank 1: AssertionError: assert 2 == 7; 1 of 2 ranks failed"
    assert report.count("words of rank 1") == report.count("=====\nTraceback") == 1
    assert "testing/plugin" not in report
    only_its_own = suite.tests["test_body_failure_with_a_leak"][1]
    assert "left process groups" not in only_its_own


@pytest.mark.slow
def test_only_env_of_the_mark_installs_on_ranks(tmp_path: Path) -> None:
    """With any variables of the shell."""
    ran = run_suite(tmp_path, "autoinstall", RELOADPG_AUTOINSTALL="1")
    assert len(ran.tests) == 2
    assert {how for how, _ in ran.tests.values()} == {"passed"}, ran.output


def test_loading_the_plugin_imports_no_torch(tmp_path: Path) -> None:
    """Every project of an environment loads it. ``--strict-markers`` accepts its marks."""
    (tmp_path / "test_plain.py").write_text(
        "import sys\n"
        "def test_plain(request):\n"
        "    assert request.config.pluginmanager.has_plugin('reloadpg.testing.plugin')\n"
        "    ours = {name for name in sys.modules if name.startswith('reloadpg')}\n"
        "    assert ours <= {'reloadpg', 'reloadpg.errors', 'reloadpg.testing',"
        " 'reloadpg.testing.plugin'}\n"
        "    assert not {'torch', 'numpy', 'wrapt'} & set(sys.modules)\n"
        "    marks = str(request.config.getini('markers'))\n"
        "    assert 'ranks(world_size' in marks\n"
    )
    ran = run_pytest(tmp_path, "test_plain.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
