"""A timeline of a job's offloads and reloads as SVG: one lane per rank, time from left to right.

An operation takes milliseconds, but there may be minutes between two operations. So each has a
separate time scale, and the time in between is cut out and shown as text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from ..errors import counted

__all__ = ["Part", "Run", "drawn"]


@dataclass(frozen=True)
class Part:
    """A phase of an operation, or a wait in it: Unix times in seconds."""

    name: str
    start: float
    end: float

    @property
    def is_wait(self) -> bool:
        return self.name.startswith("wait.")


@dataclass(frozen=True)
class Run:
    """One operation on one rank.

    Attributes:
        rank: the rank.
        operation: ``offload`` or ``reload``.
        start, end: Unix times in seconds.
        parts: its phases and waits.
        memory: bytes in use at some moments: Unix time and bytes.
        source: source of the memory values.
        error: why it failed; empty if it did not.
        running: whether it has not ended; ``end`` is then the last update.
    """

    rank: int
    operation: str
    start: float
    end: float
    parts: Sequence[Part] = ()
    memory: Sequence[tuple[float, int]] = ()
    source: str = ""
    error: str = ""
    running: bool = False


# -- layout; all lengths in pixels ----------------------------------------------------------------

_GUTTER, _MARGIN = 92, 24
_TOP = 84
_BAR, _STRIP, _LANE, _LANE_ALONE = 18, 24, 56, 28
"""Heights of an operation, of the memory below it, and of a lane with and without memory."""
_GAP = 84
"""Width of a gap."""
_NARROWEST, _ALL_SCALES = 130, 960
"""Width of the shortest operation, and total width if none is that short."""
_CLOSE_S, _CLOSE_PART = 0.005, 0.2
"""Distance, in seconds and relative to their length, below which operations share a scale."""

_FONT = "DejaVu Sans, Verdana, sans-serif"
_INK, _FAINT, _ERROR, _MEMORY = "#222", "#6b7280", "#c0392b", "#6a3d9a"
_WORK = "#d5d9e0"
_PHASES = {
    "groups": ("#0072b2", "groups: communicators"),
    "device": ("#e69f00", "device: its queued work"),
    "callbacks": ("#cc79a7", "callbacks"),
    "collect": ("#009e73", "garbage collection"),
    "store": ("#56b4e9", "store"),
}
_OTHER_PHASE = ("#8c6d31", "other phase")


@dataclass(frozen=True)
class _Scale:
    """An interval of time and its position in the picture."""

    runs: Sequence[Run]
    start: float
    end: float
    left: float
    width: float

    @property
    def right(self) -> float:
        return self.left + self.width

    def x(self, at: float) -> float:
        length = self.end - self.start
        share = (at - self.start) / length if length > 0 else 0.0
        return self.left + self.width * min(1.0, max(0.0, share))


def _clusters(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs that are close in time, such as those of ranks that wait for each other."""
    clusters: list[list[Run]] = []
    end = 0.0
    for run in sorted(runs, key=lambda one: one.start):
        begun = clusters[-1][0].start if clusters else 0.0
        if clusters and run.start - end <= max(_CLOSE_S, _CLOSE_PART * (end - begun)):
            clusters[-1].append(run)
            end = max(end, run.end)
        else:
            clusters.append([run])
            end = run.end
    return clusters


def _scales(runs: Sequence[Run]) -> list[_Scale]:
    clusters = _clusters(runs)
    spans = [(cluster[0].start, max(run.end for run in cluster)) for cluster in clusters]
    # Widths grow less than durations, so that the shortest operation stays legible.
    weights = [max(end - start, 1e-6) ** 0.5 for start, end in spans]
    left, scales = float(_GUTTER), []
    for cluster, (start, end), weight in zip(clusters, spans, weights, strict=True):
        width = max(_NARROWEST, _ALL_SCALES * weight / sum(weights))
        scales.append(_Scale(cluster, start, end, left, width))
        left += width + _GAP
    return scales


