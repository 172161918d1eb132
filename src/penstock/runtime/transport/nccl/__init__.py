"""Messages and sums between GPUs over NCCL, and the watchdog that aborts them when a rank fails.

May import ``devices`` and the files of ``transport`` itself. Start reading in ``endpoints.py``. ``send_notices.py``
explains why ranks cannot deadlock.
"""
