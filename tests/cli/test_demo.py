"""``demo`` runs the example with and without reloadpg, and fails if the results differ."""

import copy
import importlib.util
import json
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import psutil
import pytest
from cli_process import LIMIT, called, environment
from sampling import sampled

from reloadpg.cli import demo, main
from reloadpg.cli.demo import COMMUNICATOR_BYTES, judge

RANKS, CYCLES, STEPS = 2, 2, 12


VARIANT = """
import importlib.util
importlib.util.find_spec = lambda name, *_: None  # quick: no groups of Megatron's
exec(compile(open({example!r}).read(), {example!r}, "exec"))
if FAULT:
    STEPS, SEQUENCES = 2, 32

class ColocatedJob(ColocatedJob):
    def step(self, *given):
        if FAULT == "raises":
            raise ValueError("broken on purpose")
        loss, norm = super().step(*given)
        # Where the groups should be offloaded, a few units in the last place more.
        return loss * (1 + 2**-22 * (FAULT == "wrong" and self.offload)), norm

    def rollout(self, weights):
        return self.generate(weights) if FAULT == "wrong" else super().rollout(weights)
"""


def variant(directory, fault):
    """The example, smaller and with a fault; its path."""
    path = directory / "colocated_rl.py"
    example = next(path for path in demo.EXAMPLES if path.is_file())
    path.write_text(f"FAULT = {fault!r}\n{VARIANT.format(example=str(example))}")
    return path


