"""Conditions on sizes, read from those of PyTorch."""

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capturing.model_forms import SizeGuard
from penstock.errors import CaptureError

LENGTH = "L['tensors'][1].size()[2]"


def test_a_guard_is_read_and_asked() -> None:
    guard = SizeGuard.of(f"({LENGTH} % 2) == min(0, L['tensors'][0].size()[1]*{LENGTH})", ("x", "y"))

    assert guard.text == "(y.shape[2] % 2) == min(0, x.shape[1]*y.shape[2])"
    assert guard.sizes == (("y", 2), ("x", 1))
    assert guard.holds({"x": (1, 1), "y": (1, 1, 4)})
    assert not guard.holds({"x": (1, 1), "y": (1, 1, 5)})


def test_a_guard_may_name_functions_of_torch() -> None:
    guard = SizeGuard.of(f"math.trunc(torch.sym_float({LENGTH}) ** 0.5) == 2", ("x", "y"))

    assert guard.holds({"y": (1, 1, 8)})
    assert not guard.holds({"y": (1, 1, 9)})


def test_a_guard_that_cannot_be_asked_is_refused() -> None:
    guard = SizeGuard.of(f"Unheard({LENGTH}) == 3", ("x", "y"))

    with pytest.raises(CaptureError, match=r"cannot be checked in later steps: Unheard\(y.shape\[2\]\) == 3"):
        guard.holds({"x": (1, 1), "y": (1, 1, 4)})


class Parity(nn.Module):
    """Asks outside of its blocks whether a length is even, and in evaluation whether it is a multiple of three."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if x.shape[1] % (2 if self.training else 3) == 0 else 10 * x


def test_sizes_that_lead_another_way_are_refused() -> None:
    def data(length: int) -> tuple[Tensor, Tensor]:
        return torch.ones(4, length, 3), torch.zeros(4)

    model = Parity()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.eye_(layer.weight)
    sample = (data(6)[0][:2],)

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return output.square().mean()

    with penstock.Pipeline(model, sample, loss, lambda p: torch.optim.SGD(p, lr=0.1), stages=2, microbatches=2) as pipe:
        for length in (6, 8):
            pipe.step(*data(length))
        with pytest.raises(
            CaptureError, match=r"whether \(args\[0\].shape\[1\] % 2\) == 0, .* args\[0\].shape\[1\] = 7"
        ):
            pipe.step(*data(7))
        assert pipe.predict(data(9)[0]).shape == (4, 9, 3)
        with pytest.raises(CaptureError, match=r"whether \(args\[0\].shape\[1\] % 3\) == 0"):
            pipe.predict(data(8)[0])
        pipe.step(*data(4))
    with pytest.raises(CaptureError, match=r"% 2\) == 0"):
        penstock.reference_train(
            Parity(), [data(7)], sample=sample, loss_fn=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), stages=2
        )
