"""Runs that clip gradients: by the tests themselves, and in the processes of the pool."""

from typing import Any

import penstock
from training import Case, Outcome

__all__ = ["MOST", "run_clipped"]

MOST = 0.3
"""Less than the norms of the first updates, more than some later ones."""


def run_clipped(case: Case, most: Any = MOST) -> Outcome:
    """The run by `Pipeline`."""
    pipe = penstock.Pipeline(case.build(), **case.options, clip_grad_norm=most)
    losses = []
    for number, (x, y) in enumerate(case.batches):
        losses.append(pipe.step(x, y).loss)
        if number in case.drain_after:
            pipe.drain()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    pipe.close()
    return Outcome(tuple(map(float, losses)), state)
