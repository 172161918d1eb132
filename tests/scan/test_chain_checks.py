"""The first backward of a `ScanSequential` compares its Jacobians with autograd, and refuses a layer by its name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.scan import ScanRNN, ScanSequential, blelloch, diagonal_recurrence, estimate, linear


class Function(nn.Module):
    """A layer of no parameters."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        assert callable(self.function)
        result: Tensor = self.function(x)
        return result


class Squared(nn.Linear):
    """Derives from a layer with a rule, and computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) ** 2


class Tripled(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * input


def chain_of(layer: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """The scan over a chain with `layer`, and PyTorch's chain of the same layers."""
    # Else the samples may be sorted as they are.
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), layer, nn.Linear(4, 4)]
    return ScanSequential(*layers).double(), nn.Sequential(*layers).double()


def gradients(chain: nn.Sequential) -> list[Tensor]:
    """The gradients of the input and of the parameters. That of the output is one everywhere."""
    given = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4).requires_grad_()
    return list(torch.autograd.grad(chain(given).sum(), [given, *chain.parameters()]))


MIXING = {
    "mean": Function(lambda x: x - x.mean(0)),
    "gate": Function(lambda x: x * torch.sigmoid(x.mean())),
    "roll": Function(lambda x: x.roll(1, 0)),
    "softmax": nn.Softmax(0),
    "sort": Function(lambda x: x.sort(0).values),
}


@pytest.mark.parametrize("layer", MIXING.values(), ids=MIXING)
def test_a_layer_that_mixes_samples_is_refused_by_its_name(layer: nn.Module) -> None:
    chain, _ = chain_of(layer)
    with pytest.raises(PenstockError, match=rf"layer 2 \({type(layer).__name__}\).*\(5, 4\).*mixes samples"):
        gradients(chain)


def test_a_layer_that_draws_numbers_is_refused() -> None:
    chain, _ = chain_of(Function(lambda x: x * torch.rand_like(x)))
    with pytest.raises(PenstockError, match=r"cannot compute the Jacobian of layer 2 \(Function\)"):
        gradients(chain)


SQUARED = Squared(4, 4)


@pytest.mark.parametrize(
    ("layer", "same"),
    [
        (SQUARED, SQUARED),
        (Tripled(), Tripled()),
        # PyTorch refuses a write in place behind a Tanh.
        (nn.ReLU(inplace=True), nn.ReLU()),
        (Function(lambda x: x.mul_(2)), Function(lambda x: 2 * x)),
    ],
    ids=["derived", "own identity", "ReLU in place", "in place"],
)
def test_layers_of_other_types_have_their_own_jacobians(layer: nn.Module, same: nn.Module) -> None:
    chain, _ = chain_of(layer)
    plain = nn.Sequential(chain[0], chain[1], same, chain[3])
    for found, expected in zip(gradients(chain), gradients(plain), strict=True):
        # The order of additions differs.
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_each_shape_is_compared_once() -> None:
    chain, _ = chain_of(nn.GELU())
    assert isinstance(chain, ScanSequential)
    gradients(chain)
    before = set(chain.checked)
    gradients(chain)

    assert chain.checked == before and len(before) == 4


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ScanRNN(2, 2, group=5), r"ScanRNN\(group=5\): expected a torch.distributed.P"),  # type: ignore[arg-type]
        (lambda: estimate(1, 1, 1, device="tpu"), r"estimate\(device=\): expected a type of device"),
        (lambda: estimate(None, 1, 1), r"estimate\(steps=\): expected a whole number"),  # type: ignore[arg-type]
        (lambda: estimate(1, 1.5, 1), r"estimate\(batch=\): expected a whole number"),  # type: ignore[arg-type]
        (lambda: blelloch(None, None), r"scan\(gradient=\): expected a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: linear(torch.ones(1, 1), [1]), r"scan\(jacobians=\): expected a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: diagonal_recurrence(torch.ones(2), None), r"diagonal_recurrence\(inputs=\)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(PenstockError, match=text):
        call()
