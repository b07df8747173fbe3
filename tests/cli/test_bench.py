"""``bench`` runs real ranks and shows what they measured. The figures themselves are not tested."""

import json
import threading

import pytest
from cli_process import command, decoded

from reloadpg.cli import bench, main

pytestmark = pytest.mark.timeout(180)


def test_the_simulated_accelerator_end_to_end(capsys):
    """Two ranks, three groups: times and memory of both operations, as JSON alone on stdout."""
    options = ["--backend", "sim", "--ranks", "2", "--groups", "3", "--cycles", "2", "--json"]
    assert main(["bench", *options]) == 0
    written = capsys.readouterr()
    result = json.loads(written.out)
    assert (result["ranks"], result["groups"], result["cycles"]) == (2, 3, 2)
    assert [len(cycles) for cycles in result["by_rank"]] == [2, 2]
    medians = result["medians"]
    assert medians["offload"]["ms"] > medians["offload"]["own_ms"] > 0
    assert medians["reload"]["ms"] > 0
    assert "2 cycles of 3 sim groups on 2 ranks" in written.err
    if result["memory_source"] == "simulated":
        assert medians["offload"]["bytes"] == 3 * 32 << 20


def test_medians_are_over_cycles_of_the_slowest_rank():
    """For memory the rank that moved least; what nobody measured is nothing."""

    def cycle(ms, size):
        figures = {"ms": ms, "group_ms": ms, "wait_ms": ms, "own_ms": ms, "bytes": size}
        return {f"offload_{name}": value for name, value in figures.items()}

    seen = [
        [cycle(1.0, 10), cycle(5.0, 30), cycle(3.0, None)],
        [cycle(2.0, 20), cycle(4.0, 20), cycle(9.0, 1)],
    ]
    medians = bench._medians("offload", seen)
    assert medians["ms"] == 5.0
    assert medians["bytes"] == 15.0


def test_nccl_without_a_gpu_is_exit_code_2(monkeypatch, capsys):
    """Nothing is started, and it says what to use."""
    monkeypatch.setattr(bench, "_devices", lambda: 0)
    assert main(["bench", "--backend", "nccl"]) == 2
    assert "Use --backend gloo or sim" in capsys.readouterr().err


def test_more_ranks_than_gpus_is_exit_code_2(monkeypatch, capsys):
    """NCCL refuses it much later, and less clearly."""
    monkeypatch.setattr(bench, "_devices", lambda: 1)
    assert main(["bench", "--ranks", "2"]) == 2
    assert "there are 1 GPUs" in capsys.readouterr().err


def test_a_rank_that_fails_is_exit_code_1(monkeypatch, capsys):
    """Its error is shown."""
    options = ["--backend", "gloo", "--groups", "1", "--cycles", "1", "--ranks", "1"]
    monkeypatch.setenv("RELOADPG_SIM_BYTES", "")
    monkeypatch.setattr("reloadpg.cli.bench_ranks.run", failing)
    assert main(["bench", *options]) == 1
    assert "broken on purpose" in capsys.readouterr().err


def failing(*_):
    raise ValueError("broken on purpose")


def test_the_time_limit_is_said_to_be_that_of_the_command(monkeypatch, capsys):
    """Not what a program would do that calls ``run_ranks`` itself."""
    monkeypatch.setattr("reloadpg.cli.bench_ranks.run", hanging)
    assert main(["bench", "--backend", "gloo", "--ranks", "1", "--timeout", "0.5"]) == 1
    errors = capsys.readouterr().err
    assert "1 of 1 ranks failed (no process is left). --timeout gives them longer than 0.5 s." in (
        errors
    )
    assert "still running at the time limit of 0.5 s" in errors
    assert "run_ranks" not in errors


def hanging(*_):
    threading.Event().wait()


def test_autoinstall_in_the_shell_does_not_matter():
    """Its options are others than those that are measured."""
    options = ["--backend", "gloo", "--ranks", "1", "--groups", "1", "--cycles", "1", "--json"]
    process = command("bench", *options, RELOADPG_AUTOINSTALL="1")
    assert len(decoded(process)["by_rank"][0]) == 1, process.stderr
