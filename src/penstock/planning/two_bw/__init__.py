"""The planner of PipeDream-2BW: equal parallel pipelines.

Start reading in ``pipeline_searches.py``.
"""
