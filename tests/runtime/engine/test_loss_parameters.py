"""Losses that read parameters: those of the last stage are trained, all others are refused by name."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from support.models import InARow, sgd
from support.processes import Pool

torch.manual_seed(3)
X, Y = torch.randn(8, 4).double(), torch.randn(8, 4).double()


def pipeline(model: nn.Module, loss_fn: Callable[..., Any], **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(model, (X[:2],), loss_fn, sgd, **{"stages": 2, "microbatches": 4, **options})


def tall() -> nn.Sequential:
    """Five layers, of which two stages hold some each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def penalized(model: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """A loss with a penalty on the weights of `model`."""
    return functional.mse_loss(output, target) + 0.1 * sum(p.abs().sum() for p in model.parameters())


def scaled(model: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """A loss times a number that depends on the weights of `model`, without gradients."""
    with torch.no_grad():
        norms = torch.stack([p.norm() for p in model.parameters()])
    return functional.mse_loss(output, target) * norms.sum()


def refusal_of(part: str, schedule: str, loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = penalized) -> str:
    """The error of a step with a `loss` that reads all layers, or the last one; empty if there is none."""
    model = tall()
    read = model if part == "all" else model[-1]
    pipe = pipeline(model, lambda output, target: loss(read, output, target), schedule=schedule)
    try:
        pipe.step(X, Y)
    except penstock.PenstockError as error:
        return str(error)
    return ""


class Traced(InARow):
    """A model that is traced, with a parameter that only its loss reads."""

    def __init__(self) -> None:
        super().__init__(*tall())
        self.scale = nn.Parameter(torch.zeros(()).double())

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) * torch.exp(-self.scale) + self.scale


class Uncertain(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) * torch.exp(-self.scale) + self.scale


@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe", "zb-h1", "2bw", "pipedream"])
@pytest.mark.parametrize("kind", [tall, Traced])
def test_a_penalty_on_all_layers_is_refused(schedule: str, kind: Callable[[], nn.Module]) -> None:
    model = kind()
    pipe = pipeline(model, lambda output, target: penalized(model, output, target), schedule=schedule)
    with pytest.raises(
        penstock.PenstockError, match=r"depends on the parameter (layers\.)?[02]\.(weight|bias): expected"
    ):
        pipe.step(X, Y)


def test_processes_refuse_what_one_process_does(pool: Pool) -> None:
    here = refusal_of("all", "1f1b-flush")
    assert "depends on the parameter" in here
    found = pool.run(2, refusal_of, "all", "1f1b-flush")
    assert "0.weight: its newest numbers are in another process" in found[1]
    assert found[1] in found[0]
    assert pool.run(2, refusal_of, "last", "1f1b-flush") == ["", ""]


def test_weights_of_another_process_are_not_read_without_gradients_either(pool: Pool) -> None:
    assert refusal_of("all", "1f1b-flush", scaled) == ""
    assert "in a loss_fn of the output" in pool.run(2, refusal_of, "all", "1f1b-flush", scaled)[1]
    assert pool.run(2, refusal_of, "last", "1f1b-flush", scaled) == ["", ""]


@pytest.mark.parametrize(
    ("stages", "schedule"), [(2, "1f1b-flush"), (2, "gpipe"), (2, "zb-h1"), (1, "1f1b-flush")], ids=str
)
def test_a_penalty_on_what_the_last_stage_holds_trains_as_a_plain_loop(stages: int, schedule: str) -> None:
    model = tall()
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        penalized(plain if stages == 1 else plain[-1], plain(X), Y).backward()
        optimizer.step()

    read = model if stages == 1 else model[-1]
    pipe = pipeline(model, lambda output, y: penalized(read, output, y), stages=stages, schedule=schedule)
    for _ in range(3):
        pipe.step(X, Y)

    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)  # another order of sums


def with_norm(model: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return functional.mse_loss(output, target), {"norm": sum(p.norm() for p in model.parameters())}

    return loss_fn


def with_an_activation(model: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    weight: Any = list(model.modules())[-1].weight

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        return loss + gradient.square().sum()

    return loss_fn


def with_a_tensor(model: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    offsets = torch.zeros(2).double().requires_grad_()
    return lambda output, target: functional.mse_loss(output, target) + offsets.sum()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda model: model.loss, r"depends on the parameter scale: expected"),
        (with_norm, r"depends on the parameter (layers.[02].(weight|bias)|scale): expected"),
        (lambda model: Uncertain(), r"a gradient of its parameter scale, which is not in the model"),
        (lambda model: partial(Uncertain().__call__), r"a gradient of a tensor of \(\), which is not in the model"),
        (with_a_tensor, r"a gradient of a tensor of \(2,\), which is not in the model"),
        (with_an_activation, r"If it is an activation .* return from the model what the loss needs of it, or train"),
    ],
    ids=["bound method", "metric", "module", "closure", "tensor", "activation"],
)
def test_other_parameters_are_refused(make: Callable[[Any], Any], says: str) -> None:
    model = Traced()
    with pytest.raises(penstock.PenstockError, match=says):
        pipeline(model, make(model)).step(X, Y)


def test_a_weight_that_takes_gradients_is_refused() -> None:
    model = tall()
    pipe = pipeline(model, functional.mse_loss, loss_weight=lambda target: model[0].weight.sum().abs())
    with pytest.raises(penstock.PenstockError, match=r"loss_weight\(target\) returned a number with gradients"):
        pipe.step(X, Y)


def test_frozen_modules_in_a_loss_are_free() -> None:
    model, teacher = tall(), tall().requires_grad_(False)
    forgotten = tall()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            beside = forgotten(target)
        return functional.mse_loss(teacher(output), beside)

    pipeline(model, loss_fn).step(X, Y)


def test_targets_may_require_gradients() -> None:
    target = Y.clone().requires_grad_()
    pipeline(tall(), functional.mse_loss).step(X, target)
    assert target.grad is not None


def test_a_loss_may_run_the_model_of_another_pipeline() -> None:
    generator, critic = tall(), tall()
    critics = pipeline(critic, functional.mse_loss)
    generators = pipeline(generator, lambda output, target: functional.mse_loss(critic(output), target))
    for _ in range(2):
        generators.step(X, Y)
    critics.close()
