"""The proof: what the run that offloads must share with the one that does not, and must show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .table import mebibytes

__all__ = ["Check", "judge"]

Run = Sequence[dict[str, Any]]
"""What each rank saw, in rank order."""

_RESIDENT_SHARE = 0.9
"""Share of the released memory by which the process must be seen to shrink from outside."""

_COUNTED = {
    "accelerator": "as the accelerator counts",
    "resident": "of the processes' resident memory",
    "device": "as the GPU driver counts",
}


@dataclass(frozen=True)
class Check:
    """One thing that was checked: its name, whether it holds, and the figures."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"  {'[ok]' if self.passed else '[FAILED]'} {self.name}: {self.detail}"


def judge(run: Run, reference: Run) -> list[Check]:
    """All checks of a run against the same run without offloading. Pure."""
    return [
        _losses(run, reference),
        _parameters(run, reference),
        _generation(run, reference),
        _released(run),
        _refused(run),
        _reloaded(run),
        _reward(run),
    ]


def _values(run: Run, *names: str) -> list[tuple[str, Any]]:
    """Recorded values of all ranks and cycles, lists item by item, with where they come from."""
    return [
        (f"rank {seen['rank']}, cycle {cycle['cycle']}, {name}[{index}]", item)
        for seen in run
        for cycle in seen["cycles"]
        for name in names
        for index, item in enumerate(
            cycle[name] if isinstance(cycle[name], list) else [cycle[name]]
        )
    ]


def _losses(run: Run, reference: Run) -> Check:
    names = ("losses", "gradient_norms", "evaluation", "mean_loss", "reward")
    ours, theirs = _values(run, *names), _values(reference, *names)
    ours += [(f"rank {seen['rank']}, final evaluation", seen["final_evaluation"]) for seen in run]
    theirs += [("", seen["final_evaluation"]) for seen in reference]
    differing = [
        f"{where} is {a}, without reloadpg {b}"
        for (where, a), (_, b) in zip(ours, theirs, strict=True)
        if a != b
    ]
    if differing:
        detail = f"{len(differing)} of {len(ours)} values differ; first, {differing[0]}"
        return Check("losses", False, detail)
    count = len(_values(run, "losses"))
    return Check(
        "losses",
        True,
        f"all {count} (every rank, every step) bit-identical in both runs; so are "
        f"{len(ours) - count} gradient norms, evaluations and rewards",
    )


def _parameters(run: Run, reference: Run) -> Check:
    digests = {seen["parameters"][:16] for seen in (*run, *reference)}
    passed = len(digests) == 1
    where = "on all ranks, in both runs" if passed else "differ between ranks or runs"
    return Check("final parameters", passed, f"SHA-256 {', '.join(sorted(digests))} {where}")


def _generation(run: Run, reference: Run) -> Check:
    differing = [
        cycle["cycle"]
        for cycle, other in zip(run[0]["cycles"], reference[0]["cycles"], strict=True)
        if len({*cycle["probes"], *other["probes"]}) != 1
    ]
    if differing:
        return Check("generation", False, f"differs between ranks or runs in cycles {differing}")
    smallest = min(value for _, value in _values(run, "buffer_bytes"))
    return Check(
        "generation",
        True,
        f"in {mebibytes(smallest)} a rank, and alike on all ranks, in both runs",
    )


def _released(run: Run) -> Check:
    kept = []
    for where, released in _values(run, "released_bytes"):
        first, *others = released.values()
        if first <= 0 or any(value < _RESIDENT_SHARE * first for value in others):
            figures = "; ".join(
                f"{mebibytes(value)} {_COUNTED[name]}" for name, value in released.items()
            )
            kept.append(f"{where}: {figures}")
    if kept:
        return Check("memory", False, f"not released {len(kept)} times; first, {kept[0]}")
    figures = "; ".join(
        f"{mebibytes(min(_totals(run, name)))} {_COUNTED[name]}"
        for name in run[0]["cycles"][0]["released_bytes"]
    )
    return Check("memory", True, f"freed in each cycle at least {figures}")


def _totals(run: Run, counter: str) -> list[int]:
    """Released bytes of all ranks together, cycle by cycle."""
    cycles = zip(*(seen["cycles"] for seen in run), strict=True)
    return [sum(rank["released_bytes"][counter] for rank in ranks) for ranks in cycles]


def _refused(run: Run) -> Check:
    usable = _values(run, "usable_while_offloaded")
    if usable:
        where, name = usable[0]
        detail = f"{len(usable)} collectives succeeded; first, {where}: {name}"
        return Check("while offloaded", False, detail)
    tried = sum(len(seen["groups"]) * len(seen["cycles"]) for seen in run)
    return Check("while offloaded", True, f"{tried} collectives tried, all refused")


def _reloaded(run: Run) -> Check:
    wrong = [f"{where}: {name}" for where, name in _values(run, "not_reloaded", "wrong_sums")]
    wrong += [f"rank {seen['rank']}, at the end: {s}" for seen in run for s in seen["wrong_sums"]]
    offloaded = [value for _, value in _values(run, "groups_offloaded")]
    reloaded = [value for _, value in _values(run, "groups_reloaded")]
    if offloaded != reloaded or 0 in offloaded:
        wrong.append(f"{sum(offloaded)} groups offloaded, {sum(reloaded)} reloaded")
    if wrong:
        return Check("after reload", False, f"{len(wrong)} faults; first, {wrong[0]}")
    return Check(
        "after reload",
        True,
        f"{sum(reloaded)} groups back as the same objects, each with the right all-reduce sum",
    )


def _reward(run: Run) -> Check:
    first, last = run[0]["first_reward"], run[0]["cycles"][-1]["reward"]
    return Check("reward", last > first, f"{first:.2f} before training, {last:.2f} at the end")
