"""Parameters are the user's own objects under every schedule, and what the user leaves in ``.grad`` trains nothing."""

from functools import cache, partial

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import PenstockError
from support.blocks import sgd, squares
from support.jobs.own_parameter_jobs import (
    ROUNDS,
    WAYS,
    OwnParameters,
    copies,
    make,
    train,
    train_adversaries,
    train_these,
    use,
)
from support.processes import Pool

FORMS = [("1f1b-flush", 2, 1), ("zb-h1", 3, 1), ("gpipe", 2, 2), ("2bw", 2, 1), ("2bw", 2, 2), ("pipedream", 3, 1)]
"""Schedules, and the numbers of stages and of the replicas of each."""
Outcome = tuple[list[float], dict[str, Tensor]]


def train_plainly(way: str) -> Outcome:
    model, losses = make(way), []
    optimizer = sgd(list(model.parameters()))
    for step, (x, target) in enumerate(ROUNDS):
        use(way, model, step)
        optimizer.zero_grad()
        parts = [squares(model(part), target) / 4 for part in x.chunk(4)]
        for part in parts:
            part.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses, model.state_dict()


def train_twin(run: OwnParameters) -> Outcome:
    way, *form = run
    same = next(
        other for other in WAYS if WAYS[other][1] is WAYS[way][1] and (other == way or "late" not in way + other)
    )
    return _train_twin((same, *form))  # type: ignore[arg-type]


_train_twin = cache(partial(train, twin=True))


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_loop(way: str) -> None:
    assert_equal(train((way, "1f1b-flush", 2, 1)), train_plainly(way))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_in_one_process(way: str, form: tuple[str, int, int]) -> None:
    run: OwnParameters = (way, *form)
    assert_equal(train(run), train_twin(run))


@pytest.mark.parametrize("form", [("1f1b-flush", 2, 1), ("zb-h1", 2, 1), ("2bw", 2, 1), ("2bw", 1, 2)], ids=str)
def test_two_processes(pool: Pool, form: tuple[str, int, int]) -> None:
    runs: list[OwnParameters] = [(way, *form) for way in WAYS]
    for outcomes in pool.run(2, train_these, runs):
        for run, found in zip(runs, outcomes, strict=True):
            assert_equal(found, train_twin(run))


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_memory_of_the_user(schedule: str) -> None:
    """Where a schedule keeps versions, they have memory of their own, and other memory is refused."""
    model = make("weak")
    pipe = penstock.Pipeline(model, ROUNDS[0][:1], squares, sgd, stages=2, schedule=schedule, microbatches=4)
    pipe.step(*ROUNDS[0])
    weight = model.get_parameter("blocks.3.linear.weight")
    weight.data = torch.zeros_like(weight)
    if schedule == "2bw":
        with pytest.raises(PenstockError, match=r"parameter blocks.3.linear.weight: its memory was replaced after"):
            pipe.step(*ROUNDS[1])
        return
    loss = squares(model(ROUNDS[1][0]), ROUNDS[1][1])
    assert pipe.step(*ROUNDS[1]).loss.item() == loss.item()
    assert weight.abs().max() > 0


def test_evaluations_leave_gradients_of_the_user() -> None:
    model = make("weak")
    with penstock.Pipeline(model, ROUNDS[0][:1], squares, sgd, stages=2) as pipe:
        squares(model(ROUNDS[0][0]), ROUNDS[0][1]).backward()  # type: ignore[no-untyped-call]
        pipe.evaluate(*ROUNDS[1])
        pipe.predict(ROUNDS[1][0])
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_copies_of_the_model_have_nothing_of_penstock(pool: Pool) -> None:
    for hooks, in_file, losses, expected in (*pool.run(2, copies), copies()):
        assert hooks == [0, 0] and not in_file
        assert losses == expected


@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1"])
def test_two_pipelines_one_of_which_reads_the_model_of_the_other(schedule: str) -> None:
    assert train_adversaries(True, schedule) == train_adversaries(False)


class Failing(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("a backward that fails")


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_a_step_that_fails_leaves_the_newest_weights_and_no_gradient(schedule: str) -> None:
    model, fails = make("weak"), False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return squares(Failing.apply(output) if fails else output, target)

    plan = penstock.Plan((penstock.Stage(0, 3, (0, 1)), penstock.Stage(3, 6, (2, 3))), schedule, microbatches=4)
    pipe = penstock.Pipeline(model, (ROUNDS[0][0][:1],), loss, sgd, plan=plan)
    for step in range(2):
        pipe.step(*ROUNDS[step])
    newest = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    fails = True
    with pytest.raises(ValueError, match="a backward that fails"):
        pipe.step(*ROUNDS[0])

    # Under 2bw the first stage may have made the update of the step before.
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, newest[name])}
    assert same == newest.keys() if schedule == "1f1b-flush" else same >= {"last.weight", "last.bias"}
    assert all(parameter.grad is None for parameter in model.parameters())
    squares(model(ROUNDS[0][0]), ROUNDS[0][1]).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())
