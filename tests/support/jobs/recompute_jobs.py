"""A job for the processes of the tests of recomputation."""

import torch
from torch import Tensor

import penstock
from support.training import Case


def train(case: Case, recompute: object) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """The losses and the final state of a run by the pipeline: all ranks here, or this process's part of them."""
    pipe = penstock.Pipeline(case.build(), **case.options, recompute=recompute)
    losses = [pipe.step(x, y).loss for x, y in case.batches]
    with torch.no_grad():  # as in an evaluation, which drains
        pipe.drain()
    result = tuple(float(loss) for loss in losses), {name: t.clone() for name, t in pipe.state_dict()["model"].items()}
    pipe.close()
    return result
