"""Verification: the proof that a schedule keeps its laws before it runs.

May import the rest of ``scheduling``. Start reading in ``verifier.py``; the laws are in ``stage_invariants.py`` and
``message_invariants.py``.
"""

__all__: list[str] = []
