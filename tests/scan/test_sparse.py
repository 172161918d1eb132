"""Sparse Jacobians and their products equal the dense ones."""

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.scan.sparse import Pattern, SymbolicProduct, layer_jacobian

torch.manual_seed(0)
LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 6)),
    (nn.Conv2d(2, 3, 3, padding=1, bias=False), (2, 1, 1)),
    (nn.Conv2d(4, 6, (2, 3), stride=(2, 1), padding=(0, 2), groups=2), (4, 7, 5)),
    (nn.Conv2d(3, 3, 3, dilation=2, padding=3, groups=3), (3, 6, 6)),
    (nn.Conv2d(1, 2, 1, stride=3), (1, 7, 7)),
    (nn.MaxPool2d(2), (3, 6, 4)),
    (nn.MaxPool2d(3, stride=2, padding=1), (2, 7, 6)),
    (nn.AvgPool2d((2, 3)), (2, 5, 7)),
    (nn.AvgPool2d(3, stride=1, padding=1), (2, 4, 4)),
    (nn.Linear(7, 4), (7,)),
    (nn.ReLU(), (2, 3)),
    (nn.Tanh(), (5,)),
    (nn.Sigmoid(), (5,)),
]


def dense_jacobian(layer: nn.Module, sample: Tensor) -> Tensor:
    """Transposed, between flattened samples."""
    found: Tensor = torch.func.jacrev(lambda flat: layer(flat.view(1, *sample.shape)).flatten())(sample.flatten())
    return found.T


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
def test_layers_equal_the_dense_jacobian(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = layer.double()
    inputs = torch.randn(3, *shape, dtype=torch.float64)
    found = layer_jacobian(layer, shape)
    values = found.values(inputs, layer(inputs).detach())
    every = found.pattern.dense(values).expand(3, *found.pattern.shape)
    vectors = torch.randn(3, found.pattern.shape[1], dtype=torch.float64)

    for sample, dense in zip(inputs, every, strict=True):
        torch.testing.assert_close(dense, dense_jacobian(layer, sample), rtol=1e-12, atol=1e-12)
    expected = (every @ vectors.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.pattern.apply(values, vectors), expected)
    places = found.pattern.rows * found.pattern.shape[1] + found.pattern.columns
    assert bool((places[1:] > places[:-1]).all())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(4, 6, (2, 3), stride=(2, 1), padding=(0, 2), groups=2), (4, 7, 5)), (nn.Linear(7, 4), (7,))],
    ids=str,
)
def test_pruned_weights_have_no_entries(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = layer.double()
    weight = next(layer.parameters())
    with torch.no_grad():
        weight.mul_(torch.rand_like(weight) < 0.3)
    whole, found = layer_jacobian(layer, shape), layer_jacobian(layer, shape, pruned=True)
    dense = dense_jacobian(layer, torch.randn(shape, dtype=torch.float64))
    values = found.values(torch.ones(1, 1), torch.ones(1, 1))

    torch.testing.assert_close(found.pattern.dense(values), dense)
    assert found.pattern.entries == int((dense != 0).sum()) < whole.pattern.entries


def test_the_first_layer_of_vgg_has_the_sparsity_of_the_paper() -> None:
    """Table 1 prints .99157, which is that of its entries; ReLU has one entry in a row."""
    convolution = layer_jacobian(nn.Conv2d(3, 64, 3, padding=1), (3, 32, 32)).pattern

    assert convolution.entries == 1_696_512
    assert round(convolution.sparsity, 5) == 0.99157
    assert layer_jacobian(nn.ReLU(), (64, 32, 32)).pattern.entries == 65_536


@pytest.mark.parametrize("batch", [(), (4,)])
def test_products_equal_dense_products(batch: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((5, 7, 3), (1, 1, 1), (8, 2, 8), (6, 9, 4)):
        patterns = []
        for shape in ((rows, inner), (inner, columns)):
            places = torch.rand(shape, generator=generator) < 0.4
            found = places.nonzero()
            patterns.append(Pattern(shape, found[:, 0], found[:, 1]))
        values = [torch.randn(*batch, p.entries, generator=generator, dtype=torch.float64) for p in patterns]
        product = SymbolicProduct(*patterns)
        left, right = (p.dense(v) for p, v in zip(patterns, values, strict=True))

        torch.testing.assert_close(product.pattern.dense(product(*values)), left @ right)
        meeting = int(
            (
                patterns[0].dense(torch.ones(patterns[0].entries)) @ patterns[1].dense(torch.ones(patterns[1].entries))
            ).sum()
        )
        assert product.flops == 2 * meeting


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.GELU(), (3,)),
        (nn.Conv2d(1, 1, 3, padding="same"), (1, 4, 4)),
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), (1, 4, 4)),
        (nn.MaxPool2d(2, ceil_mode=True), (1, 3, 3)),
        (nn.AvgPool2d(2, padding=1, count_include_pad=False), (1, 4, 4)),
        (nn.Linear(3, 2), (4, 3)),
    ],
    ids=str,
)
def test_unknown_layers_are_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(PenstockError, match="is not known"):
        layer_jacobian(layer, shape)


def test_matrices_that_do_not_fit_are_refused() -> None:
    pattern = layer_jacobian(nn.Linear(3, 2), (3,)).pattern
    with pytest.raises(PenstockError, match="as many rows"):
        SymbolicProduct(pattern, pattern)
