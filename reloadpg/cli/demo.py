"""``reloadpg demo``: run ``examples/colocated_rl.py`` with and without reloadpg, and compare.

The ranks run the example's job. A subclass records the bits of every loss and the reports of every
offload and reload. The records of the two runs are then compared.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import counted, mebibytes, table
from .console import CommandError, follow_lines, new_file, positive, say

EXAMPLES = tuple(parent / "examples" / "colocated_rl.py" for parent in Path(__file__).parents[1:3])
"""Paths of the example: in an installed package, and in the source tree."""

COMMUNICATOR_BYTES = 8 << 20
"""Bytes that one communicator of the simulated accelerator holds on each rank."""

Records = Sequence[Mapping[str, Any]]
"""The record of each rank, in rank order."""


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "demo",
        help="a reinforcement-learning loop that offloads its groups in each iteration",
        description=(
            "Run a colocated reinforcement-learning loop on this machine: train, offload the "
            "process groups, generate in the released memory, reload. Run it again without "
            "reloadpg and compare the losses bit by bit. Exit code 1 if anything differs."
        ),
    )
    ranks = "processes (default: 4; on GPUs one per GPU, at most 4)"
    parser.add_argument("--ranks", type=positive, help=ranks)
    iterations = "iterations (default: %(default)s)"
    parser.add_argument("--cycles", type=positive, default=6, help=iterations)
    accelerators = "accelerator (default: the GPUs of this machine, or else the simulated one)"
    choices = ("auto", "cuda", "simulated")
    parser.add_argument("--accelerator", choices=choices, default="auto", help=accelerators)
    results = "also write the records of all ranks"
    parser.add_argument("--json", type=new_file, metavar="PATH", help=results)
    parser.set_defaults(run=_run, needs={"numpy": "demo", "torch": "demo"})


def _run(options: argparse.Namespace) -> int:
    from ..testing import RanksFailedError

    def terminated(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        return _compare(options)
    except RanksFailedError as error:
        details = str(error).partition("\n")[2].strip()
        say(f"\nreloadpg demo: a rank failed; all have been ended\n{details}", sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as interrupt:
        say("\nreloadpg demo: interrupted; all ranks have been ended", sys.stderr)
        return int(getattr(interrupt, "code", 128 + signal.SIGINT))
    finally:
        signal.signal(signal.SIGTERM, before)


def _compare(options: argparse.Namespace) -> int:
    from .bench import cuda_devices

    begun, cycles = time.monotonic(), options.cycles
    devices = cuda_devices() if options.accelerator != "simulated" else 0
    if options.accelerator == "cuda" and not devices:
        raise CommandError(
            "--accelerator cuda: torch finds no GPU that NCCL can use; nothing was started. Omit "
            "the option to run on the simulated accelerator."
        )
    ranks = min(options.ranks or 4, devices or sys.maxsize)
    example = next(path for path in EXAMPLES if path.is_file())
    say(_heading(example, ranks, options.ranks or ranks, cycles, devices))
    say("\nFirst with reloadpg:")
    run = _launch(example, ranks, cycles, devices, offload=True)
    say("\nThen the same job without reloadpg, on fresh ranks:")
    reference = _launch(example, ranks, cycles, devices, offload=False)

    rows = [_row([record["cycles"][cycle] for record in run]) for cycle in range(cycles)]
    checks = judge(run, reference)
    failed = sum(not check["passed"] for check in checks.values())
    ending = f"{failed} of {len(checks)} checks FAILED" if failed else "All checks passed"
    seconds = time.monotonic() - begun
    header = ("cycle", "groups", "released MiB", "offload ms", "reload ms", "reward")
    shown = [
        (
            *(row["cycle"], row["groups"], row["released_bytes"] >> 20),
            *(round(row["offload_ms"]), round(row["reload_ms"]), row["reward"]),
        )
        for row in rows
    ]
    say(f"\n{table(header, shown)}")
    say("Groups and memory: all ranks together. Times: the slowest rank.\n")
    for name, check in checks.items():
        say(f"  {'[ok]' if check['passed'] else '[FAILED]'} {name}: {check['detail']}")
    say(f"\n{ending} in {seconds:.0f} s.")
    if options.json is not None:
        result = {
            "ranks": ranks,
            "cycles": cycles,
            "accelerator": "cuda" if devices else "simulated",
            "seconds": seconds,
            "passed": not failed,
            "rows": rows,
            "checks": checks,
            "with_reloadpg": run,
            "without_reloadpg": reference,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


def _heading(example: Path, ranks: int, wanted: int, cycles: int, devices: int) -> str:
    try:
        maker = f"megatron-core {version('megatron-core')}"
    except PackageNotFoundError:
        maker = "a DeviceMesh (megatron-core is not installed)"
    place = "simulated accelerator on the CPU; each communicator holds "
    place += f"{mebibytes(COMMUNICATOR_BYTES)} per rank"
    if devices:
        place = f"NCCL, one rank per GPU, {counted(devices, 'GPU')} here"
        place += f" (fewer than the {wanted} requested ranks)" if wanted > ranks else ""
    return f"""\