class _Svg:
    """The elements of a picture, in drawing order."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def rect(
        self,
        box: tuple[float, float, float, float],
        fill: str,
        *,
        stroke: str = "none",
        title: str = "",
    ) -> None:
        x, y, width, height = box
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}"'
        inner = f"<title>{escape(title)}</title>" if title else ""
        self.elements.append(f'<rect {shape} fill="{fill}" stroke="{stroke}">{inner}</rect>')

    def line(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str,
        *,
        width: float = 1.0,
        dash: str = "",
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        style = f'fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashes}'
        self.elements.append(f'<polyline points="{path}" {style}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 11,
        anchor: str = "start",
        fill: str = _INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        style = f'font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{weight}'
        self.elements.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>')

    def document(self, width: float, height: float, title: str) -> str:
        size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        hatch = (
            '<pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/>'
            '<line x1="0" y1="0" x2="0" y2="6" stroke="#6b7280" stroke-width="2.4"/></pattern>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" role="img">',
                f"<title>{escape(title)}</title>",
                f"<defs>{hatch}</defs>",
                f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def drawn(runs: Sequence[Run], *, note: str = "") -> str:
    """Draw operations as an SVG document. Pure.

    Args:
        runs: at least one; of any ranks, in any order.
        note: a sentence about omitted operations.
    """
    scales = _scales(runs)
    ranks = sorted({run.rank for run in runs})
    levels = [size for run in runs for _, size in run.memory]
    pitch = _LANE if levels else _LANE_ALONE
    bottom = _TOP + pitch * len(ranks)
    svg = _Svg()
    title = f"Offloads and reloads of {counted(len(ranks), 'rank')}"
    svg.text(_MARGIN, 26, title, size=15, bold=True)
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(scales[0].start))
    svg.text(_MARGIN, 44, ". ".join(filter(None, (f"From {begun}", note))), fill=_FAINT)
    for index, scale in enumerate(scales):
        _draw_axis(svg, scale, bottom)
        if index:
            _draw_gap(svg, scales[index - 1], scale, bottom)
    axis = _axis(levels)
    for lane, rank in enumerate(ranks):
        top = _TOP + pitch * lane
        svg.text(_GUTTER - 12, top + 13, f"rank {rank}", anchor="end", bold=True)
        for scale in scales:
            for run in scale.runs:
                if run.rank == rank:
                    _draw_run(svg, scale, run, top)
        if levels:
            _draw_memory(svg, scales, rank, top + _BAR + 4, axis)
    source = next((run.source for run in runs if run.source), "")
    right = max(scales[-1].right + _MARGIN, 760)
    end = _draw_legend(svg, runs, bottom + 44, right, source if levels else "")
    return svg.document(right, end, title)


def _draw_axis(svg: _Svg, scale: _Scale, bottom: float) -> None:
    """The operations' names above the lanes, and the time below."""
    svg.rect((scale.left, _TOP - 6, scale.width, bottom - _TOP + 4), "#f6f7f9")
    free = scale.left
    for name, several in groupby(scale.runs, key=lambda run: run.operation):
        together = list(several)
        failed = any(run.error for run in together)
        words = f"{name} failed" if failed else name
        width = 7.2 * len(words)
        # The last label may end at the end of the scale; one without space is only a tooltip.
        left = min(scale.x(min(run.start for run in together)), scale.right - width)
        if left >= free:
            svg.text(left, _TOP - 13, words, fill=_ERROR if failed else _INK, bold=True)
            free = left + width + 8
    length = scale.end - scale.start
    svg.line([(scale.left, bottom + 2), (scale.right, bottom + 2)], _FAINT)
    parts = 4 if scale.width >= 260 else 2
    for number in range(parts + 1):
        x = scale.left + scale.width * number / parts
        svg.line([(x, bottom + 2), (x, bottom + 6)], _FAINT)
        anchor = "start" if number == 0 else "end" if number == parts else "middle"
        words = _duration(length * number / parts) if number else "0"
        svg.text(x, bottom + 18, words, size=9.5, anchor=anchor, fill=_FAINT)


def _draw_gap(svg: _Svg, before: _Scale, after: _Scale, bottom: float) -> None:
    middle = (before.right + after.left) / 2
    last = max(before.runs, key=lambda run: run.end)
    state = "offloaded" if last.operation == "offload" else "live"
    if last.error:
        state = "failed"
    svg.text(middle, _TOP - 25, state, size=10, anchor="middle", fill=_FAINT)
    length = _duration(max(0.0, after.start - before.end))
    svg.text(middle, _TOP - 13, length, size=10, anchor="middle", fill=_FAINT)
    svg.line([(middle, _TOP - 6), (middle, bottom)], "#b8bec8", dash="2 4")


