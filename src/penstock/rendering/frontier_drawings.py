"""The SVG picture of a frontier: the time of a step against the bytes of the fullest rank, one numbered dot per plan.

Between two dots the plan with less memory is the fastest, so that the line goes down in stairs. The words of the plans
are below. The picture follows the reader's light or dark setting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from penstock.rendering.device_boxes import STYLE, stage_colors
from penstock.values.quantities import bytes_text, seconds_text

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 380, 84, 24, 44, 48
_TICKS, _LINE, _ROOM = 5, 18, 0.06


@dataclass(frozen=True, slots=True)
class PlanDot:
    """A plan in the picture: the most bytes of a rank, the seconds of a step, and words about it."""

    peak_bytes: float
    seconds: float
    text: str


def draw_frontier(dots: Sequence[PlanDot], reference: PlanDot) -> str:
    """The SVG document of the picture. `dots`: the least memory first. `reference`: a ring, not part of the line."""
    every = [*dots, reference]
    across = _scale([dot.peak_bytes for dot in every], _LEFT, _WIDTH - _RIGHT)
    down = _scale([dot.seconds for dot in every], _HEIGHT - _BOTTOM, _TOP)
    height = _HEIGHT + _LINE * (len(dots) + 2)
    title = f"A step takes {seconds_text(dots[-1].seconds)} to {seconds_text(dots[0].seconds)}, by memory"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        *_axes(every, across, down),
    ]
    path = [f"M{across(dots[0].peak_bytes):.1f},{down(dots[0].seconds):.1f}"]
    path += [f"H{across(dot.peak_bytes):.1f}V{down(dot.seconds):.1f}" for dot in dots[1:]]
    lines.append(f'<path class="arrow" d="{" ".join(path)}"/>')
    for index, (dot, (fill, ink)) in enumerate(zip(dots, stage_colors(len(dots)), strict=True)):
        x, y, below = across(dot.peak_bytes), down(dot.seconds), _HEIGHT + _LINE * (index + 0.5)
        for left, top in ((x, y), (_LEFT, below)):
            lines.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="8" fill="{fill}"/>')
            lines.append(f'<text class="small middle" x="{left:.1f}" y="{top + 4:.1f}" style="fill: {ink}">{index + 1}')
            lines[-1] += "</text>"
        lines.append(_words(dot, below))
    last = _HEIGHT + _LINE * (len(dots) + 0.7)
    for left, top, radius in (across(reference.peak_bytes), down(reference.seconds), 11), (_LEFT, last, 7):
        lines.append(f'<circle class="arrow" cx="{left:.1f}" cy="{top:.1f}" r="{radius}"/>')
    return "\n".join([*lines, _words(reference, last), "</svg>", ""])


def _scale(values: Sequence[float], first: float, last: float) -> Callable[[float], float]:
    """Where a value lies between the pixels `first` and `last`, with some room at both ends."""
    least, most = min(values), max(values)
    room = _ROOM * (most - least) or most or 1.0
    return lambda value: first + (last - first) * (value - least + room) / (most - least + 2 * room)


def _axes(dots: Sequence[PlanDot], across: Callable[[float], float], down: Callable[[float], float]) -> list[str]:
    bottom, right, found = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, []
    peaks, steps = [dot.peak_bytes for dot in dots], [dot.seconds for dot in dots]
    for tick in range(_TICKS):
        size, time = (min(own) + (max(own) - min(own)) * tick / (_TICKS - 1) for own in (peaks, steps))
        x, y = across(size), down(time)
        found.append(f'<path class="level" d="M{x:.1f},{_TOP}V{bottom}M{_LEFT},{y:.1f}H{right}"/>')
        found.append(f'<text class="soft middle" x="{x:.1f}" y="{bottom + 18}">{bytes_text(size)}</text>')
        found.append(f'<text class="soft end" x="{_LEFT - 8}" y="{y + 4:.1f}">{seconds_text(time)}</text>')
    return found


def _words(dot: PlanDot, y: float) -> str:
    text = f"{bytes_text(dot.peak_bytes)}, {seconds_text(dot.seconds)}: {dot.text}"
    return f'<text x="{_LEFT + 18}" y="{y + 4:.1f}">{escape(text)}</text>'
