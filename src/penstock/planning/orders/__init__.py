"""The search for the order of a plan's actions: the fastest under a limit in bytes, with a lower bound.

Start reading in ``search.py``.
"""
