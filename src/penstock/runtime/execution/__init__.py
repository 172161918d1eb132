"""Execution: forward and backward of a stage, whole or split, recomputed, compiled, or as CUDA graphs.

May import ``devices``, and of the rest of Penstock ``capturing`` and ``values``. Start reading in ``executor.py``.
"""

__all__: list[str] = []