class Finished:
    """The output and the results of a demo that has passed."""

    def __init__(self, directory):
        path = directory / "results.json"
        options = ["--accelerator", "simulated", "--ranks", str(RANKS), "--cycles", str(CYCLES)]
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(StringIO()) as output,
            redirect_stderr(StringIO()) as errors,
        ):
            patch.setattr(demo, "EXAMPLES", (variant(directory, ""),))
            code = main(["demo", *options, "--json", str(path)])
        self.output, self.errors = output.getvalue(), errors.getvalue()
        self.example = directory / "colocated_rl.py"
        assert code == 0, self.output + self.errors
        self.result = json.loads(path.read_text())
        self.run, self.reference = self.result["with_reloadpg"], self.result["without_reloadpg"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return Finished(tmp_path_factory.mktemp("demo"))


def test_the_output_ends_with_a_table_and_the_checks(finished):
    """With one line per iteration. The table has the figures of the results."""
    lines = finished.output.splitlines()
    assert lines[0] == f"reloadpg demo: {RANKS} ranks, {CYCLES} cycles"
    head = "\n".join(lines[:7])
    assert "simulated accelerator on the CPU; each communicator holds 8.0 MiB per rank" in head
    assert str(finished.example) in head
    shown = [line.split(":")[0].strip() for line in lines if line.startswith("  cycle ")]
    assert shown == [f"cycle {cycle}/{CYCLES}" for cycle in range(1, CYCLES + 1)] * 2
    header = lines.index("cycle  groups  released MiB  offload ms  reload ms  reward")
    table = [line.split() for line in lines[header + 2 : header + 2 + CYCLES]]
    for row, cells in zip(finished.result["rows"], table, strict=True):
        size = row["released_bytes"] >> 20
        assert cells[:3] == [str(row["cycle"]), str(row["groups"]), str(size)]
        assert cells[5] == f"{row['reward']:.2f}"
        assert min(row["offload_ms"], row["reload_ms"]) > 0
    assert sum(line.startswith("  [ok] ") for line in lines) == len(finished.result["checks"]) == 3
    assert lines[-1].startswith("All checks passed")
    assert finished.errors == ""


def test_the_losses_of_both_runs_are_bit_identical(finished):
    """The recorded bits are compared here, not by the demo's own check."""

    def losses(ranks):
        return [loss for seen in ranks for cycle in seen["cycles"] for loss in cycle["losses"]]

    assert losses(finished.run) == losses(finished.reference)
    assert len(losses(finished.run)) == RANKS * CYCLES * STEPS
    assert len(set(losses(finished.run))) > RANKS * CYCLES * STEPS // 2
    assert not any(
        "offload_groups" in cycle for seen in finished.reference for cycle in seen["cycles"]
    )
    rewards = [row["reward"] for row in finished.result["rows"]]
    assert 0.15 < rewards[0] < rewards[1]
    assert rewards[1] > 0.5


def test_released_memory_is_that_of_the_groups(finished):
    """8 MiB a group and rank; every group was used."""
    for cycle in (cycle for seen in finished.run for cycle in seen["cycles"]):
        assert cycle["offload_groups"] >= 4
        assert cycle["released_bytes"] == cycle["offload_groups"] * COMMUNICATOR_BYTES


@pytest.mark.slow
def test_the_groups_are_those_of_fsdp_and_megatron():
    """``explain`` runs the example itself as one rank of 8."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    example = next(path for path in demo.EXAMPLES if path.is_file())
    options = ["--world-size", "8", "--rank", "1", "--timeout", str(LIMIT), "--json"]
    options += ["--", "--iterations", "1"]
    code, output = called("explain", str(example), *options)
    assert code == 0
    groups = json.loads(output)["groups"]
    ranks = {one["desc"]: one["ranks"] for one in groups if one["reloadable"]}
    assert len(ranks) == len(groups) == 20
    assert ranks["mesh_replicate"] == [1, 3, 5, 7]
    assert ranks["TENSOR_MODEL_PARALLEL_GROUP"] == ranks["mesh_shard"] == [0, 1]
    assert ranks["PIPELINE_MODEL_PARALLEL_GROUP"] == [1, 5]
    assert ranks["EXPERT_MODEL_PARALLEL_GROUP"] == [0, 1, 2, 3]


def _next_bits(value):
    return (float.fromhex(value) * (1 + 2**-50)).hex()


def _set(path, change):
    """Replace the value at a path of the results by ``change`` of it."""

    def apply(ranks):
        at = ranks
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = change(at[path[-1]])

    return apply


FAULTY = {
    "one loss": ("losses", _set((1, "cycles", 1, "losses", 7), _next_bits)),
    "one gradient norm": ("losses", _set((0, "cycles", 0, "others", 0), _next_bits)),
    "the last evaluation": ("losses", _set((1, "cycles", 1, "others", -2), _next_bits)),
    "parameters": ("final parameters", _set((1, "parameters"), lambda _: "0" * 64)),
    "kept memory": ("offloads", _set((1, "cycles", 1, "released_bytes"), lambda _: 0)),
    "a group fewer": ("offloads", _set((0, "cycles", 1, "reload_groups"), lambda n: n - 1)),
    "a wrong sum": ("offloads", _set((1, "cycles", 0, "wrong_sums"), lambda _: ["WORLD"])),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_each_check_fails_on_its_fault_only(finished, fault):
    """One value of a correct result is changed."""
    name, change = FAULTY[fault]
    ranks = copy.deepcopy(finished.run)
    change(ranks)
    checks = judge(ranks, finished.reference)
    failed = [one for one, check in checks.items() if not check["passed"]]
    assert failed == [name]


@pytest.mark.parametrize("fault", sampled(["wrong", "raises"], "wrong"))
def test_a_failed_run_is_exit_code_1(tmp_path, monkeypatch, capsys, fault):
    """The failed checks are named, or the rank's error is shown."""
    monkeypatch.setattr(demo, "EXAMPLES", (variant(tmp_path, fault),))
    options = ["--accelerator", "simulated", "--ranks", "1", "--cycles", "1"]
    assert main(["demo", *options, "--json", str(tmp_path / "results")]) == 1
    written = capsys.readouterr()
    if fault == "raises":
        assert "rank 0: first failure" in written.err
        assert "ValueError: broken on purpose" in written.err
        assert "run_ranks" not in written.err
        assert "checks" not in written.out
        assert not (tmp_path / "results").exists()
        return
    checks = json.loads((tmp_path / "results").read_text())["checks"]
    failed = {name for name, check in checks.items() if not check["passed"]}
    assert failed == {"losses", "offloads"}
    assert written.out.count("[FAILED]") == len(failed)


@pytest.mark.slow
def test_sigterm_ends_all_ranks(tmp_path):
    """With one line and no traceback. No process and no file is left. Autoinstall is on."""
    program = (
        "import sys; from pathlib import Path; from reloadpg.cli import demo, main\n"
        f"demo.EXAMPLES = (Path({str(variant(tmp_path, ''))!r}),)\n"
        "sys.exit(main(['demo', '--accelerator', 'simulated', '--ranks', '1', '--cycles', '999']))"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(TMPDIR=str(scratch), RELOADPG_AUTOINSTALL="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for line in launcher.stdout:
            if line.startswith("  cycle 1/"):
                break
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) >= 2
        launcher.terminate()
        _, errors = launcher.communicate(timeout=280)
        assert launcher.returncode == 128 + signal.SIGTERM
        said = "reloadpg demo: interrupted; all ranks have been ended"
        assert errors.strip().splitlines()[-1] == said
        assert "Traceback" not in errors
        assert psutil.wait_procs(started, timeout=280)[1] == []
    finally:
        launcher.kill()
        launcher.communicate(timeout=LIMIT)
    # Torch itself leaves directories.
    assert not [path for path in scratch.iterdir() if path.name.startswith("reloadpg")]


def test_cuda_without_a_gpu_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr("reloadpg.cli.bench.cuda_devices", lambda: 0)
    assert main(["demo", "--accelerator", "cuda"]) == 2
    assert "nothing was started. Omit the option" in capsys.readouterr().err
