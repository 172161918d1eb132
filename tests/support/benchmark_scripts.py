"""Benchmarks as a user starts them, but in the process of the test, which has imported what they need."""

import runpy
import sys

import pytest

from support.paths import BENCHMARKS, ROOT


def run_benchmark(script: str, *arguments: str, **variables: str) -> None:
    """Does what ``python benchmarks/SCRIPT ARGUMENTS`` does, with these variables of the environment.

    A new interpreter would import PyTorch again, which takes longer than most of what a test measures with it.
    """
    path = str(BENCHMARKS / script)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [path, *arguments])
        for name, value in variables.items():
            patch.setenv(name, value)
        runpy.run_path(path, run_name="__main__")