def _draw_run(svg: _Svg, scale: _Scale, run: Run, top: float) -> None:
    left, right = scale.x(run.start), scale.x(run.end)
    about = f"rank {run.rank}, {run.operation}"
    whole = f"{about}: {_duration(run.end - run.start)}"
    if run.running:
        whole += ", not ended"
    if run.error:
        whole += f"; failed: {run.error}"
    svg.rect((left, top, right - left, _BAR), _WORK, title=whole)
    for part in run.parts:
        x, end = scale.x(max(part.start, run.start)), scale.x(min(part.end, run.end))
        words = f"{about}, {part.name}: {_duration(part.end - part.start)}"
        svg.rect((x, top, end - x, _BAR), _colour(part), title=words)
    if run.error:
        svg.rect((left, top, right - left, _BAR), "none", stroke=_ERROR)
    if run.running:
        tip = right + 7
        svg.line([(right, top), (tip, top + _BAR / 2), (right, top + _BAR)], _ERROR, width=1.5)


def _draw_memory(
    svg: _Svg, scales: Sequence[_Scale], rank: int, top: float, axis: tuple[float, float]
) -> None:
    """A line over all operations; dashed between measurements of different operations."""
    low, high = axis
    last: tuple[float, float] | None = None
    bottom = top + _STRIP
    for scale in scales:
        for run in scale.runs:
            points = [
                (scale.x(at), bottom - _STRIP * (size - low) / (high - low))
                for at, size in sorted(run.memory)
                if run.rank == rank
            ]
            if not points:
                continue
            if last is not None:
                svg.line([last, points[0]], _MEMORY, dash="2 3")
            if len(points) > 1:
                svg.line(points, _MEMORY, width=1.6)
            last = points[-1]
    for y, level in ((top + 7, high), (bottom, low)):
        svg.text(_GUTTER - 12, y, _size(level), size=8.5, anchor="end", fill=_MEMORY)


def _draw_legend(svg: _Svg, runs: Sequence[Run], top: float, right: float, source: str) -> float:
    """Draw the legend in as many rows as needed; return the bottom of the picture."""
    found = {part.name for run in runs for part in run.parts}
    entries = [entry for name, entry in _PHASES.items() if name in found]
    if any(name not in _PHASES and not name.startswith("wait.") for name in found):
        entries.append(_OTHER_PHASE)
    entries.append((_WORK, "the library"))
    if any(part.is_wait for run in runs for part in run.parts):
        entries.append(("url(#wait)", "waits for other ranks"))
    if any(run.error for run in runs):
        entries.append(("error", "failed"))
    if any(run.running for run in runs):
        entries.append(("running", "not ended"))
    if source:
        entries.append(("memory", f"memory in use ({source})"))
    x, y = float(_MARGIN), top
    for fill, words in entries:
        width = 30 + 7.0 * len(words)
        if x + width > right - _MARGIN:
            x, y = float(_MARGIN), y + 22
        if fill == "memory":
            svg.line([(x, y - 4), (x + 16, y - 4)], _MEMORY, width=1.6)
        elif fill == "running":
            svg.line([(x + 5, y - 10), (x + 12, y - 4), (x + 5, y + 2)], _ERROR, width=1.5)
        elif fill == "error":
            svg.rect((x, y - 10, 16, 12), "none", stroke=_ERROR)
        else:
            svg.rect((x, y - 10, 16, 12), fill, stroke="#9aa1ad")
        svg.text(x + 22, y, words, fill=_INK)
        x += width + 10
    svg.text(_MARGIN, y + 24, "Each operation has a separate time scale.", size=10, fill=_FAINT)
    return y + 40


def _colour(part: Part) -> str:
    return "url(#wait)" if part.is_wait else _PHASES.get(part.name, _OTHER_PHASE)[0]


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
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(size: float) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.{1 if size < 10 << shift else 0}f} {unit}"
    return f"{size:.0f} B"
