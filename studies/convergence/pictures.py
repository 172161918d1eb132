"""SVG pictures of curves: panels side by side and below each other, with one legend.

They stand alone (no script, no font, no other file) and follow the reader's light or dark setting, as the library's
pictures of timelines do. A band shows the least and the most of the seeds, the line their mean.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from penstock.timelines.drawings import axis_step

__all__ = ["Curve", "Panel", "draw"]

_WIDTH, _HEIGHT = 270, 190
"""Of a panel's frame, in pixels."""
_LEFT, _ABOVE, _BELOW, _GAP = 52, 26, 44, 14
_LETTER = 6.6
"""Pixels that a letter of the legend takes."""
_COLOURS = ("#1b1f24", "#0067a8", "#c65200", "#007d5c", "#b0559b", "#8a6d00", "#59636e", "#d1242f", "#5a4fcf")
_DARK = ("#e6eaef", "#58a9e6", "#ee8b4a", "#3fc49a", "#d78cc8", "#d6b23c", "#9aa4b0", "#ff7b72", "#a79cff")

_STYLE = """
  svg { background: #ffffff; --ink: #1b1f24; --soft: #59636e; --faint: #e3e7ec; %s }
  @media (prefers-color-scheme: dark) {
    svg { background: #14171c; --ink: #e6eaef; --soft: #9aa4b0; --faint: #2b313a; %s }
  }
  text { font: 11px ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--soft) }
  .title { font-weight: 600; font-size: 12px; fill: var(--ink) } .key { fill: var(--ink) }
  .grid { stroke: var(--faint); fill: none } .frame { stroke: var(--soft); fill: none }
  .line { fill: none; stroke-width: 1.8; stroke-linejoin: round } .band { stroke: none; opacity: 0.15 }
""".strip("\n")


@dataclass(frozen=True, slots=True)
class Curve:
    """`name`: the legend's; curves of one name have one colour, by `colour`."""

    name: str
    colour: int
    points: tuple[tuple[float, float, float, float], ...]
    """x, and of y the mean, the least and the most."""
    dashed: bool = False
    marked: bool = False
    """With a dot at every point."""
    joined: bool = True
    """By a line. Points that are not joined are marked."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One frame with its axes."""

    title: str
    curves: tuple[Curve, ...]
    x_title: str
    y_title: str
    top: float | None = None
    """Where the vertical axis ends; what is higher is cut off. By default all is shown."""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    """Numbers to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool

    def at(self, value: float) -> float:
        low, high = self._scale(self.low), self._scale(self.high)
        return self.start + (self._scale(value) - low) / (high - low or 1.0) * (self.stop - self.start)

    def _scale(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.log else value

    def ticks(self) -> list[float]:
        """Round numbers between the ends, at least 45 pixels apart."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1, 3) if self.high / self.low < 300 else (1,)
            values = [factor * 10.0**power for power in powers for factor in factors]
        else:
            step = axis_step((self.high - self.low) * 45 / abs(self.stop - self.start))
            values = [index * step for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        slack = 1e-9 * abs(self.high)
        return [value for value in values if self.low - slack <= value <= self.high + slack]


def draw(rows: Sequence[Sequence[Panel]], title: str) -> str:
    """The text of an SVG document with the `rows` of panels below their legend."""
    columns = max(map(len, rows))
    width = 8 + columns * (_LEFT + _WIDTH + _GAP)
    legend, top = _legend(rows, width)
    height = top + len(rows) * (_ABOVE + _HEIGHT + _BELOW)
    light, dark = (
        "; ".join(f"--c{index}: {colour}" for index, colour in enumerate(colours)) for colours in (_COLOURS, _DARK)
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE % (light, dark)}\n</style>",
        *legend,
    ]
    for row_number, row in enumerate(rows):
        for column, panel in enumerate(row):
            left = 8 + column * (_LEFT + _WIDTH + _GAP) + _LEFT
            lines += _panel(panel, left, top + row_number * (_ABOVE + _HEIGHT + _BELOW) + _ABOVE)
    return "\n".join([*lines, "</svg>", ""])


