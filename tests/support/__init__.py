"""What tests share: models, jobs for processes, simulated devices, strategies for random cases, and plugins of pytest.

May import Penstock, and ``jobs/benchmark_jobs.py`` the benchmarks. Start reading in ``models.py`` and ``training.py``.
"""
