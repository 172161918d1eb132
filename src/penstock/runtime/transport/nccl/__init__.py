"""Messages and sums between GPUs over NCCL, and the watch that ends them when a rank fails.

May import ``devices`` and the files of ``transport`` itself. Start reading in ``endpoints.py``. The proof that no
ranks wait for each other is in ``send_notices.py``.
"""

__all__: list[str] = []
