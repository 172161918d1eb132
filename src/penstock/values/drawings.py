"""The SVG picture of a timeline: one row per rank, time to the right.

It stands alone (no script, no font, no other file), so it can lie in a README, a report or a browser tab. Its colours
carry their own text colour, and the page's colours follow the reader's light or dark setting. The exact numbers are in
the tooltips.

    rank 0  [0][1][2][3]            [0][1] ...    forward, backward, update
             ==  ==  ==  ==                       transfers that the rank sends
            |---------|---------|---------|
            0        1 ms      2 ms      3 ms
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from penstock.values.quantities import seconds_text
from penstock.values.spans import Span

__all__ = ["timeline_svg"]

_LEFT, _RIGHT, _TOP = 64, 24, 52
_BAR, _STRIP, _PITCH = 26, 5, 42
"""Pixels: height of the computation's bar, of the strip of transfers below it, and from row to row."""
_LETTER = 7
"""Pixels that a digit of a label takes."""

_STYLE = """
  svg { background: #ffffff; --ink: #1b1f24; --faint: #c9ced6; --wait: #eceff3; --send: #7d8590 }
  @media (prefers-color-scheme: dark) {
    svg { background: #14171c; --ink: #e3e7ec; --faint: #3a414b; --wait: #22272f; --send: #8b949e }
  }
  text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: var(--ink) }
  .forward0 { fill: #2f6fb5 } .forward1 { fill: #8fbce6 }
  .backward0 { fill: #b3541e } .backward1 { fill: #f2ad7e }
  .update { fill: #8a5cc7 } .send { fill: var(--send) } .receive { fill: var(--wait) }
  .on0 { fill: #ffffff; text-anchor: middle; pointer-events: none }
  .on1 { fill: #14171c; text-anchor: middle; pointer-events: none }
  .axis { stroke: var(--faint); stroke-width: 1 } .tick { text-anchor: middle }
""".strip("\n")


def timeline_svg(spans: Sequence[Span], ranks: int, bubble: float) -> str:
    """The picture of `spans` as the text of an SVG document. `bubble` is the idle share that its headline tells."""
    origin = min((span.start_seconds for span in spans), default=0.0)
    seconds = max((span.stop_seconds for span in spans), default=0.0) - origin
    length = _length(spans, seconds)
    scale = length / seconds if seconds > 0 else 1.0
    width, bottom = _LEFT + length + _RIGHT, _TOP + ranks * _PITCH
    stages = _stages(spans)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 30}" '
        f'viewBox="0 0 {width} {bottom + 30}" role="img">',
        f"<title>{_headline(ranks, seconds, bubble)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<text x="{_LEFT}" y="18">{_headline(ranks, seconds, bubble)}</text>',
        *_legend(split=any(len(held) > 1 for held in stages.values())),
        *_axis(seconds, scale, bottom),
    ]
    for rank in range(ranks):
        middle = _TOP + rank * _PITCH + _BAR // 2
        lines.append(f'<text x="{_LEFT - 8}" y="{middle + 4}" text-anchor="end">rank {rank}</text>')
    for kind in ("receive", "forward", "backward", "update", "send"):  # what is painted later lies on top
        for span in spans:
            if span.kind == kind:
                lines.extend(_bar(span, kind, stages[span.rank], origin, scale))
    return "\n".join([*lines, "</svg>", ""])


def _length(spans: Sequence[Span], seconds: float) -> int:
    """Pixels of the time axis: enough for a number in the usual forward, within what a browser shows with ease."""
    forwards = [span.seconds for span in spans if span.kind == "forward" and span.seconds > 0]
    wanted = 20 * seconds / median(forwards) if forwards else 0.0
    return round(min(max(wanted, 720), 16_000))


def _stages(spans: Sequence[Span]) -> dict[int, list[int]]:
    """The stages that every rank holds, in order."""
    held: dict[int, set[int]] = {}
    for span in spans:
        held.setdefault(span.rank, set()).add(span.stage)
    return {rank: sorted(stages) for rank, stages in held.items()}


def _bar(span: Span, kind: str, stages: list[int], origin: float, scale: float) -> Iterator[str]:
    """The rectangle of one span with its tooltip, and its microbatch where that fits."""
    x = _LEFT + (span.start_seconds - origin) * scale
    y = _TOP + span.rank * _PITCH
    width, height = span.seconds * scale, _BAR
    shade = stages.index(span.stage) % 2
    name = f"{kind}{shade}" if kind in ("forward", "backward") else kind
    if kind == "update":
        width = max(width, 2.0)  # an update may take no time, and must be seen all the same
    elif kind == "send":
        y, height = y + _BAR + 2, _STRIP
    if width <= 0:
        return
    tooltip = f"<title>{escape(_tooltip(span, kind))}</title>"
    gap = 0.5 if width > 2 else 0.0  # a hairline between neighbours
    yield f'<rect class="{name}" x="{x:.2f}" y="{y}" width="{width - gap:.2f}" height="{height}">{tooltip}</rect>'
    label = str(span.number)
    if kind in ("forward", "backward") and width >= _LETTER * len(label) + 4:
        yield f'<text class="on{shade}" x="{x + width / 2:.2f}" y="{y + height // 2 + 4}">{label}</text>'


def _tooltip(span: Span, kind: str) -> str:
    match kind:
        case "forward" | "backward":
            what = f"{span.words} of stage {span.stage} with version {span.reference}"
        case "update":
            what = f"stage {span.stage}: version {span.number} from gradients at version {span.reference}"
        case _:
            what = f"stage {span.stage}: {span.words}"
    return (
        f"{span.action}  {what}\n{span.seconds:.6g} seconds, from {span.start_seconds:.6g} to {span.stop_seconds:.6g}"
    )


def _headline(ranks: int, seconds: float, bubble: float) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}, {seconds_text(seconds)}, bubble {bubble:.1%} of wall time"


def _legend(split: bool) -> Iterator[str]:
    x = _LEFT
    for kind in ("forward", "backward", "update", "send", "receive"):
        shaded = kind in ("forward", "backward")
        for shade in (0, 1) if shaded and split else (0,):
            yield f'<rect class="{kind}{shade if shaded else ""}" x="{x}" y="28" width="12" height="12"/>'
            x += 14
        word = {"receive": "waiting", "send": "sending"}.get(kind, kind)
        yield f'<text x="{x + 2}" y="38">{word}</text>'
        x += _LETTER * len(word) + 24
    if split:
        yield f'<text x="{x}" y="38">(lighter: every other stage of the rank)</text>'


def _axis(seconds: float, scale: float, bottom: int) -> Iterator[str]:
    """A rule under the rows with a tick at every 1, 2 or 5 times a power of ten."""
    yield f'<path class="axis" d="M{_LEFT} {bottom}h{seconds * scale:.2f}"/>'
    if seconds <= 0:
        return
    step = _step(90 / scale)
    for index in range(math.floor(seconds / step) + 1):
        x = _LEFT + index * step * scale
        yield f'<path class="axis" d="M{x:.2f} {_TOP - 4}V{bottom + 4}"/>'
        yield f'<text class="tick" x="{x:.2f}" y="{bottom + 20}">{seconds_text(index * step) if index else "0"}</text>'


def _step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `least`."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
