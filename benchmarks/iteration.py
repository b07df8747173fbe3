"""Draw the memory of one GPU over an iteration of colocated training, without and with reloadpg.

Nothing is measured. The figure is arithmetic over published figures and the assumptions below, for
a model of 7 billion parameters on 8 GPUs of 80 GB (tensor, pipeline and data parallel by two), with
one rollout engine on each pair of GPUs. Needs matplotlib (``pip install matplotlib``).

Usage: python benchmarks/iteration.py PICTURE.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

GPU_GB = 80.0
PARAMETERS = 7e9
TENSOR, PIPELINE, DATA = 2, 2, 2

COMMUNICATORS_GB = 7.0
"""A trainer's idle communicators on each of 8 H100, of "7 to 10": verl#6266."""

ENGINE_COMMUNICATORS_GB = 1.0
"""An engine's communicators at tensor parallel 4, "about 1 GiB": vllm#51485."""

CONTEXTS_GB = 1.6
"""The CUDA contexts of two processes, 800 MB each: AMem's README."""

ACTIVATIONS_GB = 20.0
"""Assumed."""

TRAINS, GENERATES, END = (0.0, 4.0), (4.6, 9.4), 14.0
"""The phases, in no unit; between them memory is released or restored."""

COLORS = {
    "CUDA contexts": "#c9d1d9",
    "trainer's communicators": "#d1242f",
    "weights, gradients, optimizer": "#4a8f5c",
    "activations": "#a6d0b0",
    "engine: weights, communicators": "#9a6a1f",
    "engine: KV cache": "#f0c37b",
}


def training() -> dict[str, float]:
    """Gigabytes of the trainer on a GPU: 2 bytes a weight, 4 a gradient, 12 for the optimizer."""
    own = PARAMETERS / (TENSOR * PIPELINE) / 1e9
    return {
        "weights, gradients, optimizer": own * (2 + 4 + 12 / DATA),
        "activations": ACTIVATIONS_GB,
    }


def generating(kept_gb: float) -> dict[str, float]:
    """Gigabytes of the engine; its cache gets all that the trainer leaves."""
    weights = PARAMETERS * 2 / TENSOR / 1e9 + ENGINE_COMMUNICATORS_GB
    left = GPU_GB - CONTEXTS_GB - kept_gb - weights
    return {"engine: weights, communicators": weights, "engine: KV cache": left}


def draw(path: Path) -> None:
    """Draw both cases into a file whose ending is its format."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "reloadpg", "svg.fonttype": "none"})
    page, panels = pyplot.subplots(1, 2, figsize=(9.5, 3.6), sharey=True, layout="constrained")
    _panel(panels[0], "without", COMMUNICATORS_GB)
    _panel(panels[1], "with reloadpg.offloaded()", 0.0)
    panels[0].set_ylabel("GB of one GPU")
    handles, names = panels[0].get_legend_handles_labels()
    page.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    page.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(page)


def _panel(axes: Any, title: str, kept_gb: float) -> None:
    train = {
        "CUDA contexts": CONTEXTS_GB,
        "trainer's communicators": COMMUNICATORS_GB,
        **training(),
    }
    engine = generating(kept_gb)
    generate = {"CUDA contexts": CONTEXTS_GB, "trainer's communicators": kept_gb, **engine}
    times = [*TRAINS, *GENERATES, END - TRAINS[1], END]
    steps: list[Mapping[str, float]] = [train, train, generate, generate, train, train]
    values = [[step.get(name, 0.0) for step in steps] for name in COLORS]
    axes.stackplot(times, values, labels=list(COLORS), colors=list(COLORS.values()))
    cache = engine["engine: KV cache"]
    axes.text(7, GPU_GB - cache / 2, f"KV cache\n{cache:.0f} GB", ha="center", va="center")
    for middle, word in ((2, "train"), (7, "generate"), (12, "train")):
        axes.text(middle, GPU_GB + 2, word, ha="center")
    axes.set_title(title, pad=18)
    axes.set_xlim(0, END)
    axes.set_ylim(0, GPU_GB)
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", type=Path)
    draw(parser.parse_args().picture)


if __name__ == "__main__":
    main()
