"""The demo as its users start it: a process, its exit code, its output, its results."""

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import reloadpg
from reloadpg.demo.accelerator import COMMUNICATOR_BYTES
from reloadpg.demo.verdict import judge

HERE = Path(__file__).parent
RANKS, CYCLES, STEPS = 2, 3, 12
LIMIT = 240  # seconds; about 15 on two free cores

pytestmark = pytest.mark.timeout(LIMIT + 30)


def environment():
    root = Path(reloadpg.__file__).parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path}


def run(*command, timeout=LIMIT, **variables):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


OF_TORCH = (
    "hostname of the client socket cannot be",  # the machine's resolver does not name 127.0.0.1
    "No CUDA runtime is found, using CUDA_HOME",  # a CUDA build, beside a CUDA directory
)


def without_torchs_own(errors):
    """What was written, less torch's words about the machine that it runs on."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not any(words in line for words in OF_TORCH))


def demo(*arguments, **options):
    return run("-m", "reloadpg", "demo", "--accelerator", "simulated", *arguments, **options)


class Finished:
    """A demo that ended: its process and what it wrote."""

    def __init__(self, directory):
        path = directory / "results.json"
        self.process = demo("--ranks", RANKS, "--cycles", CYCLES, "--json", path)
        assert self.process.returncode == 0, self.process.stdout + self.process.stderr
        self.result = json.loads(path.read_text())
        self.run, self.reference = self.result["with_reloadpg"], self.result["without_reloadpg"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return Finished(tmp_path_factory.mktemp("demo"))


def test_it_says_what_it_runs_on_and_shows_each_iteration(finished):
    """The first lines name the accelerator and who makes the groups; then a line an iteration."""
    lines = finished.process.stdout.splitlines()
    assert lines[0] == f"reloadpg demo: {RANKS} ranks, {CYCLES} cycles"
    assert any("simulated accelerator" in line for line in lines[:7])
    maker = "megatron-core" if importlib.util.find_spec("megatron") else "new_group"
    assert any(line.startswith("  groups:") and maker in line for line in lines[:7])
    shown = [line.split(":")[0].strip() for line in lines if line.startswith("  cycle ")]
    assert shown == [f"cycle {cycle}/{CYCLES}" for cycle in range(1, CYCLES + 1)] * 2


def test_nothing_else_is_written(finished):
    """No log lines, no warnings, no other library's chatter between the demo's own lines."""
    assert without_torchs_own(finished.process.stderr) == ""
    assert "Gloo" not in finished.process.stdout


def test_it_ends_with_a_table_and_the_checks(finished):
    """The table has a row an iteration, with the results' own figures; all checks are listed."""
    lines = finished.process.stdout.splitlines()
    header = lines.index("cycle  groups  released MiB  offload ms  reload ms  reward")
    rows = [line.split() for line in lines[header + 2 : header + 2 + CYCLES]]
    for row, shown in zip(finished.result["rows"], rows, strict=True):
        assert shown[:3] == [
            str(row["cycle"]),
            str(row["groups"]),
            str(row["released_bytes"] >> 20),
        ]
        assert shown[5] == f"{row['reward']:.2f}"
        assert row["offload_ms"] > 0
        assert row["reload_ms"] > 0
    assert sum(line.startswith("  [ok] ") for line in lines) == len(finished.result["checks"]) == 7
    assert lines[-1].startswith("All checks passed")


def test_every_loss_of_every_rank_has_the_same_bits_without_reloadpg(finished):
    """The recorded losses are compared here once more, not by the demo's own check."""

    def losses(ranks):
        return [loss for seen in ranks for cycle in seen["cycles"] for loss in cycle["losses"]]

    assert losses(finished.run) == losses(finished.reference)
    assert len(losses(finished.run)) == RANKS * CYCLES * STEPS
    assert len(set(losses(finished.run))) > RANKS * CYCLES * STEPS // 2


def test_the_reference_does_not_offload(finished):
    """What it is compared with is a run in which nothing was offloaded or reloaded."""
    for seen in finished.reference:
        for cycle in seen["cycles"]:
            assert not {"groups_offloaded", "released_bytes", "reload_ms"} & cycle.keys()


def test_released_memory_is_that_of_the_groups(finished):
    """8 MiB a group and rank by the accelerator's count; by the process's own size nearly so."""
    for seen in finished.run:
        for cycle in seen["cycles"]:
            due = len(seen["groups"]) * COMMUNICATOR_BYTES
            assert cycle["groups_offloaded"] == len(seen["groups"]) > 10
            assert cycle["released_bytes"]["accelerator"] == due
            assert cycle["released_bytes"]["resident"] >= 0.95 * due
            assert cycle["buffer_bytes"] == due


