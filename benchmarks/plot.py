"""Draw the time of a cycle against the number of groups and of ranks.

Needs matplotlib (``pip install matplotlib``). The file is the one that ``benchmarks/cycle.py
--json`` writes.

Usage: python benchmarks/plot.py FIGURES.json PICTURE.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

COLORS = {"reloadable": "#1f6feb", "by hand": "#8b949e", "replay all": "#d1242f"}
BY_RANKS = {
    "reload_ms": ("reload", COLORS["reloadable"]),
    "torch_ms": ("torch creates the rank's own", COLORS["by hand"]),
    "replay_all_ms": ("all calls of the job again", COLORS["replay all"]),
}


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Draw both pictures, next to each other, into a file whose ending is its format."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "reloadpg", "svg.fonttype": "none"})
    page, (by_groups, by_ranks) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    _by_groups(by_groups, figures["by_groups"])
    _by_ranks(by_ranks, figures["by_job_size"])
    for axes in (by_groups, by_ranks):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
        axes.legend(frameon=False)
    # Without the date, equal figures give equal files.
    page.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(page)


def _by_groups(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for backend, style in (("gloo", "--"), ("sim", "-")):
        for way in ("by hand", "reloadable"):
            points = [
                (row["groups"], row["cycle_ms"])
                for row in rows
                if (row["backend"], row["way"]) == (backend, way)
            ]
            label = f"{'simulated' if backend == 'sim' else backend}, {way}"
            axes.plot(*zip(*points, strict=True), style, marker="o", color=COLORS[way], label=label)
    axes.set(
        title="Offload and reload of a rank's groups",
        xlabel="groups of each rank (4 ranks)",
        ylabel="ms a cycle, wall time",
        xlim=0,
        ylim=0,
    )


def _by_ranks(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    ranks = [row["ranks"] for row in rows]
    for name, (label, color) in BY_RANKS.items():
        axes.plot(ranks, [row[name] for row in rows], marker="o", color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.minorticks_off()
    axes.set(
        title="Rebuild of a Megatron rank's groups",
        xlabel="ranks of the job",
        ylabel="ms, CPU time of Python (fake backend)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the figures and write the picture."""
    parser = argparse.ArgumentParser(description="Draw the figures of benchmarks/cycle.py.")
    parser.add_argument("figures", type=Path, help="what cycle.py --json wrote")
    parser.add_argument("picture", type=Path, help="file to write: .svg or .png")
    options = parser.parse_args(arguments)
    draw(json.loads(options.figures.read_text()), options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