reloadpg demo: {counted(ranks, "rank")}, {counted(cycles, "cycle")}
  a cycle: train, offload the process groups, generate in the memory that this frees,
           reload the groups
  runs on: {place}
  groups:  FSDP2's, and tensor, pipeline, data and expert groups of {maker}
  task:    say the largest digit so far; reward is the share of right answers
  program: {example}"""


def _row(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate a cycle over all ranks: sums of groups and memory, times of the slowest rank."""
    row = {name: everyone[0][name] for name in ("cycle", "loss", "reward")}
    if "offload_groups" in everyone[0]:
        row["groups"] = sum(one["offload_groups"] for one in everyone)
        row["released_bytes"] = sum(one["released_bytes"] for one in everyone)
        row |= {name: max(one[name] for one in everyone) for name in ("offload_ms", "reload_ms")}
    return row


def _line(row: Mapping[str, Any], cycles: int) -> str:
    text = f"  cycle {row['cycle']}/{cycles}: reward {row['reward']:.2f}, loss {row['loss']:+.4f}"
    if "groups" not in row:
        return text
    return (
        f"{text}; {counted(row['groups'], 'group')} offloaded in {row['offload_ms']:.0f} ms, "
        f"{mebibytes(row['released_bytes'])} freed, reloaded in {row['reload_ms']:.0f} ms"
    )


# -- the ranks --------------------------------------------------------------------------------


