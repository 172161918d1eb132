"""The gradients of the first update are compared with those that the chain has by itself, in one process."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.models import Blocks

X, Y = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(torch.tanh(self.one(x)))


class Wiping(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad()
        return super().forward(x)


class WipingOne(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.one.bias.grad = None
        return super().forward(x)


def made(kind: Callable[[], nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    return Blocks(kind).double()


def hooked(model: nn.Module, hook: Callable[[nn.Module], None], *, backwards: bool) -> nn.Module:
    """`model`, with a hook on its second block."""
    block: nn.Module = model.blocks[1]  # type: ignore[index,union-attr,assignment]
    register: Any = block.register_full_backward_hook if backwards else block.register_forward_pre_hook
    register(lambda module, *_: hook(module))
    return model


def double(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)


def wipe(module: nn.Module) -> None:
    module.zero_grad()


WRONG: dict[str, Callable[[], nn.Module]] = {
    "a forward wipes them": lambda: made(Wiping),
    "a forward wipes one": lambda: made(WipingOne),
    "a hook on a forward wipes them": lambda: hooked(made(), wipe, backwards=False),
    "a hook on a backward wipes them": lambda: hooked(made(), wipe, backwards=True),
    "a hook on a backward doubles them": lambda: hooked(made(), double, backwards=True),
}


def warnings_of(log: pytest.LogCaptureFixture, model: nn.Module, **options: Any) -> list[str]:
    """What the first two steps warn of gradients."""
    dtype = next(model.parameters()).dtype
    x, y = X.to(dtype), Y.to(dtype)
    options = {"stages": 2, "microbatches": 4, **options}
    with (
        log.at_level(logging.WARNING, "penstock"),
        penstock.Pipeline(model, (x[:2],), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), **options) as pipe,
    ):
        pipe.step(x, y)
        pipe.step(x, y)
    return [record.getMessage() for record in log.records if "gradient" in record.getMessage()]


@pytest.mark.parametrize("name", WRONG)
def test_gradients_that_something_else_writes_have_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings_of(caplog, WRONG[name]())
    assert text.startswith("the gradient of blocks.")
    assert "is not the sum over the microbatches" in text and "zero_grad()" in text


@pytest.mark.parametrize(
    "options",
    [{"loss_scale": "dynamic"}, {"schedule": "zb-v", "stages": 4}, {"schedule": "interleaved"}, {"microbatches": 3}],
    ids=str,
)
def test_they_are_compared_under_any_schedule_that_flushes(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert len(warnings_of(caplog, made(Wiping), **options)) == 1


def test_strict_they_are_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(penstock.CaptureError, match=r"the gradient of blocks\."):
        warnings_of(caplog, made(Wiping), check="strict")


class Counting(Block):
    """Has a state of its own, draws from a generator of its own, and drops numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.generator = 0, torch.Generator().manual_seed(3)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            x = x + self.calls * torch.rand(8, generator=self.generator, dtype=x.dtype)
        return super().forward(self.dropout(self.norm(x)))


class Unused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.never = nn.Parameter(torch.ones(8))
        self.one.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.frozen


class Noised(Block):
    """Draws from PyTorch's own stream."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, self.training))


def tied() -> nn.Module:
    model: Any = made()
    model.blocks[3].other.weight = model.blocks[0].one.weight
    return model  # type: ignore[no-any-return]


RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "state": (lambda: made(Counting), {}),
    "tied": (tied, {}),
    "unused and hooked": (lambda: made(Unused), {}),
    "PyTorch's stream": (lambda: made(Noised), {"seed": None}),
    "bfloat16": (lambda: made().to(torch.bfloat16), {}),
    "clipped": (made, {"clip_grad_norm": 0.01}),
    "scaled": (made, {"loss_scale": "dynamic"}),
    "zero bubble": (lambda: made(Noised), {"schedule": "zb-v", "stages": 4}),
    "interleaved": (made, {"schedule": "interleaved"}),
    "ragged": (made, {"microbatches": 3}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_gradients_are_no_difference(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, options = RIGHT[name]
    assert warnings_of(caplog, build(), check="strict", **options) == []