def test_groups_are_those_of_fsdp_and_megatron(finished):
    """Each rank has WORLD and the tensor, pipeline, data and expert groups, with their ranks."""
    for seen in finished.run:
        groups = seen["groups"]
        assert groups["WORLD"] == [0, 1]
        assert groups["TENSOR_MODEL_PARALLEL_GROUP"] == [0, 1]
        assert groups["EXPERT_MODEL_PARALLEL_GROUP"] == [0, 1]
        assert groups["PIPELINE_MODEL_PARALLEL_GROUP"] == [seen["rank"]]
        assert groups["DATA_PARALLEL_GROUP"] == [seen["rank"]]


def test_the_reward_rises(finished):
    """From guessing to most answers right, by a margin that no chance explains."""
    first = finished.run[0]["first_reward"]
    rewards = [row["reward"] for row in finished.result["rows"]]
    assert first < 0.15
    assert first < rewards[0] < rewards[1] < rewards[2]
    assert rewards[-1] > 0.5


def _next_bits(value):
    return (float.fromhex(value) * (1 + 2**-50)).hex()


def _set(path, change):
    """A change to the results: what lies at a path is replaced by ``change`` of it."""

    def apply(ranks):
        at = ranks
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = change(at[path[-1]])

    return apply


FAULTY = {
    "one loss": ("losses", _set((1, "cycles", 2, "losses", 7), _next_bits)),
    "one gradient norm": ("losses", _set((0, "cycles", 0, "gradient_norms", 0), _next_bits)),
    "the last evaluation": ("losses", _set((1, "final_evaluation"), _next_bits)),
    "parameters": ("final parameters", _set((1, "parameters"), lambda _: "0" * 64)),
    "generation": ("generation", _set((0, "cycles", 1, "probes", 1), lambda _: "other")),
    "kept memory": (
        "memory",
        _set((1, "cycles", 2, "released_bytes", "accelerator"), lambda _: 0),
    ),
    "resident memory": (
        "memory",
        _set((0, "cycles", 1, "released_bytes", "resident"), lambda size: int(0.8 * size)),
    ),
    "use while offloaded": (
        "while offloaded",
        _set((0, "cycles", 0, "usable_while_offloaded"), lambda _: ["WORLD"]),
    ),
    "a group not reloaded": (
        "after reload",
        _set((1, "cycles", 1, "not_reloaded"), lambda _: ["WORLD"]),
    ),
    "a group fewer": ("after reload", _set((0, "cycles", 2, "groups_reloaded"), lambda n: n - 1)),
    "a wrong sum": ("after reload", _set((1, "wrong_sums"), lambda _: ["WORLD: 1 instead of 3"])),
    "no learning": ("reward", _set((0, "first_reward"), lambda _: 1.0)),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_each_check_fails_on_its_own_fault_and_no_other(finished, fault):
    """One value of a good run is changed: exactly the check that is about it fails."""
    name, change = FAULTY[fault]
    ranks = copy.deepcopy(finished.run)
    change(ranks)
    failed = [check.name for check in judge(ranks, finished.reference) if not check.passed]
    assert failed == [name]


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory):
    """What the demo ended with, for each fault in perturbed_demo.py."""
    directory = tmp_path_factory.mktemp("perturbed")
    process = run(HERE / "perturbed_demo.py", directory, timeout=2 * LIMIT)
    assert process.returncode == 0, process.stdout + process.stderr
    # The launcher's own log says nothing beside the demo's message.
    assert without_torchs_own(process.stderr) == ""
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}


@pytest.mark.timeout(2 * LIMIT + 30)
@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("other_loss", {"losses", "final parameters", "generation"}),
        ("kept_memory", {"memory"}),
        ("no_offload", {"memory", "while offloaded", "after reload"}),
    ],
)
def test_a_run_that_goes_wrong_ends_with_exit_code_1(perturbed, fault, failed):
    """A differing loss, memory that stays, groups that stay: named in the output, exit code 1."""
    ended = perturbed[fault]
    assert ended["code"] == 1
    checks = ended["results"]["checks"]
    assert {name for name, check in checks.items() if not check["passed"]} == failed
    assert ended["output"].count("[FAILED]") == len(failed)
    assert f"{len(failed)} of 7 checks FAILED" in ended["output"]


