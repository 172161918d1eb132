"""The engine: carries out a schedule's programs, minibatch after minibatch.

May import the rooms below: ``devices``, ``transport``, ``execution``, ``parameters`` and ``batches``. Start reading in
``worker.py``: one rank at work, action by action.
"""
