"""All that needs a GPU, in one command: tests, memory and times, one step after the other.

    python benchmarks/gpu.py --json RESULTS [--minutes M] [--nccl LIBRARY] [--standins]
    python benchmarks/gpu.py --page RESULTS     # print docs/gpu.md with these results

Each step is a process with a time limit. Its result is written to RESULTS when it ends, so an
interrupted run loses one step; called again, it runs the missing ones. It needs torch, wrapt and
pytest, no network and one GPU. ``--nccl`` preloads a newer NCCL, of which 2.30 and later run two
ranks on one GPU. Without a GPU it says so and ends with 0. ``--standins`` runs all steps over
stand-ins for CUDA and NCCL, with few cycles, to show that they work; its results have no times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import _gpu_ranks  # noqa: E402
import gpu_job  # noqa: E402 - from the tests
import torch  # noqa: E402
from _output import machine  # noqa: E402

from reloadpg.testing import run_ranks, standins  # noqa: E402

MIB = 1 << 20
STANDINS = bool(os.environ.get(standins.JOB))
LABEL = "stand-ins for CUDA and NCCL on the CPU: no GPU took part, these are no figures of one"
CYCLES = 3 if STANDINS else 20
LEAST_S = 15.0
"""With less time left, no step is begun."""

Result = dict[str, Any]


# -- the steps ----------------------------------------------------------------------------------


def facts() -> Result:
    """What the machine is."""
    return {
        **machine(),
        "gpu": f"none ({LABEL})" if STANDINS else torch.cuda.get_device_name(),
        "gpus": 0 if STANDINS else torch.cuda.device_count(),
        "nccl": ".".join(map(str, gpu_job.nccl_version())),
        "cuda": torch.version.cuda,
        "ranks": most_ranks(),
    }


def tests() -> Result:
    """The GPU tests, with nothing but pytest."""
    chosen = ["-k", "options"] if STANDINS else []
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "pytest.ini")
        config.write_text(
            "[pytest]\nmarkers =\n    gpu: needs a GPU\n    matrix: -\n    timeout: -\n"
            f"pythonpath = {ROOT / 'tests'}\n"
        )
        ended = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-rs", "-c", str(config), "--rootdir",
                str(ROOT), "--import-mode=importlib", str(ROOT / "tests" / "gpu" / "test_nccl.py"),
                *chosen,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )  # fmt: skip
    return {
        "passed": ended.returncode == 0,
        "summary": ended.stdout.strip().splitlines()[-1],
        "output": ended.stdout[-20_000:],
    }


def communicators(ranks: int) -> Result:
    """Memory of one communicator: when it is created, and when it has been used."""
    seen = run_ranks(_gpu_ranks.growth, ranks, args=("nccl",), timeout=200)
    return {
        "ranks": ranks,
        "created_bytes": max(one["created"] for one in seen),
        "used_bytes": max(one["used"] for one in seen),
        "left_bytes": max(one["left"] for one in seen),
    }


def by_hand(ranks: int) -> Result:
    """Destroying and creating the same groups with torch's own functions."""
    seen = run_ranks(_gpu_ranks.by_hand, ranks, args=("nccl", CYCLES), timeout=280)
    return {"ranks": ranks, **_times(seen), "released_bytes": _median(seen, "released")}


def cycles(ranks: int, strategy: str) -> Result:
    """Offload and reload: medians over cycles and ranks."""
    seen = run_ranks(gpu_job.cycles, ranks, args=("nccl", CYCLES, strategy), timeout=280)
    rows = [row for one in seen for row in one["rows"]]
    held = statistics.median(row["before"] - one["empty"] for one in seen for row in one["rows"])
    released = statistics.median(row["before"] - row["after"] for row in rows)
    befores = [row["before"] for row in seen[0]["rows"]][1:] or [0]
    return {
        "ranks": ranks,
        "strategies": rows[-1]["strategies"],
        "groups": seen[0]["groups"],
        "held_bytes": held,
        "released_bytes": released,
        "reported_bytes": statistics.median(row["reported"] or 0 for row in rows),
        "drift_bytes": max(befores) - min(befores),
        "same_bits": all(one["equal"] for one in seen),
        "source": seen[0]["source"],
        **_times(seen),
    }


def borrowed() -> Result:
    """What each policy does about a pointer that other code has taken out of a group."""
    (seen,) = run_ranks(_gpu_ranks.borrowed, 1, args=("nccl",), timeout=200)
    wrong = [f"{policy}: {what}" for policy, what in seen.items() if "BUT" in what]
    return {**seen, "passed": not wrong, "summary": "; ".join(wrong)}


def saver() -> Result:
    """A memory saver of the trainer together with an offload: what each gives back."""
    (seen,) = run_ranks(_gpu_ranks.with_memory_saver, 1, args=("nccl",), timeout=200)
    return dict(seen)


def engine() -> Result:
    """A vLLM in the trainer's process: what it and the groups of both give back."""
    (seen,) = run_ranks(gpu_job.with_vllm, 1, args=("nccl",), timeout=280)
    return dict(seen)


