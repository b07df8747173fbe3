"""``bench`` measures real ranks. The figures themselves are not tested."""

import json

import pytest
from helpers import reports
from helpers.cli_process import command, decoded

from reloadpg.cli import bench, main


def test_offload_and_reload_are_measured(capsys):
    """Times and memory, as JSON alone on stdout."""
    options = ["--backend", "sim", "--ranks", "2", "--groups", "3", "--cycles", "2", "--json"]
    assert main(["bench", *options]) == 0
    written = capsys.readouterr()
    result = json.loads(written.out)
    assert (result["ranks"], result["groups"], result["cycles"]) == (2, 3, 2)
    medians = result["medians"]
    assert medians["offload"]["ms"] > medians["offload"]["own_ms"] > 0
    assert medians["reload"]["ms"] > 0
    assert written.err == ""
    if result["memory_source"] == "simulated":
        assert medians["offload"]["mib"] == 3 * 32


@pytest.mark.slow
def test_autoinstall_in_the_shell_is_ignored():
    options = ["--backend", "gloo", "--ranks", "1", "--groups", "1", "--cycles", "1", "--json"]
    process = command("bench", *options, RELOADPG_AUTOINSTALL="1")
    assert decoded(process)["medians"]["offload"]["ms"] > 0, process.stderr


def test_medians_are_of_the_slowest_rank_of_each_cycle():
    """For memory, of the rank that released least. Missing figures are left out."""

    def cycle(ms, size):
        memory = {} if size is None else {"before": {"device": size << 20}, "after": {"device": 0}}
        offload = reports.report(total_ms=ms, memory=memory)
        return offload, reports.report("reload")

    seen = [
        [cycle(1.0, 10), cycle(5.0, 30), cycle(3.0, None)],
        [cycle(2.0, 20), cycle(4.0, 20), cycle(9.0, 1)],
    ]
    medians = bench.medians_of(seen)
    assert medians["offload"]["ms"] == 5.0
    assert medians["offload"]["mib"] == 15.0
    assert medians["reload"]["mib"] is None


@pytest.mark.parametrize(
    ("devices", "arguments", "words"),
    [
        (0, ["--backend", "nccl"], "Use --backend gloo or sim"),
        # NCCL refuses it much later, and less clearly.
        (1, ["--ranks", "2"], "but there are 1 GPUs; nothing was started"),
    ],
)
def test_too_few_gpus_are_exit_code_2(monkeypatch, capsys, devices, arguments, words):
    """Nothing is started."""
    monkeypatch.setattr(bench, "cuda_devices", lambda: devices)
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_failed_rank_is_exit_code_1(monkeypatch, capsys):
    """With the rank's stack, and without a mention of ``run_ranks``."""
    monkeypatch.setattr(bench, "_TIMEOUT_S", 0.05)
    assert main(["bench", "--backend", "gloo", "--ranks", "1", "--cycles", "1000000"]) == 1
    errors = capsys.readouterr().err
    assert "1 of 1 ranks failed (no process is left)." in errors
    assert "still running at the time limit of 0.05 s" in errors
    assert "run_ranks" not in errors
