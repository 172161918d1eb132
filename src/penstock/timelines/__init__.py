"""Timelines: what every rank did and when, predicted or measured, and the pages and traces of it.

Imports ``values``, and no torch. Start reading in ``timelines.py``. Times are taken in ``runtime/engine/worker.py``.
"""

from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline

__all__ = ["Span", "Timeline"]
