"""Doctor: finds out from the flight records of all ranks why a run stands still, and which ranks are slow.

Imports ``values``, ``timelines`` and ``scheduling``, and no torch. Start reading in ``diagnosis.py``, which turns
evidence (``records.py``, ``run_directories.py``) into a verdict; ``reports.py`` prints it. ``stragglers.py`` reads
timelines of runs that go on.
"""
