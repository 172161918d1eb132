"""A progress line on the terminal.

It needs no library, and it is silent where nobody watches: in a file, in a pipe, in continuous integration.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

__all__ = ["progress_line", "watched"]

Item = TypeVar("Item")

_BAR = 24


def watched(stream: TextIO) -> bool:
    """Whether a person is likely to see what is written to `stream`: a terminal, and no CI."""
    return stream.isatty() and not os.environ.get("CI")


def progress_line(
    items: Sequence[Item], label: Callable[[Item], str], title: str, show: bool | None = None
) -> Iterator[Item]:
    """Yields `items`; meanwhile a line on stderr says how many are done and which is under way; then it is wiped.

    `show`: True always writes the line, False never, None where stderr is `watched`.
    """
    stream = sys.stderr
    if not (watched(stream) if show is None else show):
        yield from items
        return
    width = 0
    try:
        for done, item in enumerate(items):
            filled = _BAR * done // len(items)
            line = f"{title} [{'#' * filled}{'.' * (_BAR - filled)}] {done}/{len(items)} {label(item)}"
            stream.write("\r" + line.ljust(width))
            stream.flush()
            width = len(line)
            yield item
    finally:
        stream.write("\r" + " " * width + "\r")
        stream.flush()
