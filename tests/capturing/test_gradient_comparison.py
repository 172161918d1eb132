"""A chain may differ from its model by the rounding of the model, and by nothing else; little memory tells which."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.capturing import capture, checking
from penstock.capturing.checking import check_chain, parts_of
from penstock.capturing.sampled_models import SampledModel
from penstock.capturing.samples import read_sample
from penstock.errors import CaptureError
from support.fork_server import ForkServer
from support.models import InARow
from support.paths import SCRIPTS

WIDTH = 16


class Product(nn.Module):
    """A matrix product whose gradient is a sum over many large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class _Enlarged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-4)


def reversed_rows(body: Product, x: Tensor) -> Tensor:
    """The same, and its gradient is summed in another order."""
    return (x.flip(0) @ body.weight).flip(0)


def enlarged(body: Product, x: Tensor) -> Tensor:
    """The same, with a gradient that is too large by a ten-thousandth."""
    return x @ _Enlarged.apply(body.weight)


def detached(body: Product, x: Tensor) -> Tensor:
    return x @ body.weight.detach() + 0 * body.weight.sum()


def partly(body: Product, x: Tensor) -> Tensor:
    """The same without the gradient of one row."""
    # One product: that of a single row may be of another kernel, with other roundings.
    y = x @ body.weight
    return torch.cat([y[:1].detach(), y[1:]])


def check(forward: Callable[[Product, Tensor], Tensor], scale: float, *, double: bool = False) -> None:
    """Compares a model with a chain in which its block computes as `forward` does."""
    torch.manual_seed(0)
    product = Product()
    model = nn.Sequential(product, nn.Linear(WIDTH, WIDTH))
    x = torch.randn(512, WIDTH) * scale
    if double:
        model, x = model.double(), x.double()
    chain = capture(model, (x,))
    call, inputs = read_sample((x,))

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = product

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (forward(product, x),)

    first, *rest = chain.layers
    other = replace(chain, layers=(replace(first, module=Other()), *rest))
    check_chain(SampledModel(model, call, inputs), other, trains=True)


@pytest.fixture(params=[False, True], ids=["at once", "in parts"])
def parted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are compared at once, or in as many parts as there are parameters."""
    if request.param:
        monkeypatch.setattr(checking, "_LEAST_BYTES", 1)


@pytest.mark.usefixtures("parted")
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_another_order_of_a_sum_is_no_difference_and_a_lost_or_wrong_gradient_is_found(scale: float) -> None:
    for double in (False, True):
        check(reversed_rows, scale, double=double)
        for forward in (enlarged, detached, partly):
            with pytest.raises(CaptureError, match=r"differs from the model in the gradient of parameter 0.weight. L"):
                check(forward, scale, double=double)


def parameters(*sizes: int) -> dict[str, nn.Parameter]:
    return {str(index): nn.Parameter(torch.zeros(size, dtype=torch.uint8), False) for index, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), []),
        ((1, 2, 3), [["0", "1", "2"]]),
        ((5 << 20, 3 << 20, 40 << 20, 1, 2), [["0", "1"], ["2"], ["3", "4"]]),
        (((8 << 20),) * 12, [[str(index), str(index + 1)] for index in range(0, 12, 2)]),
    ],
)
def test_gradients_come_in_parts_of_a_sixth_of_all(sizes: tuple[int, ...], expected: list[list[str]]) -> None:
    assert [[*part] for part in parts_of(parameters(*sizes))] == expected


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_the_checks_take_half_of_the_weights_as_memory(fork_server: ForkServer) -> None:
    (process,) = fork_server.start_ranks([str(SCRIPTS / "capture_memory_script.py")], 1)
    peak, weights = map(int, process.communicate()[0].split())

    assert peak < weights / 2


class Exponential(nn.Module):
    """Autograd keeps its result."""

    def __init__(self) -> None:
        super().__init__()
        # With a parameter it is a block, which runs as it is.
        self.unused = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        PASSES.append(sum(not each.expired() for each in KEPT))
        result = x.exp()
        KEPT.append(StorageWeakRef(result.untyped_storage()))
        return result


KEPT: list[StorageWeakRef] = []
PASSES: list[int] = []
"""How many results were there at the beginning of each forward."""


def test_what_autograd_keeps_for_two_passes_is_held_at_once() -> None:
    """One of the model, and one of the chain: a model that fits on its device fits when it is captured."""
    capture(InARow(nn.Linear(2, 2), Exponential()), (torch.ones(2, 2),))

    assert len(PASSES) >= 6
    assert max(PASSES) == 1
