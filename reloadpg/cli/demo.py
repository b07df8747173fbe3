"""``reloadpg demo``: run ``examples/colocated_rl.py`` with and without reloadpg, and compare.

The ranks run the example's job. A subclass records the bits of every loss, the memory that each
offload releases, and a collective on every group while it is offloaded and after its reload. The
records of the two runs are then compared.
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
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import counted, mebibytes, table
from .console import CommandError, follow_lines, new_file, positive, say

__all__ = ["add", "judge"]

EXAMPLES = tuple(parent / "examples" / "colocated_rl.py" for parent in Path(__file__).parents[1:3])
"""Paths of the example: in an installed package, and in the source tree."""

ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is not deterministic without it
    # Torch looks up 127.0.0.1 in DNS at each connection to its store. A lost query (one in a
    # hundred on one machine) then delays all ranks by 5 s.
    "RES_OPTIONS": "timeout:1",
}
COUNTERS = {
    "accelerator": "measured by the accelerator",
    "resident": "of the processes' resident memory",
    "device": "measured by the GPU driver",
}
COMMUNICATOR_BYTES = 8 << 20
"""Bytes that one communicator of the simulated accelerator holds on each rank."""

RESIDENT_SHARE = 0.9
"""Minimum share of the released memory by which the process's resident memory must shrink."""

Records = Sequence[Mapping[str, Any]]
"""The record of each rank, in rank order."""