def _median(seen: list[Result], name: str) -> float:
    return statistics.median(row[name] for one in seen for row in one["rows"])


def _times(seen: list[Result]) -> Result:
    names = ("offload_ms", "reload_ms", "first_use_ms")
    return {} if STANDINS else {name: _median(seen, name) for name in names}


def most_ranks() -> int:
    return 2 if STANDINS else gpu_job.ranks_at_hand()


def _two() -> str:
    ranks = most_ranks()
    return "" if ranks > 1 else "one GPU, and NCCL allows two ranks on it from 2.30 on (--nccl)"


def _absent(module: str) -> str:
    """Why a step cannot use a module; empty if it can. Over the stand-ins no kernel runs."""
    if find_spec(module) is None:
        return f"{module} is not installed"
    return "its kernels need a GPU" if STANDINS else ""


def _nothing() -> str:
    return ""


class Step(NamedTuple):
    """A step: its limit in seconds, and why it cannot run here, if so."""

    run: Callable[[], Result]
    seconds: float
    obstacle: Callable[[], str] = _nothing


STEPS = {
    "facts": Step(facts, 60),
    "tests": Step(tests, 420),
    "communicator, 1 rank": Step(lambda: communicators(1), 120),
    "recreate, 1 rank": Step(lambda: cycles(1, "recreate"), 180),
    "by hand, 1 rank": Step(lambda: by_hand(1), 180),
    "suspend, 1 rank": Step(lambda: cycles(1, "suspend"), 180, gpu_job.no_suspend),
    "borrowed": Step(borrowed, 180),
    "communicator, 2 ranks": Step(lambda: communicators(2), 120, _two),
    "recreate, 2 ranks": Step(lambda: cycles(2, "recreate"), 240, _two),
    "by hand, 2 ranks": Step(lambda: by_hand(2), 240, _two),
    "suspend, 2 ranks": Step(
        lambda: cycles(2, "suspend"), 240, lambda: _two() or gpu_job.no_suspend()
    ),
    "torch_memory_saver": Step(saver, 180, lambda: _absent("torch_memory_saver")),
    "vLLM": Step(engine, 300, lambda: _absent("vllm")),
}


# -- running them -------------------------------------------------------------------------------


def run(path: Path, minutes: float) -> int:
    """Run the steps that ``path`` has no result of; exit code 1 if one failed."""
    results = load(path)
    end = time.monotonic() + minutes * 60
    for name, step in STEPS.items():
        if "result" in results["steps"].get(name, {}):
            continue
        left = end - time.monotonic()
        if left < LEAST_S:
            print(f"{name}: not begun, {minutes:g} minutes are over")
            continue
        begun = time.monotonic()
        results["steps"][name] = outcome = _outcome(name, step, min(step.seconds, left))
        outcome["seconds"] = round(time.monotonic() - begun, 1)
        _write(path, results)
        shown = outcome.get("error") or outcome.get("skipped") or "done"
        print(f"{name}: {shown} ({outcome['seconds']:g} s)", flush=True)
    return 1 if any("error" in one for one in results["steps"].values()) else 0


def _outcome(name: str, step: Step, seconds: float) -> Result:
    if reason := step.obstacle():
        return {"skipped": reason}
    with tempfile.NamedTemporaryFile("r") as written:
        command = [sys.executable, __file__, "--step", name, "--json", written.name]
        try:
            ended = subprocess.run(
                command,
                timeout=seconds,
                check=False,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"ended after {seconds:.0f} s"}
        text = written.read()
    if ended.returncode or not text:
        last = ended.stdout.strip().splitlines()[-1:] or [""]
        return {"error": f"exit code {ended.returncode}: {last[0]}", "output": ended.stdout[-4000:]}
    result = json.loads(text)
    if result.get("same_bits") is False or result.get("passed") is False:
        return {"error": result.get("summary", "the sums differ after a reload"), "result": result}
    return {"result": result}


def load(path: Path) -> Result:
    """Read the results of earlier runs; of none if there is no such file."""
    if not path.exists() or not path.stat().st_size:
        return {"standins": STANDINS, "steps": {}}
    results: Result = json.loads(path.read_text())
    if results["standins"] != STANDINS:
        sys.exit(f"{path} is of a run {'over' if results['standins'] else 'without'} stand-ins")
    return results


def _write(path: Path, results: Result) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


# -- the page -----------------------------------------------------------------------------------

NOT_RUN = "not yet run"

PAGE = """# On a GPU

{head}

One command runs all of it, on one GPU and without a network, and saves each step when it ends:

<!-- not run: needs a GPU; tests/gpu/test_rehearsal.py runs it over stand-ins -->
```sh
python benchmarks/gpu.py --json results.json
python benchmarks/gpu.py --page results.json > docs/gpu.md
```

`--minutes` limits the time, and a second call runs the missing steps. NCCL runs two ranks on one
GPU from 2.30 on; `--nccl PATH` preloads such a library.
"""

