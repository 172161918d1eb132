"""The study of a pruned VGG-11 counts what brute force counts, and its record is what the page shows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pruned_vgg_study as study
from penstock.scan.chains import scan_list
from penstock.scan.sparse import Pattern
from support.paths import ROOT


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return study.build((3, "M", 4, 4), channels=2, pruned=0.6).double()


IMAGE = (2, 6, 4)


def dense_chain(model: nn.Sequential, image: Tensor) -> list[Tensor]:
    """The transposed Jacobian of each layer at `image`, by automatic differentiation."""
    found, inputs = [], image.unsqueeze(0)
    for layer in model:
        flat = torch.func.jacrev(lambda value, layer=layer: layer(value).flatten())(inputs).flatten(1)
        found.append(flat.T)
        inputs = layer(inputs).detach()
    return found


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_counts_equal_brute_force(model: nn.Sequential, levels: int) -> None:
    """Every multiplication of two numbers that are not zero, and an addition for each."""
    image = torch.randn(IMAGE, dtype=torch.float64)
    jacobians = [(each != 0).double() for each in dense_chain(model, image)]
    expected: list[tuple[str, int, int]] = []

    def then(earlier: Tensor, later: Tensor) -> Tensor:
        meeting = later @ earlier
        kind = "mv" if earlier.shape[1] == 1 else "mm"
        expected.append((kind, later.shape[0] * later.shape[1] * earlier.shape[1], 2 * int(meeting.sum())))
        # The study takes a gradient to have no zeros.
        return torch.ones_like(meeting) if kind == "mv" else (meeting > 0).double()

    chain = [torch.ones(jacobians[-1].shape[1], 1, dtype=torch.float64), *reversed(jacobians)]
    then(scan_list(chain, then, levels)[-1], chain[-1])
    found = study.count("", study.patterns_of(model, image, of_image=True), levels)

    assert [(each.kind, each.dense, each.flops) for each in found.products] == expected
    assert found.flops == sum(flops for _, _, flops in expected)
    if not levels:
        assert found.critical_flops == found.flops


def test_the_critical_path_is_the_longest() -> None:
    """Four diagonal matrices of 3 rows: 6 operations for each product. A scan does two of four steps side by side."""
    every = torch.arange(3)
    chain = [Pattern((3, 3), every, every)] * 4

    assert [each.critical_flops for each in study.counts_of(chain)] == [24, 18, 18]


def test_patterns_of_an_image_are_within_those_of_the_layers(model: nn.Sequential) -> None:
    image = torch.randn(IMAGE, dtype=torch.float64)
    for whole, part, jacobian in zip(
        study.patterns_of(model, image, of_image=False),
        study.patterns_of(model, image, of_image=True),
        dense_chain(model, image),
        strict=True,
    ):
        assert torch.equal(study.dense_ones(part) > 0, jacobian != 0)
        assert bool((study.dense_ones(whole) >= study.dense_ones(part)).all())


def test_both_ways_to_the_pattern_of_a_product_agree() -> None:
    """One lists the pairs of entries that meet, a few rows at a time; the other multiplies dense matrices."""
    generator = torch.Generator().manual_seed(0)
    for share in (0.1, 0.9):
        masks = [torch.rand(shape, generator=generator) < share for shape in ((9, 7), (7, 8))]
        patterns = [Pattern((len(mask), mask.shape[1]), *mask.nonzero().unbind(1)) for mask in masks]
        found = study.product_pattern(patterns[0], patterns[1], pairs_at_once=7)
        assert torch.equal(study.dense_ones(found), ((masks[0].float() @ masks[1].float()) > 0).float())


def test_plain_backward_counts_entries(model: nn.Sequential) -> None:
    image = torch.randn(IMAGE, dtype=torch.float64)
    dense = study.build((3, "M", 4, 4), channels=2, pruned=0.0).double()
    whole = study.plain_backward(model, image, pruned=False)
    entries = [2 * int((each != 0).sum()) for each in dense_chain(dense, image)]

    for place, layer in enumerate(model):
        if isinstance(layer, nn.Conv2d):
            assert whole.products[place].flops == entries[place]
    assert study.plain_backward(model, image, pruned=True).flops < whole.flops


def test_the_record_is_whole() -> None:
    rows = [row for row in (ROOT / "studies/results/pruned_vgg.md").read_text().splitlines() if row.startswith("|")]

    assert len(rows) == (2 + 2 + 4) + (2 + 2 + 3)
    assert Path(ROOT / "docs/pictures/scan-pruned-vgg.svg").exists()