def _launch(
    example: Path, ranks: int, cycles: int, devices: int, *, offload: bool
) -> list[dict[str, Any]]:
    from ..testing import run_ranks

    variables: dict[str, str | None] = {
        "RELOADPG_AUTOINSTALL": None,  # ranks install with separate options
        "RELOADPG_SIM_BYTES": str(COMMUNICATOR_BYTES),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        **({} if devices else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    limit = 600.0 + 60.0 * cycles
    with follow_lines(say) as lines:
        given = (str(example), cycles, offload, str(lines))
        return run_ranks(_rank, ranks, args=given, timeout=limit, env=variables)


def _rank(
    rank: int, world_size: int, path: str, cycles: int, offload: bool, lines: str
) -> dict[str, Any]:
    import reloadpg

    warnings.simplefilter("ignore")
    reloadpg.uninstall()  # RELOADPG_AUTOINSTALL=1 may have installed it
    spec: Any = importlib.util.spec_from_file_location("colocated_rl", path)
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    device = example.join(offload=offload)
    job = _recording(example)(device, offload, cycles, Path(lines))
    recorded: dict[str, Any] = job.recorded()
    example.dist.destroy_process_group()
    return recorded


def _recording(example: Any) -> Any:
    """Extend the example's job to record the values to compare."""
    import torch.distributed as dist

    import reloadpg

    class RecordingJob(example.ColocatedJob):  # type: ignore[misc]
        def __init__(self, device: Any, offload: bool, cycles: int, lines: Path) -> None:
            super().__init__(device, offload=offload)
            self.planned, self.lines = cycles, lines
            self.steps, self.wrong = list[tuple[float, float]](), list[str]()
            self.cycles = list[dict[str, Any]]()
            self.reports = list[reloadpg.Report]()
            reloadpg.on_report(self.reports.append)

        def recorded(self) -> dict[str, Any]:
            self.run(self.planned)
            self.cycles[-1]["wrong_sums"] += self.wrong_sums()  # after the last reload
            digest = hashlib.sha256()
            for tensor in self.weights().values():
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
            ended = {"cycles": self.cycles, "parameters": digest.hexdigest()}
            return {"rank": dist.get_rank(), **ended}

        def train(self, rollouts: Any) -> Any:
            self.steps = super().train(rollouts)
            self.wrong = self.wrong_sums()
            return self.steps

        def wrong_sums(self) -> list[str]:
            """Use each group, so that its communicator exists: a sum of ones is its size."""
            sums = {name: self.total(1.0, group) for name, group in self.groups.items()}
            return [n for n, found in sums.items() if found != self.groups[n].size()]

        def log(self, iteration: int, loss: float, evaluation: float, reward: float) -> None:
            norms = [norm for _, norm in self.steps]
            now: dict[str, Any] = {
                "cycle": iteration,
                "loss": loss,
                "reward": reward,
                "losses": [value.hex() for value, _ in self.steps],
                "others": [value.hex() for value in (*norms, loss, evaluation, reward)],
                "wrong_sums": self.wrong,
                "released_bytes": 0,
            }
            for one in ("offload", "reload") if self.offload else ():
                reports = [report for report in self.reports if report.operation == one]
                now[f"{one}_groups"] = sum(len(report.groups) for report in reports)
                now[f"{one}_ms"] = sum(report.total_ms for report in reports)
                now["released_bytes"] += sum(report.released_bytes or 0 for report in reports)
            self.reports.clear()
            self.cycles.append(now)
            everyone: list[Any] = [None] * self.ranks
            dist.all_gather_object(everyone, now)
            if dist.get_rank() == 0:
                with self.lines.open("a") as file:
                    file.write(f"{_line(_row(everyone), self.planned)}\n")

    return RecordingJob


# -- the comparison ---------------------------------------------------------------------------


def _check(faults: Sequence[str], detail: str) -> dict[str, Any]:
    """Whether a check has passed, and a detail: the first fault, if there is one."""
    first = f"{counted(len(faults), 'fault')}; first, {faults[0]}" if faults else detail
    return {"passed": not faults, "detail": first}


def judge(run: Records, reference: Records) -> dict[str, dict[str, Any]]:
    """Compare a run with the same run without offloading: the checks by name. Pure."""
    cycles = [
        (f"rank {one['rank']}, cycle {now['cycle']}", now) for one in run for now in one["cycles"]
    ]
    others = [now for one in reference for now in one["cycles"]]
    differing = [
        f"{where}, {name}[{index}] is {ours}, without reloadpg {theirs}"
        for (where, now), other in zip(cycles, others, strict=True)
        for name in ("losses", "others")
        for index, (ours, theirs) in enumerate(zip(now[name], other[name], strict=True))
        if ours != theirs
    ]
    losses, more = (sum(len(now[name]) for _, now in cycles) for name in ("losses", "others"))
    digests = sorted({record["parameters"][:16] for record in (*run, *reference)})
    faults = [
        f"{where}: a wrong sum over {name}" for where, now in cycles for name in now["wrong_sums"]
    ]
    faults += [
        f"{where}: {now['offload_groups']} groups offloaded, {now['reload_groups']} reloaded, "
        f"{mebibytes(now['released_bytes'])} freed"
        for where, now in cycles
        if now["offload_groups"] != now["reload_groups"] or now["released_bytes"] <= 0
    ]
    least = mebibytes(min(now["released_bytes"] for _, now in cycles))
    groups = sum(now["reload_groups"] for _, now in cycles)
    unequal = [f"SHA-256 {', '.join(digests)} differ between ranks or runs"] if digests[1:] else []
    return {
        "losses": _check(
            differing,
            f"all {losses} (every rank, every step) bit-identical in both runs; so are "
            f"{more} gradient norms, evaluations and rewards",
        ),
        "final parameters": _check(unequal, f"SHA-256 {digests[0]} on all ranks, in both runs"),
        "offloads": _check(
            faults,
            f"{groups} groups offloaded and reloaded, with the right sums over each; each rank "
            f"freed at least {least} in each cycle",
        ),
    }
