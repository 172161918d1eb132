"""Transport: ordered messages between ranks, sums over replicas, and the processes of a pipeline.

May import ``devices``, ``files`` and ``collectives``. Start reading in ``transport.py``, the protocol that the engine
uses. Then ``backend_selection.py`` chooses between ``shared_memory/``, ``nccl/`` and ``gloo/``, and
``connections.py`` connects. A new backend is a room beside these three, a value of ``Backend``, and its lines
in these two files.
"""
