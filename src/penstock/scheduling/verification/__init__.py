"""Verification: the proof that a schedule keeps its invariants before it runs.

May import the rest of ``scheduling``. Start reading in ``verifier.py``; the invariants are in
``stage_invariants.py`` and ``message_invariants.py``.
"""
