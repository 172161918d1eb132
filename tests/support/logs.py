"""What Penstock logs, as texts, in processes of the pool too."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """Collects what ``penstock`` logs meanwhile, at `level` and above: ``WARNING a text``."""
    logger, handler, lines = logging.getLogger("penstock"), logging.Handler(level), list[str]()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
