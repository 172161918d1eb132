"""Runs fake_gpu_cases.py in a process of its own.

After a device is registered, autograd refuses to run in children that the process forks, as other tests do.
"""

import re
import subprocess
import sys

import pytest

from support.paths import ROOT


@pytest.mark.processes
def test_the_cases_on_a_fake_gpu(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/fake_gpu_cases.py"]
    every = bool(pytestconfig.getoption("all_cases"))
    command += ["--all-cases"] * every
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None and int(passed[1]) >= (40 if every else 20)