TABLES = """
Memory is what the device reports; times are medians of 20 cycles.

## Memory of a communicator

| ranks | MiB when created | MiB when used | MiB left after its end |
| ---: | ---: | ---: | ---: |
{communicators}

## A cycle of WORLD and three groups

`by hand` destroys and creates the same groups with torch's own functions. `share` is the part of
what the groups hold that an offload gives back, in MiB like `held`, `released` and `drift`.

| way | ranks | held | released | share | offload ms | reload ms | use ms | drift | same bits |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |
{cycles}

## A pointer that other code has taken

What an offload does with a group whose communicator's pointer was taken, by
`install(borrowed=...)`.

| `refuse` | `warn` | `ignore` |
| --- | --- | --- |
{borrowed}

## With other holders of memory

What each gives back in MiB. vLLM runs in the trainer's process on one GPU, and its groups are the
set `engine`.

| with | trainer's groups | itself | its groups |
| --- | ---: | ---: | ---: |
{holders}

## Tests

{tests}
"""


def page(results: Result) -> str:
    """The page docs/gpu.md; a cell without a result says so."""
    steps = results["steps"]

    def of(name: str) -> Result:
        found: Result = steps.get(name, {}).get("result", {})
        return found

    def row(name: str, first: list[str], cells: list[tuple[str, float]]) -> str:
        result, step = of(name), steps.get(name, {})
        why = step.get("skipped") or step.get("error") or NOT_RUN
        shown = [_cell(result.get(key), unit) if result else why for key, unit in cells]
        return f"| {' | '.join([*first, *shown])} |"

    mib = float(MIB)
    memory = [("created_bytes", mib), ("used_bytes", mib), ("left_bytes", mib)]
    rows = [row(f"communicator, {text}", [text[0]], memory) for text in ("1 rank", "2 ranks")]
    cycle = [
        ("held_bytes", mib),
        ("released_bytes", mib),
        ("share", 0.0),
        ("offload_ms", 1.0),
        ("reload_ms", 1.0),
        ("first_use_ms", 1.0),
        ("drift_bytes", mib),
        ("same_bits", 0.0),
    ]
    ways = []
    for text in ("1 rank", "2 ranks"):
        for way in ("recreate", "suspend", "by hand"):
            result = of(f"{way}, {text}")
            if result.get("held_bytes"):
                result["share"] = f"{result['released_bytes'] / result['held_bytes']:.3f}"
            ways.append(row(f"{way}, {text}", [way, text[0]], cycle))
    policies = [(policy, 0.0) for policy in ("refuse", "warn", "ignore")]
    other = [("offload_bytes", mib), ("own_bytes", mib), ("engine_bytes", mib)]
    holders = [row(name, [name], other) for name in ("torch_memory_saver", "vLLM")]
    known = of("facts")
    head = "The GPU is not known."
    if results["standins"]:
        head = f"**Not a GPU:** {LABEL}."
    elif known:
        head = ", ".join(f"{name} {value}" for name, value in known.items()) + "."
    return (PAGE + TABLES).format(
        head=head,
        communicators="\n".join(rows),
        cycles="\n".join(ways),
        borrowed=row("borrowed", [], policies),
        holders="\n".join(holders),
        tests=of("tests").get("summary", NOT_RUN[0].upper() + NOT_RUN[1:] + "."),
    )


def _cell(value: object, unit: float) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value / unit:.1f}" if unit and isinstance(value, (int, float)) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="RESULTS")
    parser.add_argument("--minutes", type=float, default=25.0, help="default: 25")
    parser.add_argument("--nccl", type=Path, help="a newer NCCL, to preload")
    parser.add_argument("--page", type=Path, metavar="RESULTS", help="print docs/gpu.md")
    parser.add_argument("--standins", action="store_true", help="run without a GPU, measure none")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page:
        if not options.page.exists():
            parser.error(f"{options.page} does not exist: run the steps with --json first")
        print(page(json.loads(options.page.read_text())), end="")
        return 0
    if options.step:
        options.json.write_text(json.dumps(STEPS[options.step].run()))
        return 0
    if options.nccl and "RELOADPG_GPU_NCCL" not in os.environ:
        preload = {"LD_PRELOAD": str(options.nccl.resolve()), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        environment = {**os.environ, **preload, "RELOADPG_GPU_NCCL": "1"}
        return subprocess.run([sys.executable, *sys.argv], env=environment).returncode
    if options.standins and not STANDINS:
        with standins.job() as job:
            again = [sys.executable, *sys.argv]
            return subprocess.run(again, env={**os.environ, **job.environment}).returncode
    if STANDINS:
        print(LABEL)
    if reason := gpu_job.no_gpu():
        print(f"nothing was measured: {reason}")
        return 0
    code = run(options.json, options.minutes)
    print(page(load(options.json)))
    return code


if __name__ == "__main__":
    sys.exit(main())
