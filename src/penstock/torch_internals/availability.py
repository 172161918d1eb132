"""The error for a private name that the installed PyTorch lacks."""

import torch

from penstock.errors import PenstockError

_SUPPORTED = "torch>=2.11,<2.16"
"""The versions that Penstock supports. The tests of this room were run on 2.11 and 2.13."""


def missing(name: str, purpose: str) -> PenstockError:
    """The error to raise where this PyTorch has no `name`, which is needed `purpose`."""
    return PenstockError(
        f"torch {torch.__version__} has no {name}, which Penstock needs {purpose}: expected torch 2.11 to 2.14. "
        f'Install one of these: pip install "{_SUPPORTED}"'
    )
