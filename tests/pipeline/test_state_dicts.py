"""The state dict of a pipeline is a copy: later steps leave it as it is, and it can be loaded again."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.torch_internals.pytrees import tree_leaves
from support import models

SUBJECT = models.SUBJECTS["normalized"]


def equal(first: Any, second: Any) -> bool:
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(torch.equal(one, two) if isinstance(one, Tensor) else one == two for one, two in pairs)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw"])
def test_later_steps_leave_a_state_dict_as_it_is(schedule: str) -> None:
    """Under pipedream and 2bw, updates write later versions of the weights to other memory, in turn."""
    pipe = penstock.Pipeline(
        SUBJECT.build(),
        sample=SUBJECT.sample,
        loss_fn=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        update_hooks=penstock.WeightAverage(0.9),
        schedule=schedule,
        stages=2,
        microbatches=2,
    )
    pipe.step(*SUBJECT.batches[0])
    state = pipe.state_dict()
    expected = copy.deepcopy(state)
    losses = []
    for _ in range(2):
        losses.append([float(pipe.step(x, y).loss) for x, y in SUBJECT.batches[1:4]])
        pipe.drain()
        assert equal(state, expected)
        pipe.load_state_dict(state)

    assert losses[0] == losses[1]


def test_weights_that_are_tied_share_memory_in_a_state_dict() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    x = torch.ones(2, 4)
    pipe = penstock.Pipeline(model, (x,), F.mse_loss, models.plain, stages=2)
    state = pipe.state_dict()["model"]

    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr() != model[0].weight.data_ptr()
