"""A chain of layers with a backward by scan has the gradients of `torch.nn.Sequential`."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.scan import ScanSequential
from penstock.scan.chains import scan_list


def lenet(sequential: type[nn.Sequential]) -> nn.Sequential:
    """As in the paper's figure 7, on smaller images."""
    torch.manual_seed(0)
    return sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 12),
        nn.GELU(),
        nn.LayerNorm(12),
        nn.Linear(12, 10),
    ).double()


@pytest.mark.parametrize("count", range(1, 20))
def test_a_list_is_scanned_in_its_order(count: int) -> None:
    letters = [chr(97 + index) for index in range(count)]
    expected = ["".join(letters[:place]) for place in range(1, count)]
    for levels in (None, 0, 1, 2, 9):
        assert scan_list(letters, lambda earlier, later: earlier + later, levels) == expected


def test_gradients_are_those_of_sequential() -> None:
    results = []
    for kind in (nn.Sequential, ScanSequential):
        model = lenet(kind)
        torch.manual_seed(1)
        inputs = torch.randn(4, 3, 12, 12, dtype=torch.float64, requires_grad=True)
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, torch.arange(4))
        results.append([outputs, *torch.autograd.grad(loss, [inputs, *model.parameters()])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_many_narrow_layers() -> None:
    results = []
    for kind in (nn.Sequential, ScanSequential):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(20):
            linear = nn.Linear(5, 5, dtype=torch.float64)
            nn.init.orthogonal_(linear.weight)
            layers += [linear, nn.Tanh()]
        shared = kind(*layers, layers[0])
        inputs = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
        results.append(torch.autograd.grad(shared(inputs).square().sum(), list(shared.parameters())))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_an_empty_chain_and_no_gradients() -> None:
    inputs = torch.ones(2, 3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(ScanSequential()(inputs).sum(), inputs)[0], torch.ones(2, 3))
    with torch.no_grad():
        assert not ScanSequential(nn.BatchNorm1d(3))(inputs).requires_grad


def test_too_much_memory_is_refused_before_it_is_taken() -> None:
    """The Jacobians of two samples of 100 inputs and 50 outputs, and the gradient of the outputs."""
    with pytest.raises(PenstockError, match="would take up to 40,000 bytes: expected at most 1,000"):
        ScanSequential(nn.Linear(100, 50), most_bytes=1000)(torch.ones(2, 100, requires_grad=True))


def test_products_count_as_memory() -> None:
    """Jacobians of 1 x 100 and 100 x 1 values are small. Their product has 100 x 100."""
    layers = [nn.Linear(100, 1), nn.Linear(1, 100), nn.Linear(100, 1)]
    with pytest.raises(PenstockError, match="and their products"):
        ScanSequential(*layers, most_bytes=40_000)(torch.ones(1, 100, requires_grad=True))
    ScanSequential(*layers, most_bytes=42_000)(torch.ones(1, 100, requires_grad=True)).sum().backward()


def test_patterns_are_found_once() -> None:
    chain = ScanSequential(nn.Conv2d(1, 1, 3), nn.GELU())
    chain(torch.ones(2, 1, 4, 4)).sum().backward()
    first = chain.jacobian_of(chain[0], (1, 4, 4))

    assert first is not None and chain.jacobian_of(chain[0], (1, 4, 4)) is first
    assert chain.jacobian_of(chain[1], (1, 2, 2)) is None
