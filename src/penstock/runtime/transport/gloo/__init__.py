"""Messages and sums over Gloo, which works everywhere. Tensors of a GPU pass through host memory.

May import ``devices`` and the files of ``transport`` itself. Start reading in ``senders.py``.
"""
