"""Pictures of a run: who had which device over time, and how long jobs took. SVG without scripts or other files."""

from collections.abc import Iterator, Mapping
from html import escape
from math import log

from penstock.errors import PlanError, visible
from penstock.fleet.histories import FleetRun
from penstock.values.quantities import axis_step

_COLORS = ("#0067a8", "#c65200", "#007d5c", "#b0559b", "#6b51b5", "#8a6d00", "#5a6b7b", "#b3261e")
_STYLE = """<style>
  svg { background: #ffffff; --ink: #1b1f24; --faint: #d5dae1 }
  @media (prefers-color-scheme: dark) { svg { background: #14171c; --ink: #e6eaef; --faint: #343b45 } }
  text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: var(--ink) } line { stroke: var(--faint) }
  .on { fill: #ffffff; pointer-events: none } polyline { fill: none; stroke-width: 2 }
</style>"""
_LEFT, _WIDTH, _TOP = 120, 900, 34


def devices_svg(run: FleetRun) -> str:
    """A row for each device, and in it the jobs that had it. Raises `PlanError` if the run did not record them."""
    if not run.held:
        raise PlanError("devices_svg(run=): expected a run with its leases, found none: simulate it with record=True")
    pools = {kind.devices: kind.workers for kind in run.kinds}
    rows = {(name, worker): row for row, (name, worker) in enumerate((n, w) for n in pools for w in range(pools[n]))}
    height = min(22, max(6, 900 // len(rows)))
    names = list(dict.fromkeys(held.job for held in run.held))
    parts = [*_axis(run.seconds, _TOP + height * len(rows))]
    for (name, worker), row in rows.items():
        if height >= 12 or worker == 0:
            parts.append(f'<text x="4" y="{_TOP + row * height + 12}">{_text(f"{name} {worker}")}</text>')
    for held in run.held:
        x, width = _x(held.start, run.seconds), _x(held.stop, run.seconds) - _x(held.start, run.seconds)
        number = names.index(held.job)
        for worker in held.workers:
            y = _TOP + rows[held.devices, worker] * height
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height - 1}" '
                f'fill="{_COLORS[number % len(_COLORS)]}">'
                f"<title>{_text(held.job)}: {held.start:.6g} to {held.stop:.6g} s</title></rect>"
            )
    return _svg(parts, _TOP + height * len(rows) + 30, "jobs on devices over time")


def completion_svg(runs: Mapping[str, FleetRun]) -> str:
    """The share of jobs that were done within a time, for each run; the time is logarithmic."""
    if not runs:
        raise PlanError("completion_svg(runs=): expected one run or more, found none: there is nothing to draw")
    times = {name: run.completion_seconds() for name, run in runs.items()}
    least = min(float(found[0]) for found in times.values())
    most = max(float(found[-1]) for found in times.values())
    span = max(most / max(least, 1e-9), 1.0 + 1e-9)
    height, parts = 300, []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + height * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="60" y="{y + 4}">{share:.0%}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        hours = least * span**share / 3600
        parts.append(f'<text x="{_LEFT + _WIDTH * share - 14:.1f}" y="{_TOP + height + 20}">{hours:.3g} h</text>')
    for number, (name, found) in enumerate(times.items()):
        color = _COLORS[number % len(_COLORS)]
        across = [_LEFT + _WIDTH * log(seconds / least) / log(span) for seconds in found.tolist()]
        down = [_TOP + height * (1 - done / len(found)) for done in range(1, len(found) + 1)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
        parts.append(f'<polyline points="{points}" stroke="{color}"/>')
        parts.append(f'<text x="{_LEFT + 8}" y="{_TOP + 16 + 16 * number}" style="fill: {color}">{_text(name)}</text>')
    return _svg(parts, _TOP + height + 36, "share of jobs done within a time")


def run_page(title: str, run: FleetRun) -> str:
    """An HTML page: the figures of the run, its completion times, and its devices if they were recorded."""
    pictures = [completion_svg({title: run}), *([devices_svg(run)] if run.held else [])]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(title)}</title>'
    return f"{head}<h1>{_text(title)}</h1><pre>{_text(run.describe(), lines=True)}</pre>{''.join(pictures)}</html>\n"


def _axis(seconds: float, bottom: int) -> Iterator[str]:
    step = axis_step(seconds / 8)
    for mark in range(int(seconds / step) + 1):
        x = _x(mark * step, seconds)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}">{mark * step:.6g} s</text>'


def _x(seconds: float, total: float) -> float:
    return _LEFT + _WIDTH * seconds / total


def _text(text: str, lines: bool = False) -> str:
    return escape(visible(text, lines=lines))


def _svg(parts: list[str], height: float, title: str) -> str:
    size = f'width="{_LEFT + _WIDTH + 40}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>{_STYLE}'
    return f'{head}<text x="4" y="18">{title}</text>{"".join(parts)}</svg>'
