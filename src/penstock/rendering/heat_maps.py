"""The bandwidths of a cluster as a heat map: row a, column b is the link from rank a to rank b; dark is slow."""

from collections.abc import Sequence
from math import ceil, inf, isfinite, log

from penstock.rendering.device_boxes import Box, bandwidth_words

_SIDE, _LEFT, _TOP = 400, 58, 40
_MOST = 96
"""With more ranks, several share a square, which shows the slowest of their links."""
_NAMED = 24
"""Up to this many ranks are numbered, and their links have tooltips."""


def draw_heat_map(rows: Sequence[Sequence[float]]) -> Box:
    """The heat map of the matrix `rows` (bytes per second) without its diagonal."""
    ranks = len(rows)
    block = ceil(ranks / _MOST)
    squares = ceil(ranks / block)
    side = min(40.0, _SIDE / squares)
    values = [value for a, row in enumerate(rows) for b, value in enumerate(row) if a != b and isfinite(value)]
    least, most = min(values, default=1.0), max(values, default=1.0)
    lines = [
        '<text class="title" x="0" y="14">bandwidth from rank (row) to rank (column)</text>',
        f'<text class="soft" x="0" y="30">dark {bandwidth_words(least)} to light {bandwidth_words(most)}'
        + (f"; a square is the slowest of {block} \N{MULTIPLICATION SIGN} {block} links" if block > 1 else "")
        + "</text>",
    ]
    for a in range(squares):
        for b in range(squares):
            value = _slowest(rows, a * block, b * block, block)
            if value == inf and a == b:
                continue
            red, green, blue = _shade(value, least, most)
            x, y = _LEFT + b * side, _TOP + 16 + a * side
            tooltip = f"<title>rank {a} to rank {b}: {bandwidth_words(value)}</title>" if ranks <= _NAMED else ""
            lines.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{side * 0.96:.1f}" height="{side * 0.96:.1f}" '
                f'fill="#{red:02x}{green:02x}{blue:02x}"' + (f">{tooltip}</rect>" if tooltip else "/>")
            )
    for rank in range(ranks) if ranks <= _NAMED else range(0, squares, ceil(squares / 8)):
        middle = (rank + 0.5) * side
        lines.append(f'<text class="soft end" x="{_LEFT - 6}" y="{_TOP + 20 + middle:.1f}">{rank * block}</text>')
        lines.append(f'<text class="soft middle" x="{_LEFT + middle:.1f}" y="{_TOP + 10}">{rank * block}</text>')
    return Box(_LEFT + squares * side, _TOP + 16 + squares * side, lines)


def _slowest(rows: Sequence[Sequence[float]], first: int, second: int, block: int) -> float:
    """The slowest link between two blocks of ranks; infinite if there are only diagonal elements."""
    stop = len(rows)
    pairs = (
        rows[a][b]
        for a in range(first, min(first + block, stop))
        for b in range(second, min(second + block, stop))
        if a != b
    )
    return min(pairs, default=inf)


def _shade(value: float, least: float, most: float) -> tuple[int, int, int]:
    """The color on a logarithmic scale: a link that is twice as fast is always one step lighter."""
    share = 1.0 if value >= most or most <= least else log(value / least) / log(most / least)
    dark, light = (44, 45, 110), (247, 214, 120)
    middle = (43, 135, 155)
    low, high, position = (dark, middle, share * 2) if share < 0.5 else (middle, light, share * 2 - 1)
    red, green, blue = (round(a + (b - a) * position) for a, b in zip(low, high, strict=True))
    return red, green, blue
