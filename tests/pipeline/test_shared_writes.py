"""A frozen weight that two layers hold: where one of them writes it, no cut falls between them."""

import pytest
import torch
from torch import Tensor

from penstock.capturing import capture
from support.blocks import sgd, squares
from support.jobs.shared_write_jobs import ROUNDS, SharedWrite, make_model, train, train_these
from support.processes import Pool

RUNS: list[SharedWrite] = [
    (writes, schedule, microbatches)
    for writes in (True, False)
    for schedule, microbatches in (("1f1b-flush", 1), ("1f1b-flush", 2), ("zb-h1", 2))
]


def train_plainly(run: SharedWrite) -> tuple[list[float], dict[str, Tensor]]:
    writes, _, microbatches = run
    model = make_model(writes)
    optimizer, losses = sgd(list(model.parameters())), []
    for x, target in ROUNDS:
        parts = [squares(model(part), target) / microbatches for part in x.chunk(microbatches)]
        for part in parts:
            part.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses, model.state_dict()


def assert_plain(run: SharedWrite, found: tuple[list[float], dict[str, Tensor], int]) -> None:
    losses, state = train_plainly(run)

    assert found[0] == losses
    assert found[1].keys() == state.keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in state.items())
    # The writer, the reader and what is between them are one layer.
    assert found[2] == (3 if run[0] else 5)


@pytest.mark.parametrize("run", RUNS)
def test_one_process(run: SharedWrite) -> None:
    assert_plain(run, train(run))


def test_two_processes(pool: Pool) -> None:
    for outcomes in pool.run(2, train_these, RUNS):
        for run, found in zip(RUNS, outcomes, strict=True):
            assert_plain(run, found)


def test_capture_leaves_a_weight_that_a_layer_writes() -> None:
    model = make_model(writes=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, (ROUNDS[0][0],)).evaluation()

    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
