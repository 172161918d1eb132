"""The user's own loop beside the pipeline: whether both train with the same numbers, and if not, why.

Start reading in `rehearsal.py`.
"""

from penstock.rehearsing.rehearsal import Rehearsal, rehearse

__all__ = ["Rehearsal", "rehearse"]
