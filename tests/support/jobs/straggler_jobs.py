"""Jobs for the tests of stragglers: a pipeline with a slow stage, which is then cut anew."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import penstock
from penstock.doctor.stragglers import Stragglers
from penstock.values import Plan
from support.counters import Counter

__all__ = ["apply_cut", "find_and_recut", "train_with_cut"]

LAYERS, STEPS = 8, 6


class _Layer(nn.Module):
    """A linear layer; in a slow one every forward takes 10 ms more."""

    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.slow = slow

    def forward(self, x: Tensor) -> Tensor:
        if self.slow:
            time.sleep(0.01)
        return torch.tanh(self.linear(x))


def _pipeline(plan: Plan, slow: bool, weightless: bool = False, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    with torch.device("meta" if weightless else "cpu"):
        model = nn.Sequential(*(_Layer(slow and layer >= LAYERS // 2) for layer in range(LAYERS)))
    if weightless:
        options["init_fn"] = penstock.reset_parameters(model)
    return penstock.Pipeline(
        model,
        sample=(torch.randn(2, 4, dtype=torch.float64),),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        plan=plan,
        **options,
    )


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def _train(pipe: penstock.Pipeline, batches: list[Tensor]) -> list[float]:
    return [float(pipe.step(batch, batch).loss) for batch in batches]


def train_with_cut() -> list[float]:
    """The losses of all steps with the first cut."""
    with _pipeline(Plan.uniform(LAYERS, 2, "1f1b-flush", 4), slow=False) as pipe:
        return _train(pipe, _batches())


def find_and_recut(directory: str, layers: bool) -> tuple[Stragglers, Plan, list[float], Any]:
    """The stragglers of the first steps, the new plan, and the losses of all steps, of which it ran the second half.
    With `layers`, the stragglers among the layers.
    """
    batches = _batches()
    with _pipeline(Plan.uniform(LAYERS, 2, "1f1b-flush", 4), slow=True) as pipe:
        losses = _train(pipe, batches[: STEPS // 2])
        found, plan = pipe.stragglers(), pipe.replan()
        measured = pipe.stragglers(layers=True) if layers else None
        pipe.save(directory)
    with _pipeline(plan, slow=True) as pipe:
        pipe.load(directory)
        return found, plan, losses + _train(pipe, batches[STEPS // 2 :]), measured


def apply_cut(
    directory: str, schedule: str, weightless: bool = False, **options: Any
) -> tuple[Plan, list[float], list[float], dict[str, Tensor]]:
    """The plan after it was applied in place; the losses of all steps; those after the cut of a pipeline that was built
    with the plan and has loaded the checkpoint; and by name the differences between the weights of both at the end.
    """
    batches = penstock.loader(TensorDataset(*2 * [torch.stack(_batches())]), 1)
    losses, rest = [], []
    with _pipeline(Plan.uniform(LAYERS, 2, schedule, 4), slow=True, weightless=weightless, **options) as pipe:
        tracked = Counter()
        pipe.track(tracked=tracked)
        for number, ((x,), (y,)) in enumerate(batches, 1):
            losses.append(float(pipe.step(x, y).loss))
            tracked.steps += 1
            if number == STEPS // 2:
                pipe.replan(apply=directory)
            elif number > STEPS // 2:
                rest.append((x, y))
        assert tracked.steps == STEPS == pipe.steps
        pipe.drain()
        found = {name: tensor.detach().clone() for name, tensor in pipe.named_parameters()}
        plan = pipe.plan
    with _pipeline(plan, slow=True, weightless=weightless, **options) as pipe:
        pipe.load(f"{directory}/step-{STEPS // 2:06d}")
        again = [float(pipe.step(x, y).loss) for x, y in rest]
        pipe.drain()
        differences = {name: tensor.detach() - found[name] for name, tensor in pipe.named_parameters()}
        return plan, losses, again, differences
