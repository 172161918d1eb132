"""A picture of steps per second over the rate of the links: a line for each contender, and the planner's choice."""

import math
import statistics
from collections.abc import Mapping
from xml.sax.saxutils import escape

from hosts.lineup import AUTO
from hosts.trials import Trial

__all__ = ["draw"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 480, 60, 250, 40, 50
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#777777")


def draw(trials: Mapping[float, Trial], title: str) -> str:
    """The picture of `trials`, by bits per second."""
    rates = sorted(trials)
    speeds = {
        name: {rate: 1 / statistics.median(trials[rate].walls[name]) for rate in rates if name in trials[rate].walls}
        for name in dict.fromkeys(name for rate in rates for name in trials[rate].walls)
    }
    most = max(speed for line in speeds.values() for speed in line.values())
    first, last = math.log10(rates[0]), math.log10(rates[-1])

    def across(rate: float) -> float:
        share = 0.5 if first == last else (math.log10(rate) - first) / (last - first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def down(speed: float) -> float:
        return _HEIGHT - _BOTTOM - speed / most * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 22, f"steps per second over the rate of the links ({title})", size=14)]
    for rate in rates:
        parts.append(_line([(across(rate), down(0)), (across(rate), down(most))], "#dddddd", 1))
        name = f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
        parts.append(_text(across(rate), _HEIGHT - _BOTTOM + 20, name, anchor="middle"))
    for share in (0.0, 0.5, 1.0):
        parts.append(_line([(_LEFT, down(share * most)), (_WIDTH - _RIGHT, down(share * most))], "#dddddd", 1))
        parts.append(_text(_LEFT - 6, down(share * most) + 4, f"{share * most:.2g}", anchor="end"))
    # The names stand at the height of the last point, moved apart where they would overlap.
    ends = sorted(speeds, key=lambda name: -speeds[name].get(rates[-1], 0.0))
    below = 0.0
    for number, name in enumerate(ends):
        points = [(across(rate), down(speed)) for rate, speed in sorted(speeds[name].items())]
        colour = "#000000" if name == AUTO else _COLOURS[number % len(_COLOURS)]
        parts.append(_line(points, colour, 3 if name == AUTO else 1.5, "4 3" if name.startswith("torch") else ""))
        below = max(points[-1][1] + 4, below + 14)
        parts.append(_text(_WIDTH - _RIGHT + 10, below, name, colour=colour))
        if name == AUTO:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" stroke="#000000"/>' for x, y in points]
    for rate in rates:
        choice = trials[rate].plan.partition("\n")[0].partition(":")[0]
        parts.append(
            _text(across(rate), down(1 / statistics.median(trials[rate].walls[AUTO])) - 10, choice, anchor="middle")
        )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _line(points: list[tuple[float, float]], colour: str, width: float, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, colour: str = "#333333") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(words)}</text>'
