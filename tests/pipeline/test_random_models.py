"""Models of random habits train and evaluate with the numbers of a plain loop, or are refused."""

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.random_models import WIDTH, as_module, draw_model

SEEDS = [range(start, start + 10) for start in range(0, 60, 10)]
STEPS = 2


@dataclass(frozen=True)
class Wishes:
    """How the model of a seed is trained."""

    options: dict[str, Any]
    batches: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, seed: int) -> "Wishes":
        draw = random.Random(seed)
        microbatches = draw.choice((2, 4))
        schedule = draw.choice(("1f1b-flush", "gpipe", "zb-h1"))
        recompute = draw.choice((None, True, None if schedule == "zb-h1" else "layers"))
        generator = torch.Generator().manual_seed(seed)
        sizes = [microbatches * draw.choice((2, 3)) for _ in range(STEPS)]
        pairs = [torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]
        options = {"schedule": schedule, "microbatches": microbatches, "stages": draw.choice((2, 3))}
        return cls({**options, "recompute": recompute}, [(x, y) for x, y in pairs])


@dataclass(frozen=True)
class Found:
    """The numbers of a training."""

    losses: list[float]
    evaluations: list[float]
    predictions: list[Tensor]
    state: dict[str, Tensor]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_plainly(model: nn.Module, wishes: Wishes) -> Found:
    """`RuntimeError` for a model that autograd refuses."""
    microbatches = wishes.options["microbatches"]
    optimizer = momentum([parameter for parameter in model.parameters() if parameter.requires_grad])
    found = Found([], [], [], {})
    for x, y in wishes.batches:
        optimizer.zero_grad()
        loss = 0.0
        for part, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            mean = F.mse_loss(model(part.clone()), target) / microbatches
            mean.backward()
            loss += float(mean.detach())
        optimizer.step()
        evaluated = copy.deepcopy(model).eval()
        with torch.no_grad():
            prediction = evaluated(x.clone())
        found.losses.append(loss)
        found.evaluations.append(float(F.mse_loss(prediction, y)))
        found.predictions.append(prediction)
    found.state.update(model.state_dict())
    return found


def train_in_stages(model: Any, wishes: Wishes) -> Found:
    sample = (torch.zeros(3, WIDTH, dtype=torch.float64),)
    found = Found([], [], [], {})
    with penstock.Pipeline(model, sample, F.mse_loss, momentum, **wishes.options) as pipe:
        for x, y in wishes.batches:
            found.losses.append(float(pipe.step(x, y).loss))
            found.evaluations.append(float(pipe.evaluate(x, y).loss))
            found.predictions.append(pipe.predict(x))
    found.state.update(as_module(model).state_dict())
    return found


def outcome_of(seed: int) -> str:
    """What became of a seed: trained, refused, or impossible for a plain loop, too."""
    wishes = Wishes.of(seed)
    try:
        found = train_in_stages(draw_model(seed), wishes)
    except penstock.PenstockError:
        return "refused"
    try:
        expected = train_plainly(as_module(draw_model(seed)), wishes)
    except RuntimeError:
        return "impossible"
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.evaluations == pytest.approx(expected.evaluations, rel=1e-12)
    for actual, wanted in zip(found.predictions, expected.predictions, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-13)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-11, atol=1e-13)
    return "trained"


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_random_models_train_with_the_numbers_of_a_plain_loop_or_are_refused(seeds: range) -> None:
    outcomes = []
    for seed in seeds:
        try:
            outcomes.append(outcome_of(seed))
        except AssertionError as error:
            error.add_note(f"seed {seed}: {Wishes.of(seed).options} {draw_model(seed)}")
            raise

    assert outcomes.count("trained") >= 5, outcomes
