"""Tables of text, for people to read in a terminal."""

from collections.abc import Collection, Sequence


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