def _legend(rows: Sequence[Sequence[Panel]], width: int) -> tuple[list[str], int]:
    """One entry for each name, and the height of that."""
    curves = {curve.name: curve for row in rows for panel in row for curve in panel.curves}
    lines: list[str] = []
    x, y = 12.0, 16
    for curve in curves.values():
        length = 34 + _LETTER * len(curve.name) + 14
        if x > 12 and x + length > width:
            x, y = 12.0, y + 18
        fill = f"fill: var(--c{curve.colour % len(_COLOURS)})"
        lines += [
            f'<path class="line" d="M{x:.0f} {y - 4}h26" {_stroke(curve)}/>'
            if curve.joined
            else f'<circle cx="{x + 20:.0f}" cy="{y - 4}" r="3" style="{fill}"/>',
            f'<text class="key" x="{x + 32:.0f}" y="{y}">{escape(curve.name)}</text>',
        ]
        x += length
    return lines, y + 10


def _stroke(curve: Curve) -> str:
    dashes = ' stroke-dasharray="5 3"' if curve.dashed else ""
    return f'style="stroke: var(--c{curve.colour % len(_COLOURS)})"{dashes}'


def _panel(panel: Panel, left: int, top: int) -> Iterator[str]:
    """The frame, its axes, and the curves within it."""
    points = [point for curve in panel.curves for point in curve.points]
    if not points:
        return
    xs, lows, highs = [p[0] for p in points], [p[2] for p in points], [p[3] for p in points]
    high = panel.top if panel.top is not None else max(highs)
    low = min(lows)
    margin = 0.0 if panel.log_y else 0.04 * (high - low)
    if panel.top is None:
        high += margin
    # Dots are not cut in halves by the frame.
    inset = 10 if any(curve.marked or not curve.joined for curve in panel.curves) else 0
    x_axis = _Axis(min(xs), max(xs), left + inset, left + _WIDTH - inset, panel.log_x)
    y_axis = _Axis(low - margin, high, top + _HEIGHT, top, panel.log_y)
    frame = f'x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}"'
    name = f"frame{left}-{top}"
    yield f'<text class="title" x="{left}" y="{top - 9}">{escape(panel.title)}</text>'
    for value in x_axis.ticks():
        x = x_axis.at(value)
        yield f'<path class="grid" d="M{x:.1f} {top}v{_HEIGHT}"/>'
        yield f'<text text-anchor="middle" x="{x:.1f}" y="{top + _HEIGHT + 14}">{value:g}</text>'
    for value in y_axis.ticks():
        y = y_axis.at(value)
        yield f'<path class="grid" d="M{left} {y:.1f}h{_WIDTH}"/>'
        yield f'<text text-anchor="end" x="{left - 5}" y="{y + 4:.1f}">{value:g}</text>'
    yield f'<text text-anchor="middle" x="{left + _WIDTH / 2}" y="{top + _HEIGHT + 30}">{escape(panel.x_title)}</text>'
    x, y = left - 36, top + _HEIGHT / 2
    yield f'<text text-anchor="middle" transform="translate({x} {y}) rotate(-90)">{escape(panel.y_title)}</text>'
    yield f'<clipPath id="{name}"><rect {frame}/></clipPath><g clip-path="url(#{name})">'
    for curve in panel.curves:
        yield from _curve(curve, x_axis, y_axis)
    yield f'</g><rect class="frame" {frame}/>'


def _curve(curve: Curve, x_axis: _Axis, y_axis: _Axis) -> Iterator[str]:
    pixels = [(x_axis.at(x), *(y_axis.at(y) for y in ys)) for x, *ys in curve.points]
    if any(low != high for _, _, low, high in pixels):
        edge = [f"{x:.1f} {low:.1f}" for x, _, low, _ in pixels]
        edge += [f"{x:.1f} {high:.1f}" for x, _, _, high in reversed(pixels)]
        yield f'<path class="band" d="M{"L".join(edge)}Z" style="fill: var(--c{curve.colour % len(_COLOURS)})"/>'
    path = "L".join(f"{x:.1f} {mean:.1f}" for x, mean, _, _ in pixels)
    if curve.joined:
        yield f'<path class="line" d="M{path}" {_stroke(curve)}><title>{escape(curve.name)}</title></path>'
    for x, mean, _, _ in pixels if curve.marked or not curve.joined else ():
        fill = f"fill: var(--c{curve.colour % len(_COLOURS)})"
        yield f'<circle cx="{x:.1f}" cy="{mean:.1f}" r="3" style="{fill}"/>'
