"""The command ``reloadpg demo``: two runs of one job, a table, and the proof."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from .accelerator import COMMUNICATOR_BYTES, cuda_devices
from .launch import RanksFailedError, launch
from .layout import Layout
from .parallel import megatron_version
from .settings import Settings
from .table import Row, cycles_table, mebibytes
from .verdict import Check, judge

__all__ = ["demo"]

_RANKS = 4


def demo(
    ranks: int | None = None,
    cycles: int = 6,
    accelerator: str = "auto",
    json_path: Path | None = None,
) -> int:
    """Run the demo and print what happens.

    Args:
        ranks: number of ranks; None for 4, or on GPUs for one a GPU up to 4.
        cycles: number of iterations.
        accelerator: ``cuda``, ``simulated``, or ``auto`` for the first that there is.
        json_path: where to write the results, or None.

    Returns:
        The exit code: 0 if every check holds, 1 if one does not or a rank failed, 2 if there is
        no such accelerator, 130 after Ctrl-C.
    """
    try:
        return _run(ranks, cycles, accelerator, json_path)
    except RanksFailedError as error:
        print(f"\nreloadpg demo: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SignalException) as interrupt:
        print("\nreloadpg demo: interrupted; all ranks have been ended", file=sys.stderr)
        return 128 + getattr(interrupt, "sigval", signal.SIGINT)


def _run(ranks: int | None, cycles: int, accelerator: str, json_path: Path | None) -> int:
    begun = time.monotonic()
    devices = cuda_devices() if accelerator != "simulated" else 0
    if accelerator == "cuda" and not devices:
        print(
            "reloadpg demo: --accelerator cuda: torch finds no GPU that NCCL can use; nothing was "
            "started. Leave the option out to run on the simulated accelerator.",
            file=sys.stderr,
        )
        return 2
    accelerator = "cuda" if devices else "simulated"
    wanted = ranks or (min(devices, _RANKS) if devices else _RANKS)
    count = min(wanted, devices) if devices else wanted
    print(_heading(count, wanted, cycles, accelerator, devices), flush=True)

    print("\nFirst with reloadpg:", flush=True)
    run = launch(Settings(count, cycles, offload=True, accelerator=accelerator))
    print("\nThen the same job without reloadpg, on fresh ranks:", flush=True)
    reference = launch(Settings(count, cycles, offload=False, accelerator=accelerator))

    rows = [Row.of([seen["cycles"][cycle] for seen in run]) for cycle in range(cycles)]
    checks = judge(run, reference)
    seconds = time.monotonic() - begun
    print(f"\n{cycles_table(rows)}")
    print("Groups and memory: all ranks together. Times: the slowest rank.\n")
    print("\n".join(str(check) for check in checks))
    failed = sum(not check.passed for check in checks)
    verdict = f"{failed} of {len(checks)} checks FAILED" if failed else "All checks passed"
    print(f"\n{verdict} in {seconds:.0f} s.")
    if json_path is not None:
        result = _json(count, cycles, accelerator, rows, checks, run, reference, seconds)
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


def _heading(ranks: int, wanted: int, cycles: int, accelerator: str, devices: int) -> str:
    layout = Layout.of(ranks)
    megatron = megatron_version()
    maker = f"megatron-core {megatron}" if megatron else "new_group, as Megatron calls it"
    if accelerator == "cuda":
        on = f"NCCL, one rank a GPU, {_counted(devices, 'GPU')} here"
        if wanted > ranks:
            on += f" (so not the {wanted} ranks asked for)"
    else:
        on = (
            "simulated accelerator on the CPU; each communicator holds "
            f"{mebibytes(COMMUNICATOR_BYTES)} a rank"
        )
    dense, experts = layout.dense, layout.experts
    return "\n".join(
        [
            f"reloadpg demo: {_counted(ranks, 'rank')}, {_counted(cycles, 'cycle')}",
            "  a cycle: train, offload the process groups, generate in the memory that this frees,",
            "           reload the groups",
            f"  runs on: {on}",
            f"  groups:  FSDP2's, and by {maker}: tensor {dense['tp']}, pipeline {dense['pp']}, "
            f"data {dense['dp']}, expert {experts['ep']}",
            "  task:    say the largest digit so far; reward is the share of right answers",
        ]
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _json(
    ranks: int,
    cycles: int,
    accelerator: str,
    rows: list[Row],
    checks: list[Check],
    run: list[dict[str, Any]],
    reference: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "cycles": cycles,
        "accelerator": accelerator,
        "seconds": seconds,
        "passed": all(check.passed for check in checks),
        "rows": [row.to_dict() for row in rows],
        "checks": {
            check.name: {"passed": check.passed, "detail": check.detail} for check in checks
        },
        "with_reloadpg": run,
        "without_reloadpg": reference,
    }
