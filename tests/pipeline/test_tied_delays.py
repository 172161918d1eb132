"""Weights that stages share under `2bw`, and clipped gradients of them: late updates equal the oracle bit for bit."""

import pytest
import torch
import torch.nn.functional as F

from support.jobs.tied_jobs import BATCHES, TiedRun, build, run_here, run_reference, run_these
from support.processes import Pool
from support.training import assert_equal, assert_ranks_equal

ENDS, NEIGHBOURS, CROSSED, MANY = ((0, 7),), ((3, 4),), ((0, 7), (1, 4)), ((0, 3, 7), (2, 5))
"""Layers that share: the first and the last; of neighbour stages; and more."""

RUNS = [
    *(TiedRun(ENDS, (1,) * stages, microbatches) for stages in (2, 3, 4) for microbatches in (stages, 5)),
    TiedRun(NEIGHBOURS, (1, 1), 2),
    *(TiedRun(CROSSED, (1,) * stages, 4) for stages in (2, 4)),
    *(TiedRun(MANY, (1,) * stages, 4) for stages in (3, 4)),
    TiedRun(ENDS, (1, 1, 1), 3, drain_after=(0, 1, 3)),
    TiedRun(MANY, (1, 1), 3, drain_after=(2,)),
]
CLIPPED = [
    *(TiedRun(shared, (1,) * stages, 4, clips=True) for shared in (ENDS, MANY) for stages in (2, 4)),
    TiedRun(NEIGHBOURS, (1, 1), 3, drain_after=(0, 2), clips=True),
    TiedRun(MANY, (1, 1, 1), 3, clips=True, flushes=True),
    TiedRun(CROSSED, (2, 2), 4, clips=True, flushes=True),
]
"""The norm counts a shared weight once, with its first stage, which has the gradients of all."""
REPLICATED = [
    TiedRun(ENDS, (2, 2), 4),
    TiedRun(CROSSED, (2, 2), 5, drain_after=(2,)),
    TiedRun(ENDS, (2, 2), 2, split=True),
    TiedRun(ENDS, (2, 1, 2), 5),
]

APART = [
    TiedRun(ENDS, (1, 1), 5, drain_after=(2,)),
    TiedRun(NEIGHBOURS, (1, 1), 3, drain_after=(0, 2), clips=True),
    TiedRun(ENDS, (1, 1, 1), 3, drain_after=(0, 1, 3)),
    TiedRun(MANY, (1, 1, 1, 1), 4, clips=True),
    TiedRun(CROSSED, (2, 2), 5, drain_after=(2,)),
    TiedRun(ENDS, (2, 2), 2, split=True),
    TiedRun(ENDS, (2, 1, 2), 5),
]
"""Runs in several processes."""


def ident(run: TiedRun) -> str:
    drains = f"-drained-{run.drain_after}" if run.drain_after else ""
    drains += "-clipped" * run.clips + "-flushed" * run.flushes
    return f"{run.shared}-on-{run.replicas}-{run.microbatches}{'-split' if run.split else ''}{drains}".replace(" ", "")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("run", RUNS + REPLICATED + CLIPPED, ids=ident)
def test_one_process(run: TiedRun) -> None:
    actual, expected = run_here(run), run_reference(run)

    assert_equal(expected, actual)
    assert set(actual.state) == set(expected.state)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_several_processes(pool: Pool, ranks: int) -> None:
    runs = [run for run in APART if sum(run.replicas) == ranks]
    outcomes, expected = pool.run(ranks, run_these, runs), [run_reference(run) for run in runs]

    assert_ranks_equal(outcomes, expected)
    for whole, parts in zip(expected, zip(*outcomes, strict=True), strict=True):
        assert sum(len(part.state) for part in parts) > len(whole.state)


def test_the_oracle_is_delayed_training() -> None:
    """W(t+1) = W(t) - update of the gradient at W(t-1), written out for the whole model, in which layers share."""
    model, run = build(ENDS), TiedRun(ENDS, (1, 1), 2)
    weights = list(model.parameters())
    optimizer = run.options["optimizer"](weights)
    older = newer = [weight.detach().clone() for weight in weights]
    for x, y in BATCHES:
        for weight, value in zip(weights, older, strict=True):
            weight.data = value.clone()
        for part, target in zip(x.split(10), y.split(10), strict=True):
            (F.cross_entropy(model(part), target) * 0.5).backward()
        for weight, value in zip(weights, newer, strict=True):
            weight.data = value.clone()
        optimizer.step()
        optimizer.zero_grad()
        older, newer = newer, [weight.detach().clone() for weight in weights]
    outcome = run_here(run)

    for name, weight in model.named_parameters(remove_duplicate=False):
        # A tolerance: stages sum their own uses of a weight over the microbatches first.
        torch.testing.assert_close(outcome.state[name], weight, rtol=1e-12, atol=1e-12)
