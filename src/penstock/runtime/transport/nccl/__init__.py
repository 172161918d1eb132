"""Messages and sums between GPUs over NCCL, and the watch that ends them when a rank fails.

May import ``devices`` and the files of ``transport`` itself. Start reading in ``nccl_ends.py``; ``notices.py`` has the
proof that no ranks wait for each other.
"""

__all__: list[str] = []
