"""The picture of a job's offloads and reloads: one lane a rank, time from left to right.

An operation takes milliseconds, and minutes lie between two of them: each has a separate axis, and
the time between two axes is cut out and named. Drawn by matplotlib (extra ``cli``).
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..reports import Span
from ..texts import counted


@dataclass(frozen=True)
class Run:
    """One operation on one rank.

    Attributes:
        start, end: Unix times in seconds.
        memory: bytes in use at some moments: Unix time and bytes.
        source: source of the memory values.
        running: whether it has not ended; ``end`` is then the last update.
    """

    rank: int
    operation: str
    start: float
    end: float
    spans: Sequence[Span] = ()
    memory: Sequence[tuple[float, int]] = ()
    source: str = ""
    error: str = ""
    running: bool = False


# -- layout; all lengths in inches ----------------------------------------------------------------

_BAR, _STRIP, _WORDS, _PAD = 0.2, 0.24, 0.16, 0.1
"""Heights in a lane: of an operation, of the memory below it, of a line of text, and between."""
_ALL, _NARROWEST, _WITH_WORDS, _GAP = 9.6, 1.3, 4.8, 0.84
"""Widths: of all axes together, and at least of one, without and with a line of text; of a gap."""
_LETTER = 0.058
"""Estimated width of a letter of the smallest text."""
_CLOSE_S = 0.005
"""Seconds between the runs of two ranks that count as one operation, since clocks differ."""

_INK, _FAINT, _ERROR, _MEMORY, _WORK = "#222222", "#6b7280", "#c0392b", "#6a3d9a", "#d5d9e0"
_PHASES = {
    "groups": ("#0072b2", "groups: communicators"),
    "device": ("#e69f00", "device: queued work"),
    "callbacks": ("#cc79a7", "callbacks"),
    "collect": ("#009e73", "garbage collection"),
    "store": ("#56b4e9", "store: connecting"),
}
_OTHER_PHASE = ("#8c6d31", "other phase")
_WAIT: dict[str, Any] = {"facecolor": "white", "edgecolor": _FAINT, "hatch": "//////", "lw": 0}
_FAILED: dict[str, Any] = {"facecolor": "none", "edgecolor": _ERROR, "lw": 1.2}
_ABSENT: dict[str, Any] = {**_FAILED, "linestyle": ":"}
_FROM_AXES: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}


def draw(runs: Sequence[Run], ranks: Collection[int], path: Path, *, note: str = "") -> None:
    """Draw operations, at least one, into a file, whose ending is its format.

    Each of these ranks has a lane. If an operation failed or has not ended, ranks that did not call
    it are marked. ``note`` says what is left out.
    """
    from matplotlib import rc_context

    settings = {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "reloadpg"}
    with rc_context({**settings, "hatch.linewidth": 0.8, "hatch.color": _FAINT}):
        # Without the date, equal runs give equal files.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure = _figure(runs, sorted(ranks), note)
        figure.savefig(path, format=path.suffix[1:], metadata=metadata, dpi=120)


def _figure(runs: Sequence[Run], ranks: Sequence[int], note: str) -> Any:
    from matplotlib.figure import Figure

    operations = clusters(runs)
    spans = [(cluster[0].start, max(run.end for run in cluster)) for cluster in operations]
    # The width grows with the root of the time, so that short operations stay legible.
    weights = [max(end - start, 1e-6) ** 0.5 for start, end in spans]
    widths = [
        max(_WITH_WORDS if _troubled(cluster) else _NARROWEST, _ALL * weight / sum(weights))
        for cluster, weight in zip(operations, weights, strict=True)
    ]
    levels = [size for run in runs for _, size in run.memory]
    words = any(map(_troubled, operations))
    lane = _BAR + _PAD + _STRIP * bool(levels) + _WORDS * words
    size = (max(sum(widths) + _GAP * len(widths) + 0.4, 7.6), 2.1 + lane * len(ranks))
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(spans[0][0]))
    said = [f"From {begun}", *filter(None, [note]), "Each axis has a separate time scale."]
    title = f"Offloads and reloads of {counted(len(ranks), 'rank')}\n"
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=_INK)
    figure.text(0.01, 1 - 0.4 / size[1], ". ".join(said), va="center", color=_FAINT)
    all_axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for index, (axes, cluster) in enumerate(zip(all_axes, operations, strict=True)):
        start, end = spans[index]
        axes.set(xlim=(start, max(end, start + 1e-6)), ylim=(lane * len(ranks), 0))
        axes.set_facecolor("#f6f7f9")
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.tick_params(colors=_FAINT, length=3)
        ticks = 5 if widths[index] >= 2.6 else 3
        places = [start + (end - start) * number / (ticks - 1) for number in range(ticks)]
        axes.set_xticks(places, ["0", *(_duration(place - start) for place in places[1:])])
        axes.set_yticks([])
        _draw_name(axes, cluster)
        for number, rank in enumerate(ranks):
            _draw_lane(axes, cluster, rank, number * lane, _axis(levels), widths[index] + _GAP / 2)
        if index + 1 < len(operations):
            _draw_gap(axes, cluster, spans[index + 1][0] - end)
    _draw_ranks(all_axes[0], ranks, lane, _axis(levels) if levels else None)
    _draw_legend(figure, runs)
    return figure


def _troubled(cluster: Sequence[Run]) -> bool:
    return any(run.error or run.running for run in cluster)


def clusters(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs of different ranks that overlap: one operation of the job each. Pure."""
    found: list[list[Run]] = []
    end = 0.0
    for run in sorted(runs, key=lambda one: one.start):
        ranks = {one.rank for one in found[-1]} if found else {run.rank}
        if run.rank in ranks or run.start > end + _CLOSE_S:
            found.append([])
            end = run.end
        found[-1].append(run)
        end = max(end, run.end)
    return found