def add(subcommands: Any) -> None:
    """Add the subcommand to the parser."""
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
    failed = sum(not check.passed for check in checks)
    ending = f"{failed} of {len(checks)} checks FAILED" if failed else "All checks passed"
    seconds = time.monotonic() - begun
    header = ("cycle", "groups", "released MiB", "offload ms", "reload ms", "reward")
    shown = []
    for row in rows:
        times = (round(row["offload_ms"]), round(row["reload_ms"]))
        shown.append(
            (row["cycle"], row["groups"], row["released_bytes"] >> 20, *times, row["reward"])
        )
    say(f"\n{table(header, shown)}")
    say("Groups and memory: all ranks together. Times: the slowest rank.\n")
    say("\n".join(f"  {'[ok]' if c.passed else '[FAILED]'} {c.name}: {c.detail}" for c in checks))
    say(f"\n{ending} in {seconds:.0f} s.")
    if options.json is not None:
        result = {
            "ranks": ranks,
            "cycles": cycles,
            "accelerator": "cuda" if devices else "simulated",
            "seconds": seconds,
            "passed": not failed,
            "rows": rows,
            "checks": {one.name: {"passed": one.passed, "detail": one.detail} for one in checks},
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
    first = everyone[0]
    row = {"cycle": first["cycle"], "loss": first["mean_loss"], "reward": first["reward"]}
    if "groups_offloaded" in first:
        row["groups"] = sum(one["groups_offloaded"] for one in everyone)
        row["released_bytes"] = sum(next(iter(one["released_bytes"].values())) for one in everyone)
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
    """Run the job on new ranks and return their records. Blocking."""
    from ..testing import run_ranks

    variables: dict[str, str | None] = {n: os.environ.get(n, v) for n, v in ENVIRONMENT.items()}
    variables["RELOADPG_AUTOINSTALL"] = None  # ranks install with separate options
    variables["RELOADPG_SIM_BYTES"] = str(COMMUNICATOR_BYTES)
    if not devices:
        variables["CUDA_VISIBLE_DEVICES"] = ""
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
    import torch
    import torch.distributed as dist

    import reloadpg
    from reloadpg.testing import simulated

    class RecordingJob(example.ColocatedJob):  # type: ignore[misc]
        def __init__(self, device: Any, offload: bool, cycles: int, lines: Path) -> None:
            super().__init__(device, offload=offload)
            self.planned, self.lines = cycles, lines
            # A gloo group bypasses: it keeps working while the others are offloaded.
            self.control = dist.new_group(backend="gloo", group_desc="control")
            # A mesh over all ranks has WORLD for a group.
            others = {n: g for n, g in self.groups.items() if g is not dist.group.WORLD}
            self.checked = {"WORLD": dist.group.WORLD, **others}
            shape, shared = (16, example.LENGTH), torch.Generator().manual_seed(0)
            self.probes = torch.randint(example.DIGITS, shape, generator=shared).to(device)
            self.first_reward, self.cycles = 0.0, list[dict[str, Any]]()
            self.now, self.before = dict[str, Any](), dict[str, int]()
            self.reports = list[reloadpg.Report]()
            reloadpg.on_report(self.reports.append)

        def recorded(self) -> dict[str, Any]:
            self.run(self.planned)
            weights = self.weights()
            return {
                "rank": dist.get_rank(),
                "groups": {n: dist.get_process_group_ranks(g) for n, g in self.checked.items()},
                "first_reward": self.first_reward,
                "cycles": self.cycles,
                # Use the groups of the last reload as those of earlier reloads were used.
                "wrong_sums": self.wrong_sums(),
                "final_evaluation": self.evaluate(weights).hex(),
                "parameters": _digest(weights.values()),
            }

        def train(self, rollouts: Any) -> Any:
            if not self.cycles:
                self.first_reward = self.mean(rollouts.rewards())
            steps = super().train(rollouts)
            self.now["losses"] = [loss.hex() for loss, _ in steps]
            self.now["gradient_norms"] = [norm.hex() for _, norm in steps]
            self.now["wrong_sums"] = self.wrong_sums()
            return steps

        def rollout(self, weights: Any) -> Any:
            if not self.offload:
                return super().rollout(weights)
            self.reports.clear()
            self.before = self.in_use()
            rollouts = super().rollout(weights)
            self.before = {}
            for one in ("offload", "reload"):
                reports = [report for report in self.reports if report.operation == one]
                self.now[f"groups_{one}ed"] = sum(len(report.groups) for report in reports)
                self.now[f"{one}_ms"] = sum(report.total_ms for report in reports)
            due = (True, len(self.cycles) + 1)
            self.now["not_reloaded"] = [
                name
                for name, group in self.checked.items()
                if not isinstance(group, reloadpg.ReloadableProcessGroup)
                or (group.is_live, group.generation) != due
            ]
            return rollouts

        def generate(self, weights: Any, free_bytes: int = 0) -> Any:
            if self.before:  # in a rollout: the groups are offloaded
                after = self.in_use()
                self.now["released_bytes"] = {n: self.before[n] - after[n] for n in after}
                usable = [name for name, group in self.checked.items() if self.is_usable(group)]
                self.now["usable_while_offloaded"] = usable
            rollouts = super().generate(weights, free_bytes)
            probed = example.generate(weights, self.probes, None, 0)
            self.now["buffer_bytes"] = rollouts.buffer_bytes
            self.now["probes"] = self.gathered(_digest([probed.answers, probed.logprobs]))
            return rollouts

        def log(self, iteration: int, loss: float, evaluation: float, reward: float) -> None:
            means = {"mean_loss": loss, "evaluation": evaluation.hex(), "reward": reward}
            self.cycles.append({"cycle": iteration, **self.now, **means})
            self.now = {}
            line = _line(_row(self.gathered(self.cycles[-1])), self.planned)
            if dist.get_rank() == 0:
                with self.lines.open("a") as file:
                    file.write(f"{line}\n")

        def in_use(self) -> dict[str, int]:
            """Bytes in use, by source; the table shows the first. Local."""
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()  # the allocator's cache is not NCCL's memory
                free, total = torch.cuda.mem_get_info(self.device)
                return {"device": total - free}
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident = pages * os.sysconf("SC_PAGE_SIZE")
            return {"accelerator": simulated.stats().held_bytes, "resident": resident}

        def is_usable(self, group: Any) -> bool:
            try:
                self.total(1.0, group)
            except reloadpg.GroupOffloadedError:
                return False
            return True

        def wrong_sums(self) -> list[str]:
            """Groups whose all-reduce returns a wrong sum of the members' ranks."""
            wrong = []
            for name, group in self.checked.items():
                due = sum(rank + 1 for rank in dist.get_process_group_ranks(group))
                got = self.total(dist.get_rank() + 1, group)
                wrong += [f"{name}: {got:g} instead of {due}"] if got != due else []
            return wrong

        def gathered(self, value: Any) -> list[Any]:
            everyone = [None] * self.ranks
            dist.all_gather_object(everyone, value, group=self.control)
            return everyone

    return RecordingJob


def _digest(tensors: Iterable[Any]) -> str:
    """SHA-256 over the bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# -- the comparison ---------------------------------------------------------------------------


class Check(NamedTuple):
    name: str
    passed: bool
    detail: str

    @classmethod
    def of(cls, name: str, faults: Sequence[str], detail: str) -> Check:
        """Return a check that passed with ``detail``, unless there are faults."""
        first = f"{counted(len(faults), 'fault')}; first, {faults[0]}" if faults else detail
        return cls(name, not faults, first)


def _values(run: Records, *names: str) -> list[tuple[str, Any]]:
    """Recorded values of all ranks and cycles, with their origin."""
    return [
        (f"rank {record['rank']}, cycle {cycle['cycle']}, {name}[{index}]", item)
        for record in run
        for cycle in record["cycles"]
        for name in names
        for items in [cycle[name] if isinstance(cycle[name], list) else [cycle[name]]]
        for index, item in enumerate(items)
    ]


def _shown(released: Mapping[str, int]) -> str:
    return "; ".join(f"{mebibytes(size)} {COUNTERS[name]}" for name, size in released.items())


def judge(run: Records, reference: Records) -> list[Check]:
    """Compare a run with the same run without offloading. Pure."""
    bits = ("losses", "gradient_norms", "evaluation", "mean_loss", "reward")
    ours, theirs = (
        _values(one, *bits) + [("final evaluation", rank["final_evaluation"]) for rank in one]
        for one in (run, reference)
    )
    pairs = zip(ours, theirs, strict=True)
    differing = [f"{where} is {a}, without reloadpg {b}" for (where, a), (_, b) in pairs if a != b]
    losses = len(_values(run, "losses"))
    digests = sorted({record["parameters"][:16] for record in (*run, *reference)})
    cycles = zip(run[0]["cycles"], reference[0]["cycles"], strict=True)
    unlike = [a["cycle"] for a, b in cycles if len({*a["probes"], *b["probes"]}) != 1]
    buffer = mebibytes(min(size for _, size in _values(run, "buffer_bytes")))
    released = [one for _, one in _values(run, "released_bytes")]
    kept = [
        f"{where}: {_shown(sizes)}"
        for where, sizes in _values(run, "released_bytes")
        if min(sizes.values()) < RESIDENT_SHARE * max(1, next(iter(sizes.values())))
    ]
    by_cycle = list(zip(*(record["cycles"] for record in run), strict=True))
    least = {
        name: min(sum(one["released_bytes"][name] for one in everyone) for everyone in by_cycle)
        for name in released[0]
    }
    usable = [f"{where}: {name}" for where, name in _values(run, "usable_while_offloaded")]
    tried = sum(len(record["groups"]) * len(record["cycles"]) for record in run)
    wrong = [f"{where}: {name}" for where, name in _values(run, "not_reloaded", "wrong_sums")]
    wrong += [f"rank {one['rank']}, at the end: {s}" for one in run for s in one["wrong_sums"]]
    counts = [(one["groups_offloaded"], one["groups_reloaded"]) for e in by_cycle for one in e]
    wrong += [f"{n} groups offloaded, {m} reloaded" for n, m in counts if n != m or n == 0]
    reloaded = sum(m for _, m in counts)
    first, last = run[0]["first_reward"], run[0]["cycles"][-1]["reward"]
    rise = f"{first:.2f} before training, {last:.2f} at the end"
    return [
        Check.of(
            "losses",
            differing,
            f"all {losses} (every rank, every step) bit-identical in both runs; so are "
            f"{len(ours) - losses} gradient norms, evaluations and rewards",
        ),
        Check.of(
            "final parameters",
            [f"SHA-256 {', '.join(digests)} differ between ranks or runs"] if digests[1:] else [],
            f"SHA-256 {digests[0]} on all ranks, in both runs",
        ),
        Check.of(
            "generation",
            [f"differs between ranks or runs in cycle {cycle}" for cycle in unlike],
            f"in {buffer} per rank, equal on all ranks and in both runs",
        ),
        Check.of("memory", kept, f"freed in each cycle at least {_shown(least)}"),
        Check.of("while offloaded", usable, f"{tried} collectives tried, all refused"),
        Check.of(
            "after reload",
            wrong,
            f"{reloaded} groups are the same objects, each with the right all-reduce sum",
        ),
        Check.of("reward", [] if last > first else [rise], rise),
    ]
