"""Assembly: builds stages from a model and a plan, and writes their checkpoints.

May import all other rooms of the runtime. Start reading in ``stages.py``.
"""
