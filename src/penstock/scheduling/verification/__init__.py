"""Verification: the proof that a schedule keeps its laws before it runs.

May import the rest of ``scheduling``. Start reading in ``verifier.py``; the laws are in ``stage_laws.py`` and
``message_laws.py``.
"""

__all__: list[str] = []
