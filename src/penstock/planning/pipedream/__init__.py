"""PipeDream's planner: the fastest slowest stage, replicas in turn, memory inside the dynamic program.

Start reading in ``partitions.py``.
"""