def _draw_name(axes: Any, cluster: Sequence[Run]) -> None:
    """The operation's name above the lanes, with its time from the first rank to the last."""
    name = " and ".join(dict.fromkeys(run.operation for run in cluster))
    failed = any(run.error for run in cluster)
    start, end = axes.get_xlim()
    text = f"{name} {'failed' if failed else _duration(end - start)}"
    axes.text(start, -0.08, text, weight="bold", color=_ERROR if failed else _INK, va="bottom")


def _draw_ranks(
    axes: Any, ranks: Sequence[int], lane: float, levels: tuple[float, float] | None
) -> None:
    """The lanes' names, and the memory at the top and the bottom of each strip."""
    bars = [number * lane + _PAD / 2 + _BAR / 2 for number in range(len(ranks))]
    names = [f"rank {rank}" for rank in ranks]
    axes.set_yticks(bars, names, weight="bold", color=_INK)
    if levels is not None:
        at = [bar + _BAR / 2 + 0.04 + below for bar in bars for below in (_STRIP - 0.08, 0)]
        sizes = [_size(level) for level in levels] * len(ranks)
        axes.set_yticks(at, sizes, minor=True, size=6, color=_MEMORY)
    axes.tick_params(axis="y", which="both", length=0)


def _draw_lane(
    axes: Any,
    cluster: Sequence[Run],
    rank: int,
    top: float,
    levels: tuple[float, float],
    room: float,
) -> None:
    """What one rank did, and where it failed."""
    mine = [run for run in cluster if run.rank == rank]
    top += _PAD / 2
    bar, below = (top, _BAR), top + _BAR + 0.04
    if not mine and _troubled(cluster):
        start, end = axes.get_xlim()
        text = f"did not call {max(cluster, key=lambda run: run.start).operation}"
        axes.broken_barh([(start, end - start)], bar, clip_on=False, **_ABSENT)
        left: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(text, (start, top + _BAR / 2), va="center", size=7, color=_ERROR, **left)
    for run in mine:
        axes.broken_barh([(run.start, run.end - run.start)], bar, facecolor=_WORK)
        for part in run.spans:
            start = run.start + max(part.start_ms, 0.0) / 1e3
            end = min(run.start + (part.start_ms + part.ms) / 1e3, run.end)
            if end > start:
                color = {"facecolor": _PHASES.get(part.name, _OTHER_PHASE)[0]}
                axes.broken_barh([(start, end - start)], bar, **(_WAIT if part.is_wait else color))
        if run.memory:
            low, high = levels
            times, sizes = zip(*sorted(run.memory), strict=True)
            heights = [below + (_STRIP - 0.08) * (high - size) / (high - low) for size in sizes]
            axes.plot(times, heights, color=_MEMORY, lw=1.2, marker=".", ms=3, clip_on=False)
        if run.running:
            axes.plot([run.end], [top + _BAR / 2], ">", color=_ERROR, ms=6, clip_on=False)
        if run.error:
            axes.broken_barh([(run.start, run.end - run.start)], bar, clip_on=False, **_FAILED)
            first = run.error.strip().splitlines()[0]
            text = textwrap.shorten(first, max(20, int(room / _LETTER)), placeholder=" ...")
            y = below + (_STRIP if run.memory else 0)
            axes.text(axes.get_xlim()[0], y, text, size=7, va="top", color=_ERROR)


def _draw_gap(axes: Any, before: Sequence[Run], length: float) -> None:
    last = max(before, key=lambda run: run.end)
    state = "failed" if last.error else "offloaded" if last.operation == "offload" else "live"
    text = f"{state}\n{_duration(max(0.0, length))}"
    axes.annotate(text, (1, 0.5), xytext=(8, 0), va="center", ha="left", color=_FAINT, **_FROM_AXES)


def _draw_legend(figure: Any, runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = {part.name for run in runs for part in run.spans}
    entries = [entry for name, entry in _PHASES.items() if name in found]
    if any(name not in _PHASES and not name.startswith("wait.") for name in found):
        entries.append(_OTHER_PHASE)
    entries.append((_WORK, "other work"))
    handles: list[Any] = [Patch(facecolor=color, label=label) for color, label in entries]
    if any(part.is_wait for run in runs for part in run.spans):
        handles.append(Patch(label="waits for other ranks", **_WAIT))
    if any(run.error for run in runs):
        handles.append(Patch(label="failed", **_FAILED))
    if any(run.running for run in runs):
        handles.append(Line2D([], [], color=_ERROR, marker=">", lw=0, label="not ended"))
    source = next((run.source for run in runs if run.memory), "")
    if source:
        handles.append(Line2D([], [], color=_MEMORY, label=f"memory in use ({source})"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False)


def _axis(levels: Sequence[int]) -> tuple[float, float]:
    """The smallest and largest value of a memory axis; starts at 0 if that wastes little space."""
    if not levels:
        return 0.0, 1.0
    low, high = float(min(levels)), float(max(levels))
    if low <= high / 2:
        low = 0.0
    return (low, high) if high > low else (low - 1.0, high + 1.0)


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    for below, unit, digits in ((9.95e-3, 1e3, 1), (1.0, 1e3, 0)):
        if seconds < below:
            return f"{seconds * unit:.{digits}f} ms"
    if seconds < 600:
        return f"{seconds:.{1 if seconds < 99.95 else 0}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(size: float) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.{1 if size < 10 << shift else 0}f} {unit}"
    return f"{size:.0f} B"
