"""Assembly: builds stages from a model and a plan, and guards the calls.

May import all other rooms of the runtime. Start reading in ``started_engines.py``.
"""
