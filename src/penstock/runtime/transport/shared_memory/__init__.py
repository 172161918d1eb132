"""Messages between processes of one host that compute on CPUs, through memory that they share.

May import ``devices`` and the files of ``transport`` itself. Start reading in ``endpoints.py``.
"""
