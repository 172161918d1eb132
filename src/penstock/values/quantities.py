"""Numbers with units, and tables of text, for people to read.

Inside Penstock all numbers are seconds, bytes, and bytes per second; only printed text has other units.
"""

import math
from collections.abc import Collection, Sequence

LEAST, MOST = 1e-30, 1e30
"""No measurement is beyond these. Sums, squares and quotients of larger or smaller numbers overflow."""


def seconds_text(seconds: float) -> str:
    """``1.23 ms``: three digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        # A number that rounds up to one of a unit is written in that unit.
        if seconds >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0" if seconds == 0 else f"{_three_digits(seconds / 1e-9)} ns"


def bytes_text(size: float) -> str:
    """``1.23 MB``: three digits and a decimal unit."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * scale:
            return f"{_three_digits(size / scale)} {unit}"
    return "0" if size == 0 else f"{_three_digits(size)} B"


def bandwidth_text(bandwidth: float) -> str:
    """``12 GB/s``."""
    return f"{bytes_text(bandwidth)}/s"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def axis_step(least: float) -> float:
    """The smallest number of at least `least` that is 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def table_lines(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """A line for each row, with columns of equal width: those of the numbers `left` are aligned left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
