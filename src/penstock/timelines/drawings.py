"""The SVG picture of a timeline, or of a prediction above a measurement: one row per rank, time to the right.

It needs no script, no font and no other file, so a README, a report or a browser can show it. Its colors follow the
reader's light or dark setting. The exact numbers are in the tooltips.

    rank 0  [0][1][2][3]////////////[0][1] ...    forward, backward, update; hatched: idle      idle 43%
             ==  ==  ==  ==                       transfers that the rank sends
            ..--^^^^^^^^^^^^^^^^^^^^--..          memory                                        1.2 GB
            |---------|---------|---------|
            0        1 ms      2 ms      3 ms
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from penstock.timelines.bars import ROOMY, Geometry, draw_row, painted_classes
from penstock.timelines.memories import RankMemory
from penstock.timelines.panels import Panel, held_stages, peak_words
from penstock.values.quantities import axis_step, bytes_text, seconds_text

_RIGHT, _HEADLINE = 84, 24
_LETTER = 7
"""The width of a digit of a label in pixels."""
_CROWD = 4_000
"""A picture with more spans is drawn without tooltips and numbers, which would be too slow in a browser."""

_STYLE = """
  svg { background: #ffffff; --ink: #1b1f24; --soft: #59636e; --faint: #d5dae1; --band: #f4f6f8; --hatch: #d3d9e0;
    --forward0: #0067a8; --forward1: #62b0e0; --backward0: #c65200; --backward1: #f0a35e; --update: #b0559b;
    --weight0: #6b51b5; --weight1: #ab98e0;
    --reduce: #007d5c; --send: #7d8590; --held: #c3cad3; --memory: #6d7f95 }
  @media (prefers-color-scheme: dark) {
    svg { background: #14171c; --ink: #e6eaef; --soft: #9aa4b0; --faint: #343b45; --band: #1b1f26; --hatch: #333a45;
      --forward0: #2f8fd0; --forward1: #8cc8f0; --backward0: #dd6a1b; --backward1: #f5b67e; --update: #cf7fbd;
      --weight0: #8b74d6; --weight1: #c3b5f0;
      --reduce: #2fb18c; --send: #8b949e; --held: #3b4450; --memory: #8295ad }
  }
  text { font: 12px ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink) }
  .title { font-weight: 600; font-size: 13px } .soft { fill: var(--soft); font-size: 11px }
  .forward0 { fill: var(--forward0) } .forward1 { fill: var(--forward1) }
  .backward0 { fill: var(--backward0) } .backward1 { fill: var(--backward1) }
  .weight0 { fill: var(--weight0) } .weight1 { fill: var(--weight1) }
  .update { fill: var(--update) } .reduce { fill: var(--reduce) } .send { fill: var(--send) }
  .idle { fill: url(#idle) } .wait { fill: transparent } .held { fill: var(--held) } .memory { fill: var(--memory) }
  .on0, .on1 { fill: #ffffff; text-anchor: middle; pointer-events: none; font-size: 11px } .on1 { fill: #14171c }
  .axis { stroke: var(--faint); stroke-width: 1; fill: none } .tick { text-anchor: middle }
  .critical { fill: none; stroke: var(--ink); stroke-width: 2.5; stroke-linejoin: round; pointer-events: none }
""".strip("\n")
_HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="var(--band)"/><rect width="1.5" height="6" fill="var(--hatch)"/></pattern></defs>'
)


def timeline_svg(panels: Sequence[Panel]) -> str:
    """The SVG document of `panels`, one below the other."""
    seconds = max(panel.seconds for panel in panels)
    crowded = sum(len(row) for panel in panels for row in panel.rows) > _CROWD
    ranks = max(len(panel.rows) for panel in panels)
    length = _length(panels, seconds, crowded)
    scale = length / seconds if seconds > 0 else 1.0
    peak = max((memory.peak_bytes for panel in panels for memory in panel.memory), default=0.0)
    geometry = Geometry(scale, crowded) if ranks <= ROOMY else Geometry(scale, crowded, 12, 3, 9, 4)
    width = geometry.left + length + _RIGHT
    legend, first = _legend(panels, geometry.left, width)
    lines: list[str] = []
    top = first
    for panel in panels:
        lines += [f'<text class="title" x="{geometry.left}" y="{top}">{escape(panel.headline)}</text>']
        lines += _panel(panel, geometry, top + _HEADLINE - 12, peak)
        top += _HEADLINE + len(panel.rows) * geometry.pitch(bool(panel.memory)) + 16
    bottom = top - 16
    height = bottom + 30
    headline = escape("; ".join(panel.headline for panel in panels))
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{headline}</title>",
        f"<style>\n{_STYLE}\n</style>",
        _HATCH,
        *legend,
        *_axis(seconds, geometry, first + 8, bottom),
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


def _length(panels: Sequence[Panel], seconds: float, crowded: bool) -> int:
    """Pixels of the time axis: enough for a number in the median forward, within what a browser shows quickly."""
    spans = (span for panel in panels for row in panel.rows for span in row)
    forwards = [span.seconds for span in spans if span.kind == "forward" and span.seconds > 0]
    wanted = 20 * seconds / median(forwards) if forwards else 0.0
    return round(min(max(wanted, 720), 2_400 if crowded else 16_000))


def _panel(panel: Panel, geometry: Geometry, top: int, peak: float) -> Iterator[str]:
    pitch = geometry.pitch(bool(panel.memory))
    end = geometry.left + panel.seconds * geometry.scale + 8
    labeled = any(row and held_stages(row) != [rank] for rank, row in enumerate(panel.rows))
    for rank, row in enumerate(panel.rows):
        y = top + rank * pitch
        base = y + geometry.bar / 2 + 4
        idle = panel.idle_shares[rank]
        yield f'<text x="{geometry.left - 8}" y="{base:g}" text-anchor="end">rank {rank}</text>'
        yield f'<text class="soft" x="{end:.1f}" y="{base:g}">idle {idle:.0%}</text>'
        yield (
            f'<rect class="idle" x="{geometry.left}" y="{y}" width="{panel.seconds * geometry.scale:.2f}" '
            f'height="{geometry.bar}"><title>rank {rank}: idle {idle:.1%} of wall time</title></rect>'
        )
        yield from draw_row(row, panel.origin, geometry, y)
        if labeled and row and geometry.bar >= 20:
            stages = held_stages(row)
            label = f"stage {stages[0]}" if len(stages) == 1 else f"{len(stages)} stages"
            yield f'<text class="soft" x="{geometry.left - 8}" y="{base + 14:g}" text-anchor="end">{label}</text>'
        if panel.memory:
            below = y + geometry.bar + geometry.strip + 4
            yield from _memory(panel.memory[rank], rank, panel, geometry, below, peak)
    yield from _critical(panel, geometry, top, pitch)


def _memory(memory: RankMemory, rank: int, panel: Panel, geometry: Geometry, top: int, peak: float) -> Iterator[str]:
    """The memory of one rank as an area above its constant memory; all curves of a picture have one scale."""
    height = geometry.curve
    bottom = top + height
    per_byte = height / peak if peak > 0 else 0.0
    x, width = geometry.left, panel.seconds * geometry.scale
    words = f"rank {rank}: {peak_words(memory)}"
    points = _thinned(memory, panel.origin, geometry, width)
    steps = "".join(f"V{bottom - size * per_byte:.2f}H{at:.2f}" for at, size in points)
    yield f'<path class="memory" d="M{x} {bottom}{steps}V{bottom}Z"><title>{escape(words)}</title></path>'
    held = memory.constant_bytes * per_byte
    yield (
        f'<rect class="held" x="{x}" y="{bottom - held:.2f}" width="{width:.2f}" height="{held:.2f}">'
        f"<title>{escape(words)}</title></rect>"
    )
    if height >= 12:
        text = bytes_text(memory.peak_bytes)
        yield f'<text class="soft" x="{x + width + 8:.1f}" y="{bottom - 2}">{text}</text>'


def _thinned(memory: RankMemory, origin: float, geometry: Geometry, width: float) -> list[tuple[float, float]]:
    """(right edge in pixels, bytes) of each step, at least a third of a pixel wide; a shorter peak is widened."""
    least, end = 1 / 3, geometry.left + width
    steps: list[tuple[float, float]] = []
    size, reached, missed = memory.constant_bytes, float(geometry.left), 0.0
    for at, new in (*memory.total_curve(), (origin + width / geometry.scale, 0.0)):
        x = min(max(geometry.left + (at - origin) * geometry.scale, reached), end)
        if x - reached >= least:
            if missed > size:
                steps.append((reached + least, missed))
            steps.append((x, size))
            reached, missed = x, 0.0
        elif x > reached:
            missed = max(missed, size)
        size = new
    return steps


def _critical(panel: Panel, geometry: Geometry, top: int, pitch: int) -> Iterator[str]:
    """Draws a line along the spans of the critical path, at the foot of their bars."""
    path = ""
    reached = -math.inf
    for span in panel.critical:
        y = top + span.rank * pitch + geometry.bar + (geometry.strip + 1.5 if span.kind == "send" else -0.5)
        # A wait counts from the end of what it waits for, not from when its rank began to wait.
        began = min(span.stop_seconds, max(span.start_seconds, reached))
        start, stop = ((at - panel.origin) * geometry.scale for at in (began, span.stop_seconds))
        path += f"{'L' if path else 'M'}{geometry.left + start:.1f} {y:g}H{geometry.left + stop:.1f}"
        reached = span.stop_seconds
    if path:
        yield f'<path class="critical" d="{path}"><title>critical path</title></path>'


def _legend(panels: Sequence[Panel], left: int, width: int) -> tuple[list[str], int]:
    """The legend of the colors that the picture uses, and its height."""
    used = {name for panel in panels for row in panel.rows for name in painted_classes(row)} | {"idle"}
    used |= {"held", "memory"} if any(panel.memory for panel in panels) else set()
    used |= {"critical"} if any(panel.critical for panel in panels) else set()
    split = any(len(held_stages(row)) > 1 for panel in panels for row in panel.rows)
    lighter = " (lighter: every other stage of the rank)" if split else ""
    entries = (
        (("forward0", "forward1"), "forward"),
        (("backward0", "backward1"), f"backward{lighter}"),
        (("weight0", "weight1"), "weight backward"),
        (("update",), "update"),
        (("reduce",), "sum of gradients"),
        (("send",), "sending"),
        (("idle",), "idle"),
        (("held",), "memory: always held"),
        (("memory",), "activations, messages and gradients"),
        (("critical",), "critical path"),
    )
    lines: list[str] = []
    x, y = left, 14
    for names, word in entries:
        shown = [name for name in names if name in used]
        length = 14 * len(shown) + _LETTER * len(word) + 14
        if shown and x > left and x + length > width:
            x, y = left, y + 18
        for index, name in enumerate(shown):
            at = x + 14 * index
            lines.append(
                f'<path class="critical" d="M{at} {y + 6}h12"/>'
                if name == "critical"
                else f'<rect class="{name}" x="{at}" y="{y}" width="12" height="12"/>'
            )
        if shown:
            lines.append(f'<text x="{x + 14 * len(shown) + 2}" y="{y + 10}">{word}</text>')
            x += length
    return lines, y + 44


def _axis(seconds: float, geometry: Geometry, top: int, bottom: int) -> Iterator[str]:
    """Draws the time axis under the rows, with ticks at multiples of `axis_step`."""
    left, scale = geometry.left, geometry.scale
    yield f'<path class="axis" d="M{left} {bottom}h{seconds * scale:.2f}"/>'
    if seconds <= 0:
        return
    step = axis_step(90 / scale)
    for index in range(math.floor(seconds / step * (1 + 1e-12)) + 1):
        x = left + index * step * scale
        yield f'<path class="axis" d="M{x:.2f} {top}V{bottom + 4}"/>'
        yield f'<text class="tick" x="{x:.2f}" y="{bottom + 20}">{seconds_text(index * step) if index else "0"}</text>'
