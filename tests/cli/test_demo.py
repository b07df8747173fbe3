"""``demo`` runs the example with and without reloadpg, and fails if the results differ."""

import importlib.util
import json

import pytest
from cli.cli_process import LIMIT, called

from reloadpg.cli import demo, main

VARIANT = """
import importlib.util
importlib.util.find_spec = lambda name, *_: None  # quick: no groups of Megatron's
exec(compile(open({example!r}).read().partition("if __name__")[0], {example!r}, "exec"))
STEPS, SEQUENCES = 2, 32

class ColocatedJob(ColocatedJob):
    def step(self, *given):
        if FAULT == "raises":
            raise ValueError("broken on purpose")
        if FAULT == "another weight" and self.offload:
            next(self.policy.parameters()).data.mul_(1 + 2**-22)
        return super().step(*given)

main()
"""


@pytest.fixture
def run_demo(tmp_path, monkeypatch, capsys):
    """A function that runs the demo on one rank of a smaller example with a fault: code, output."""

    def run_demo(fault):
        path = tmp_path / "colocated_rl.py"
        example = next(path for path in demo.EXAMPLES if path.is_file())
        path.write_text(f"FAULT = {fault!r}\n{VARIANT.format(example=str(example))}")
        monkeypatch.setattr(demo, "EXAMPLES", (path,))
        code = main(["demo", "--ranks", "1", "--cycles", "2"])
        return code, capsys.readouterr()

    return run_demo


def test_both_runs_are_shown_and_equal(run_demo):
    """Each with the lines of the example."""
    code, written = run_demo("")
    assert code == 0, written
    lines = written.out.splitlines()
    assert lines[0] == "reloadpg demo: 1 rank, 2 iterations"
    first, second = (lines.index(one) for one in lines if one.endswith(("reloadpg:", "ranks:")))
    run, reference = lines[first + 1 : second - 1], lines[second + 1 : -2]
    assert run[:-1] == reference
    assert [one.split()[0] for one in run] == ["iteration", "iteration", "weights:", "last"]
    assert lines[-1].startswith("Passed: ")
    assert written.err == ""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["another weight", "raises"])
def test_a_failed_run_is_exit_code_1(run_demo, fault):
    """The first difference is named, or the rank's error is shown."""
    code, written = run_demo(fault)
    assert code == 1
    if fault == "raises":
        assert "ValueError: broken on purpose" in written.err
    else:
        assert "FAILED: with reloadpg 'iteration 1: " in written.out
    assert "Passed" not in written.out
    assert "run_ranks" not in written.err


def test_a_run_that_frees_no_memory_or_prints_less_has_failed():
    freed = "last rollout: 20 groups offloaded in 80 ms, 48 MiB freed on this rank"
    assert demo.difference(["a", "b", freed], ["a", "b"]) == ""
    assert demo.difference(["a", freed], ["a", "b"]) == "with reloadpg 'nothing', without 'b'"
    without = freed.replace("48 MiB", "0 MiB")
    assert demo.difference(["a", without], ["a"]) == f"no memory was freed ({without})"


@pytest.mark.slow
def test_the_groups_are_those_of_fsdp_and_megatron():
    """``explain`` runs the example itself, to its end, as one rank of 8."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    example = next(path for path in demo.EXAMPLES if path.is_file())
    options = ["--world-size", "8", "--rank", "1", "--timeout", str(LIMIT), "--json"]
    options += ["--", "--iterations", "1"]
    code, output = called("explain", str(example), *options)
    result = json.loads(output)
    groups = result["groups"]
    assert (code, result["error"]) == (0, "")
    ranks = {one["desc"]: one["ranks"] for one in groups if one["reloadable"]}
    assert len(ranks) == len(groups) == 20
    assert ranks["mesh_replicate"] == [1, 3, 5, 7]
    assert ranks["TENSOR_MODEL_PARALLEL_GROUP"] == ranks["mesh_shard"] == [0, 1]
    assert ranks["PIPELINE_MODEL_PARALLEL_GROUP"] == [1, 5]
    assert ranks["EXPERT_MODEL_PARALLEL_GROUP"] == [0, 1, 2, 3]
