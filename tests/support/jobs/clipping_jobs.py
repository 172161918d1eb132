"""Runs that clip gradients: by the tests themselves, and in the processes of the pool."""

from typing import Any

from support.training import Case, Outcome, run_pipeline

__all__ = ["MOST", "run_clipped"]

MOST = 0.3
"""Less than the norms of the first updates, more than some later ones."""


def run_clipped(case: Case, most: Any = MOST) -> Outcome:
    """The run by `Pipeline`."""
    return run_pipeline(case, clip_grad_norm=most)
