"""All that needs a GPU, in one command: the GPU tests, then memory and times of each strategy.

    python benchmarks/gpu.py [--ranks N] [--cycles N] [--json PATH] [--standins]

Prints one table. It needs torch, wrapt and pytest; without a GPU it says so and ends with 0. With
``--standins`` it runs without a GPU, to show that it works: over stand-ins for CUDA and NCCL, with
one test and few cycles. Every output of that says so, and has no times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import gpu_job  # noqa: E402 - from the tests
import torch  # noqa: E402
from _output import machine, write_json  # noqa: E402

from reloadpg.testing import run_ranks, standins  # noqa: E402
from reloadpg.texts import table  # noqa: E402

HEADER = (
    "strategy", "ranks", "groups", "cycles", "held MiB", "released MiB", "share", "offload ms",
    "reload ms", "first use ms", "drift MiB", "same bits",
)  # fmt: skip
MIB = 1 << 20
STANDINS = bool(os.environ.get(standins.JOB))
LABEL = "stand-ins for CUDA and NCCL on the CPU: no GPU took part, these are no figures of one"


def tests() -> tuple[int, str]:
    """Run the GPU tests with nothing but pytest; exit code and last line."""
    chosen = ["-k", "options"] if STANDINS else []
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "pytest.ini")
        config.write_text(
            "[pytest]\nmarkers =\n    gpu: needs a GPU\n    matrix: -\n    timeout: -\n"
            f"pythonpath = {ROOT / 'tests' / 'helpers'}\n"
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
            timeout=540,
            check=False,
        )  # fmt: skip
    print(ended.stdout, flush=True)
    return ended.returncode, ended.stdout.strip().splitlines()[-1]


def measure(strategy: str, ranks: int, cycles: int) -> dict[str, Any]:
    """One row: medians over cycles, of the rank with the largest."""
    results = run_ranks(gpu_job.cycles, ranks, args=("nccl", cycles, strategy), timeout=280)
    rows = [row for seen in results for row in seen["rows"]]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    held = statistics.median(
        row["before"] - seen["empty"] for seen in results for row in seen["rows"]
    )
    released = statistics.median(row["before"] - row["after"] for row in rows)
    befores = [row["before"] for row in results[0]["rows"]][1:] or [0]
    times = {name: median(name) for name in ("offload_ms", "reload_ms", "first_use_ms")}
    return {
        "strategy": "/".join(rows[-1]["strategies"]),
        "asked": strategy,
        "ranks": ranks,
        "groups": results[0]["groups"],
        "cycles": cycles,
        "held_bytes": held,
        "released_bytes": released,
        "share": released / held if held else None,
        **({} if STANDINS else times),
        "drift_bytes": max(befores) - min(befores),
        "same_bits": all(seen["equal"] for seen in results),
        "source": results[0]["source"],
    }


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["strategy"], row["ranks"], row["groups"], row["cycles"], row["held_bytes"] / MIB,
        row["released_bytes"] / MIB, row["share"], row.get("offload_ms"), row.get("reload_ms"),
        row.get("first_use_ms"), row["drift_bytes"] / MIB, "yes" if row["same_bits"] else "NO",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="NCCL ranks (default: 1 and as many as can run)")
    parser.add_argument("--cycles", type=int, help="default: 20, over stand-ins 3")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--standins", action="store_true", help="run without a GPU, measure none")
    options = parser.parse_args()
    if options.standins and not STANDINS:
        with standins.job() as job:
            again = [sys.executable, *sys.argv]
            return subprocess.run(again, env={**os.environ, **job.environment}).returncode
    if STANDINS:
        print(LABEL)
    options.cycles = options.cycles or (3 if STANDINS else 20)
    if reason := gpu_job.no_gpu():
        print(f"nothing was measured: {reason}")
        write_json(options.json, {"machine": machine(), "measured": False, "reason": reason})
        return 0
    code, summary = tests()
    most = 2 if STANDINS else gpu_job.ranks_at_hand()
    sizes = [options.ranks] if options.ranks else sorted({1, most})
    strategies = ["recreate", *([] if gpu_job.no_suspend() else ["suspend"])]
    rows = [measure(one, size, options.cycles) for size in sizes for one in strategies]
    versions = {
        **machine(),
        "gpu": f"none ({LABEL})" if STANDINS else torch.cuda.get_device_name(),
        "gpus": 0 if STANDINS else torch.cuda.device_count(),
        "nccl": ".".join(map(str, gpu_job.nccl_version())),
        "cuda": torch.version.cuda,
    }
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    print(table(HEADER, [cells(row) for row in rows]))
    if reason := gpu_job.no_suspend():
        print(f"no suspend: {reason}")
    print(f"tests: {summary}")
    write_json(
        options.json,
        {
            "machine": versions,
            "measured": not STANDINS,
            "standins": STANDINS,
            "rows": rows,
            "tests": summary,
        },
    )
    return 1 if code or not all(row["same_bits"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
