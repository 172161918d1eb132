"""Batches: how a batch becomes microbatches, and how losses, metrics and outputs come back to the user.

May import ``devices`` and ``transport``. Start reading in ``microbatches.py``.
"""
