"""Assembly: from a model and a plan to running stages, and checkpoints of them.

May import all other rooms of the runtime. Start reading in ``stages.py``.
"""

__all__: list[str] = []
