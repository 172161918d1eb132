"""Execution: forward and backward of a stage, whole or split, recomputed or compiled.

May import ``devices``, and of the rest of Penstock ``capturing`` and ``values``. Start reading in ``executor.py``.
"""
