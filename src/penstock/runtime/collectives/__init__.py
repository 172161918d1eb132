"""Collectives: what the processes of a pipeline know of each other, without tensors and outside a step.

They gather values, agree on errors, let one of them work alone, and watch whether the others live. May import
``devices`` and ``files``. Start reading in ``agreements.py``.
"""
