"""The planner of PipeDream-2BW: equal parallel pipelines of repeated blocks.

Start reading in ``pipeline_searches.py``.
"""