@pytest.mark.parametrize("fault", ["failing_rank", "failing_rank_reported_last"])
def test_a_rank_that_raises_ends_the_demo_with_its_error(perturbed, fault):
    """The error names the rank that raised first, not one that lost its peer, and holds its
    traceback; the exit code is 1, and no results.
    """
    ended = perturbed[fault]
    assert ended["code"] == 1
    assert "rank 1 failed" in ended["errors"]
    assert "ValueError: broken on purpose" in ended["errors"]
    assert "checks" not in ended["output"]
    assert ended["results"] is None


def test_a_rank_that_is_killed_ends_the_demo(perturbed):
    """The error names the rank and its signal, and no other rank goes on waiting for it."""
    ended = perturbed["killed_rank"]
    assert ended["code"] == 1
    assert "rank 1 failed (exit code -9)" in ended["errors"]


@pytest.fixture
def scratch():
    """A directory for temporary files, with a name short enough for a socket's path."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@contextmanager
def running_demo(scratch):
    """A demo in its first iterations, and all processes that it has started."""
    options = ["--accelerator", "simulated", "--ranks", "2", "--cycles", "500"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "reloadpg", "demo", *options],
        env={**environment(), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started = []
    try:
        for line in launcher.stdout:
            if line.startswith("  cycle 1/"):
                break
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) >= 2
        yield launcher, started
    finally:
        for process in (launcher, *started):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.communicate()


def test_ctrl_c_ends_all_ranks(scratch):
    """Exit code 130 within 30 s, one line and no traceback, no process and no file left."""
    with running_demo(scratch) as (launcher, started):
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        _, errors = launcher.communicate(timeout=30)
        assert launcher.returncode == 130
        said = without_torchs_own(errors).strip()
        assert said == "reloadpg demo: interrupted; all ranks have been ended"
        assert psutil.wait_procs(started, timeout=10)[1] == []
    left = {path.name for path in scratch.iterdir()}
    assert left <= {"torchinductor_root"}  # torch's own cache directory


def test_ranks_do_not_outlive_a_launcher_that_is_killed(scratch):
    """The launcher gets no chance to end its ranks: they end by themselves within 10 s."""
    with running_demo(scratch) as (launcher, started):
        launcher.kill()
        assert psutil.wait_procs(started, timeout=10)[1] == []


ONE_RANK = """
import os
import reloadpg
from reloadpg.demo.launch import launch
from reloadpg.demo.settings import Settings

(seen,) = launch(Settings(1, 1, offload=True, accelerator="simulated"))
print(reloadpg.is_installed(), os.environ["RELOADPG_AUTOINSTALL"], len(seen["cycles"]))
"""


def test_autoinstall_in_the_shell_does_not_matter():
    """The ranks install with options of their own; what they run beside is left as it was."""
    process = run("-c", ONE_RANK, RELOADPG_AUTOINSTALL="1")
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1] == "True 1 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "argument --ranks: 0 is less than 1"),
        (["--ranks", "-3"], "argument --ranks: -3 is less than 1"),
        (["--ranks", "two"], "argument --ranks: 'two' is not a whole number"),
        (["--cycles", "0"], "argument --cycles: 0 is less than 1"),
        (["--cycles", "1.5"], "argument --cycles: '1.5' is not a whole number"),
        (["--accelerator", "tpu"], "argument --accelerator: invalid choice: 'tpu'"),
        (["--json", "/no/such/directory/x"], "is no file name in an existing directory"),
    ],
)
def test_arguments_that_cannot_be_used_are_one_error_with_exit_code_2(capsys, arguments, message):
    """Argparse's own form, before anything is started."""
    from reloadpg.__main__ import main

    with pytest.raises(SystemExit) as end:
        main(["demo", *arguments])
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert errors.count("error:") == 1
    assert message in errors


def test_no_command_is_an_error_that_lists_the_commands(capsys):
    """``python -m reloadpg`` alone exits with code 2."""
    from reloadpg.__main__ import main

    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "arguments are required: {demo,doctor,status,explain,bench}" in capsys.readouterr().err


def test_groups_by_hand_are_those_that_megatron_makes():
    """The same calls of ``new_group`` in the same order, with the same arguments."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    process = run(HERE / "recorded_calls.py", "2:1", "3:0", "4:2", "8:5", "12:7", timeout=120)
    assert process.returncode == 0, process.stderr
    made = json.loads(process.stdout.splitlines()[-1])
    assert [len(job["calls"]) for job in made["megatron"]] > [20, 20, 20, 20, 20]
    assert made["by_hand"] == made["megatron"]
