"""The search that asks all planners, and the words for its outcome: wishes, verdicts, what is needed.

May import the planners and ``simulating``. Start reading in ``searches.py``.
"""

__all__: list[str] = []
