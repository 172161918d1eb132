"""The bars of one rank's row in an SVG picture: every computation and every transfer.

Where there is room each is a rectangle with its tooltip and its microbatch. In a crowded picture all bars of one color
are one path, and a bar that is narrower than a pixel is merged with its neighbour.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from penstock.timelines.panels import held_stages
from penstock.timelines.spans import Span
from penstock.values.quantities import bytes_text

ROOMY = 16
"""Up to this many ranks have rows of full height."""
_LETTER = 7
_ORDER = ("wait", "forward", "backward", "weight", "reduce", "update", "send")
"""From bottom to top."""
_COLORS = {
    **{"forward": "forward", "recompute": "forward"},
    **{"backward": "backward", "backward input": "backward", "backward weight": "weight"},
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a picture in pixels: per second, and of the elements of a row from top to bottom."""

    scale: float
    crowded: bool
    bar: int = 26
    """The height of computation."""
    strip: int = 5
    """The height of the transfers below it."""
    curve: int = 24
    """The height of the memory below them."""
    gap: int = 10
    left: int = 64
    """The position of second 0."""

    def pitch(self, memory: bool) -> int:
        """The distance from row to row."""
        return self.bar + self.strip + self.gap + (self.curve + 3 if memory else 0)


def painted_classes(row: Sequence[Span]) -> set[str]:
    """The CSS classes of the bars in one row."""
    stages = held_stages(row)
    return {_class(span, stages) for span in row}


def draw_row(row: Sequence[Span], origin: float, geometry: Geometry, top: int) -> Iterator[str]:
    """Draws the spans of one rank, ascending by start, with the upper edge at `top`."""
    stages = held_stages(row)
    named = [(span, _class(span, stages)) for span in row]
    named.sort(key=lambda entry: _ORDER.index(entry[1].rstrip("01")))  # stable: by start within each class
    if geometry.crowded:
        yield from _paths(named, origin, geometry, top)
        return
    for span, name in named:
        yield from _bar(span, name, origin, geometry, top)


def _class(span: Span, stages: list[int]) -> str:
    kind = span.kind
    if kind in _COLORS:
        return f"{_COLORS[kind]}{stages.index(span.stage) % 2}"
    return "wait" if kind == "receive" else "send" if span.copies else kind


def _bar(span: Span, name: str, origin: float, geometry: Geometry, top: int) -> Iterator[str]:
    """The rectangle of one span with its tooltip, and its microbatch where that fits."""
    x = geometry.left + (span.start_seconds - origin) * geometry.scale
    y, width, height = _extent(span, name, geometry, top)
    if width <= 0:
        return
    tooltip = f"<title>{escape(_tooltip(span))}</title>"
    gap = 0.5 if width > 2 else 0.0  # a hairline between neighbours
    yield f'<rect class="{name}" x="{x:.2f}" y="{y}" width="{width - gap:.2f}" height="{height}">{tooltip}</rect>'
    label = str(span.number)
    if name[-1] in "01" and geometry.bar >= 12 and width >= _LETTER * len(label) + 4:
        yield f'<text class="on{name[-1]}" x="{x + width / 2:.2f}" y="{y + height // 2 + 4}">{label}</text>'


def _extent(span: Span, name: str, geometry: Geometry, top: int) -> tuple[int, float, int]:
    """The upper edge, the width and the height."""
    width = span.seconds * geometry.scale
    if name == "update":
        return top, max(width, 2.0), geometry.bar  # an update that takes no time must be visible, too
    if name == "send":
        return top + geometry.bar + 2, width, geometry.strip
    return top, width, geometry.bar


def _paths(named: Sequence[tuple[Span, str]], origin: float, geometry: Geometry, top: int) -> Iterator[str]:
    """One path for each class in the row, without waits; segments narrower than a pixel join their neighbours."""
    segments: dict[str, list[list[float]]] = {}
    edges: dict[str, tuple[int, int]] = {}
    for span, name in named:
        x = geometry.left + (span.start_seconds - origin) * geometry.scale
        y, width, height = _extent(span, name, geometry, top)
        if name == "wait" or width <= 0:
            continue
        edges[name] = y, height
        own = segments.setdefault(name, [])
        if own and x - own[-1][1] < 0.5 and (width < 1.5 or own[-1][1] - own[-1][0] < 1.5):
            own[-1][1] = max(own[-1][1], x + width)
        else:
            own.append([x, x + width])
    for name, own in segments.items():
        y, height = edges[name]
        steps, at = [f"M{own[0][0]:.1f} {y}"], round(own[0][0], 1)
        for start, stop in own:
            width = max(0.3, stop - start - (0.4 if stop - start > 2 else 0.0))
            move = "" if round(start, 1) == at else f"m{start - at:.1f} 0"
            steps.append(f"{move}h{width:.1f}v{height}h-{width:.1f}z")
            at = round(at + (round(start - at, 1) if move else 0.0), 1)
        yield f'<path class="{name}" d="{"".join(steps)}"/>'


def _tooltip(span: Span) -> str:
    size = "" if span.size_bytes is None else f", {bytes_text(span.size_bytes)}"
    match span.kind:
        case "forward" | "backward" | "backward input" | "backward weight" | "recompute":
            what = f"{span.words} of stage {span.stage} with version {span.reference}"
        case "update":
            what = f"stage {span.stage}: version {span.number} from gradients at version {span.reference}"
        case _:
            what = f"stage {span.stage}: {span.words}"
    return (
        f"{span.action}  {what}{size}\n"
        f"{span.seconds:.6g} seconds, from {span.start_seconds:.6g} to {span.stop_seconds:.6g}"
    )
