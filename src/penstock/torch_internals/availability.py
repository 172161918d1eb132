"""The error for a private name that the installed PyTorch lacks."""

import torch

from penstock.errors import PenstockError


def missing(name: str, purpose: str) -> PenstockError:
    """The error to raise where this PyTorch has no `name`, which is needed `purpose`."""
    return PenstockError(
        f"torch {torch.__version__} has no {name}, which Penstock needs {purpose}: expected torch 2.13, with which all "
        "tests run, or another version of 2.11 to 2.15 that has it. Install it: pip install 'torch==2.13.*'"
    )
