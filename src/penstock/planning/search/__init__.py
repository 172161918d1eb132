"""The search over all planners: constraints, proposals, ranking, explanations, and what would fit where nothing does.

May import the planners and ``simulating``. Start reading in ``plan_search.py``.
"""
