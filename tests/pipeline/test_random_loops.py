"""Loops of random habits train and evaluate with the numbers of a plain loop, or are refused or warned of.

A loop is a value, `DrawnLoop`, which trains a `DrawnModel` as its user would without Penstock, and through a pipeline.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from support.logs import logged
from support.optimizers import GlobalNorm, GroupCounter, clamping
from support.random_models import WIDTH, DrawnModel, as_module, drawn_models

LOSSES = (
    "mean",
    "penalty on all parameters",
    "penalty on the last layer",
    "of its own parameter",
    "masked",
    "weighted classes",
    "texts",
    "rows of lengths",
)
"""What a loss reads beside the output and a tensor of targets."""


def _two_groups(params: Any) -> torch.optim.Optimizer:
    own = list(params)
    groups: list[dict[str, Any]] = [{"params": own[::2]}, {"params": own[1::2], "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.05)


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "counting": partial(GroupCounter, lr=0.05),
    "normed": partial(GlobalNorm, lr=0.05),
    "clamped": clamping,
    "two groups": _two_groups,
}
HABITS = ("gradients left behind", "own weight decay between steps")
"""What the script does before a step."""


@dataclass(frozen=True)
class Trained:
    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    """The parameters without a gradient."""


@dataclass(frozen=True)
class DrawnLoop:
    """A model, its loop, and the way in which a pipeline trains it."""

    model: DrawnModel
    loss: str = "mean"
    optimizer: str = "momentum"
    habits: tuple[str, ...] = ()
    schedule: str = "1f1b-flush"
    stages: int = 2
    microbatches: int = 2
    recompute: bool | str | None = None
    sizes: tuple[int, ...] = (2, 2)
    """Samples in a microbatch, by step."""

    def batches(self) -> list[tuple[Tensor, Any]]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for size in self.sizes:
            x, y = torch.randn(2, size * self.microbatches, WIDTH, generator=generator, dtype=torch.float64)
            found.append((x, self._target(y)))
        return found

    def _target(self, y: Tensor) -> Any:
        match self.loss:
            case "texts":
                return ["a" * (1 + place % 5) for place in range(len(y))]
            case "rows of lengths":
                return [row[: 1 + place % WIDTH] for place, row in enumerate(y)]
            case "masked":
                return torch.where(y > 0.5, torch.nan, y)
            case "weighted classes":
                return y.argmax(1)
        return y

    def loss_of(self, model: nn.Module) -> Callable[[Any, Any], Tensor]:
        """The loss function of a script whose model is `model`."""
        own = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def loss(output: Tensor, target: Any) -> Tensor:
            match self.loss:
                case "penalty on all parameters":
                    return F.mse_loss(output, target) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
                case "penalty on the last layer":
                    last = [p for p in model.parameters() if p.requires_grad][-1]
                    return F.mse_loss(output, target) + 0.1 * last.pow(2).sum()
                case "of its own parameter":
                    return F.mse_loss(output, target) * torch.exp(-own) + own
                case "masked":
                    known = ~target.isnan()
                    return (output - target)[known].pow(2).sum() / known.sum()
                case "weighted classes":
                    weights = torch.linspace(0.5, 2.0, WIDTH, dtype=torch.float64)
                    return F.cross_entropy(output, target, weight=weights)
                case "texts":
                    pairs = zip(output, target, strict=True)
                    return sum((row - len(text)).pow(2).mean() for row, text in pairs) / len(output)
                case "rows of lengths":
                    pairs = zip(output, target, strict=True)
                    return sum((row[: len(wanted)] - wanted).pow(2).mean() for row, wanted in pairs) / len(output)
            return F.mse_loss(output, target)

        return loss

    def _before_step(self, model: nn.Module, optimizer: Any, x: Tensor) -> None:
        if "gradients left behind" in self.habits:
            # On a copy of the buffers and of state in Python: the script looks at gradients only.
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.ones_like(parameter)
        if "own weight decay between steps" in self.habits:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.5

    def train_plainly(self) -> Trained:
        """The numbers of the script without Penstock; `RuntimeError` for a model that autograd refuses.

        The model runs on each microbatch, since a batch norm or a count of calls makes that a difference. The loss is
        that of the whole batch.
        """
        model = as_module(self.model.make())
        loss_fn = self.loss_of(model)
        optimizer = OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])
        found = Trained()
        for x, target in self.batches():
            self._before_step(model, optimizer, x)
            optimizer.zero_grad()
            outputs = [model(part.clone()) for part in x.chunk(self.microbatches)]
            loss = loss_fn(torch.cat(outputs), target)
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                prediction = model(x.clone())
                found.evaluations.append(float(loss_fn(prediction, target)))
            found.losses.append(float(loss.detach()))
            model.train()
            found.predictions.append(prediction)
        found.state.update(model.state_dict())
        found.unread.update(name for name, parameter in model.named_parameters() if parameter.grad is None)
        return found

    def train_in_stages(self) -> tuple[Trained, Sequence[str]]:
        """The numbers of the pipeline, and what it warned of. `PenstockError` if it refuses the loop."""
        model = self.model.make()
        sample = (torch.zeros(3, WIDTH, dtype=torch.float64),)
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("schedule", "stages", "microbatches", "recompute")
        }
        found, make = Trained(), OPTIMIZERS[self.optimizer]
        with (
            logged(logging.WARNING) as warned,
            penstock.Pipeline(model, sample, self.loss_of(as_module(model)), make, **options) as pipe,
        ):
            for x, target in self.batches():
                self._before_step(as_module(model), pipe.optimizer, x)
                found.losses.append(float(pipe.step(x, target).loss))
                found.evaluations.append(float(pipe.evaluate(x, target).loss))
                found.predictions.append(pipe.predict(x))
        found.state.update(as_module(model).state_dict())
        return found, warned


@st.composite
def drawn_loops(draw: st.DrawFn) -> DrawnLoop:
    """Loops over drawn models; the plainest first."""
    schedule = draw(st.sampled_from(["1f1b-flush", "gpipe", "zb-h1"]))
    again = [None, True] if schedule == "zb-h1" else [None, True, "layers"]
    # Most loops are plain in most respects: several that are refused at once would hide what the others train.
    return DrawnLoop(
        model=draw(drawn_models()),
        loss=draw(st.sampled_from(["mean"] * len(LOSSES) * 2 + list(LOSSES))),
        optimizer=draw(st.sampled_from(["momentum"] * len(OPTIMIZERS) * 2 + list(OPTIMIZERS))),
        habits=draw(st.sampled_from([(), (), (), *((habit,) for habit in HABITS)])),
        schedule=schedule,
        stages=draw(st.sampled_from([2, 3])),
        microbatches=draw(st.sampled_from([2, 4])),
        recompute=draw(st.sampled_from(again)),
        sizes=(draw(st.sampled_from([2, 3])), draw(st.sampled_from([2, 3]))),
    )


def outcome_of(loop: DrawnLoop) -> str:
    """What became of a loop: trained, refused, warned of, or impossible without a pipeline, too."""
    try:
        found, warned = loop.train_in_stages()
    except penstock.PenstockError:
        return "refused"
    try:
        expected = loop.train_plainly()
    except RuntimeError:
        return "impossible"
    if any("first two microbatches" in text for text in warned):
        return "warned"
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.evaluations == pytest.approx(expected.evaluations, rel=1e-12)
    for actual, wanted in zip(found.predictions, expected.predictions, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-13)
    for name, tensor in expected.state.items():
        # A parameter that no layer reads is in no stage, so that no optimizer of the pipeline can clamp it.
        if loop.optimizer != "clamped" or name not in expected.unread:
            torch.testing.assert_close(found.state[name], tensor, rtol=1e-11, atol=1e-13)
    return "trained"


@pytest.mark.hypothesis
def test_random_loops_train_with_the_numbers_of_a_plain_loop_or_are_refused() -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=20)
    @given(drawn_loops())
    def train(loop: DrawnLoop) -> None:
        outcomes[outcome_of(loop)] += 1

    train()

    # A generator whose loops are refused would test nothing.
    assert outcomes["trained"] >= outcomes.total() / 3, outcomes
