"""A progress line on the terminal.

It needs no library, and it is silent where nobody watches: in a file, in a pipe, in continuous integration.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

__all__ = ["progress_line", "watched"]

_BAR = 24


def watched(stream: TextIO) -> bool:
    """Whether a person is likely to see what is written to `stream`: a terminal, and no CI."""
    return stream.isatty() and not os.environ.get("CI")


def progress_line(names: Iterable[str], title: str, show: bool | None = None) -> Iterator[str]:
    """Yields `names`; meanwhile a line on stderr says which of how many is under way, and is wiped at the end.

    `show`: True always writes the line, False never, None where stderr is `watched`.
    """
    stream = sys.stderr
    if not (watched(stream) if show is None else show):
        yield from names
        return
    listed = list(names)
    width = 0
    try:
        for done, name in enumerate(listed):
            filled = _BAR * done // len(listed)
            line = f"{title} [{'#' * filled}{'.' * (_BAR - filled)}] {done + 1}/{len(listed)} {name}"
            stream.write("\r" + line.ljust(width))
            stream.flush()
            width = len(line)
            yield name
    finally:
        stream.write("\r" + " " * width + "\r")
        stream.flush()
