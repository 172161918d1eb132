"""The runtime: the half of Penstock that trains, with torch, on the devices and processes of a pipeline.

Its rooms stand on each other, from the device up: ``devices`` and ``files``, ``collectives``, ``transport``, then
``execution``, ``parameters`` and ``batches``, which do not know each other but for what a message or a sum is,
``engine``, which carries out a schedule with them, ``checkpoints``, and ``assembly``, which makes all of it for a model
and a plan. Start reading in ``engine/worker.py``.
"""
