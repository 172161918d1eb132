"""What tests share: models, jobs for processes, simulated devices, strategies for random cases, and plugins of pytest.

May import Penstock; ``blocks.py`` has its blocks from the models of the benchmarks, and ``jobs/benchmark_jobs.py``
imports the benchmarks. Start reading in ``models.py`` and ``training.py``.
"""
