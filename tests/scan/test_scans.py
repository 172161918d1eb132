"""Scans over Jacobians equal plain backpropagation, for every length and method."""

import pytest
import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.scan import blelloch, chunked, hybrid, linear
from penstock.scan.scans import levels_of

LENGTHS = [*range(1, 71), 257, 1000]


def chain(steps: int, width: int = 4, batch: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """A gradient, Jacobians that neither grow nor vanish and do not commute, and entering gradients."""
    generator = torch.Generator().manual_seed(steps)
    draws = [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((batch, width), (steps, batch, width, width), (steps, batch, width))
    ]
    draws[1] = torch.linalg.qr(draws[1]).Q * (1 + 0.1 * torch.rand(steps, 1, 1, 1, generator=generator) - 0.05)
    return tuple(draw.to(dtype) for draw in draws)


def by_hand(gradient: Tensor, jacobians: Tensor, entering: Tensor | None = None) -> Tensor:
    """Plain backpropagation."""
    found = [gradient]
    for step, jacobian in enumerate(jacobians):
        found.append((jacobian @ found[-1].unsqueeze(-1)).squeeze(-1))
        if entering is not None:
            found[-1] = found[-1] + entering[step]
    return torch.stack(found)


def farthest(found: Tensor, expected: Tensor) -> float:
    """The largest error of a step, relative to the norm of that step."""
    assert found.shape == expected.shape
    return float(((found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max())


@pytest.mark.parametrize(("affine", "rescale"), [(False, False), (True, False), (True, True)])
def test_all_lengths(affine: bool, rescale: bool) -> None:
    for steps in LENGTHS if affine and not rescale else (1, 2, 3, 7, 8, 9, 31, 32, 33, 70):
        gradient, jacobians, entering = chain(steps)
        given = (gradient, jacobians, entering if affine else None)
        before = [each.clone() for each in (gradient, jacobians, entering)]
        expected = by_hand(*given)

        assert farthest(linear(*given), expected) < 1e-12
        assert farthest(blelloch(*given, rescale=rescale), expected) < 1e-12, steps
        for workers in {1, 2, 3, 7, steps} if steps < 40 else {4}:
            assert farthest(chunked(*given, workers=workers, rescale=rescale), expected) < 1e-12, (steps, workers)
        for levels in range(levels_of(steps) + 1) if steps < 40 else (2,):
            assert farthest(hybrid(*given, levels=levels, rescale=rescale), expected) < 1e-12, (steps, levels)
        assert all(map(torch.equal, before, (gradient, jacobians, entering))), "arguments are not changed"


def algorithm_1(gradient: Tensor, jacobians: Tensor) -> Tensor:
    """The paper's algorithm as printed, one product at a time."""
    places: list[Tensor | None] = [gradient.unsqueeze(-1), *jacobians]
    last = len(jacobians)
    levels = last.bit_length()

    def then(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
        if earlier is None or later is None:
            return earlier if later is None else later
        return later @ earlier

    def pairs(level: int) -> list[tuple[int, int]]:
        end = last - 2**level + 1
        return [(i + 2**level - 1, min(i + 2 ** (level + 1) - 1, last)) for i in range(0, end, 2 ** (level + 1))]

    for level in range(levels - 1):
        for left, right in pairs(level):
            places[right] = then(places[left], places[right])
    places[last] = None
    for level in reversed(range(levels)):
        for left, right in pairs(level):
            kept, places[left] = places[left], places[right]
            places[right] = then(places[right], kept)
    found = [each for each in places[1:] if each is not None]
    found.append(jacobians[-1] @ found[-1])
    return torch.stack([each.expand(*each.shape[:-1], 1) for each in found]).squeeze(-1)


def test_equals_the_algorithm_of_the_paper() -> None:
    for steps in (1, 2, 3, 6, 7, 8, 33, 100):
        gradient, jacobians, _ = chain(steps)
        assert farthest(blelloch(gradient, jacobians), algorithm_1(gradient, jacobians)) < 1e-12


@pytest.mark.parametrize("steps", [4, 7, 33])
def test_a_wrong_scan_is_found(steps: int) -> None:
    """The gradients of these chains do not vanish, and their Jacobians do not commute."""
    gradient, jacobians, _ = chain(steps)
    expected = by_hand(gradient, jacobians)
    wrong = [jacobians.mT, jacobians.flip(0), torch.cat([jacobians[1:], jacobians[:1]])]
    for each in wrong:
        assert farthest(blelloch(gradient, each), expected) > 0.01


def test_no_step_is_the_gradient_itself() -> None:
    gradient, jacobians, _ = chain(1)

    assert torch.equal(blelloch(gradient, jacobians[:0]), gradient[None])
    assert torch.equal(chunked(gradient, jacobians[:0], workers=3), gradient[None])


@pytest.mark.parametrize("rescale", [False, True])
def test_single_precision_is_as_good_as_step_by_step(rescale: bool) -> None:
    for steps in (100, 1000):
        gradient, jacobians, entering = chain(steps, width=20)
        expected = by_hand(gradient, jacobians, entering)
        single = [each.float() for each in (gradient, jacobians, entering)]
        own = farthest(by_hand(*single).double(), expected)

        assert farthest(blelloch(*single, rescale=rescale).double(), expected) < 3 * own
        assert farthest(chunked(*single, workers=8, rescale=rescale).double(), expected) < 3 * own


@pytest.mark.parametrize("method", [blelloch, lambda *given: chunked(*given, workers=5)])
def test_products_that_leave_the_range_do_no_harm(method: object) -> None:
    """1.2 ** 2000 is no float32. The gradient has nothing in that direction."""
    jacobians = torch.diag(torch.tensor([1.0, 1.2])).expand(2000, 1, 2, 2)
    gradient = torch.tensor([[1.0, 0.0]])

    assert torch.equal(method(gradient, jacobians), gradient.expand(2001, 1, 2))  # type: ignore[operator]


def test_products_that_vanish_do_no_harm() -> None:
    """The product of the middle is 2 ** -600. The gradient is large before it and small after it."""
    grow, shrink = torch.full((5, 1, 1, 1), 2.0**20), torch.full((60, 1, 1, 1), 2.0**-4)
    jacobians = torch.cat([grow, shrink])
    gradient = torch.ones(1, 1)

    assert torch.equal(blelloch(gradient, jacobians, rescale=True), by_hand(gradient, jacobians))


def test_a_gradient_that_overflows_step_by_step_overflows() -> None:
    jacobians = torch.full((200, 1, 1, 1), 2.0)
    gradient = torch.ones(1, 1)

    assert torch.equal(blelloch(gradient, jacobians), by_hand(gradient, jacobians))


@pytest.mark.parametrize("gradient", [torch.zeros(2, 3), torch.full((2, 3), torch.nan)])
def test_zeros_and_nan_pass_through(gradient: Tensor) -> None:
    jacobians = torch.zeros(5, 2, 3, 3)

    torch.testing.assert_close(
        blelloch(gradient, jacobians, rescale=True), by_hand(gradient, jacobians), equal_nan=True, rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g, j, u: blelloch(g[0], j), "found shapes"),
        (lambda g, j, u: blelloch(g, j[:, 0]), "found shapes"),
        (lambda g, j, u: blelloch(g, j.float()), "float32 or float64"),
        (lambda g, j, u: blelloch(g.half(), j.half()), "float32 or float64"),
        (lambda g, j, u: blelloch(g, j, u[:-1]), "entering has shape"),
        (lambda g, j, u: hybrid(g, j, levels=3), "from 0 .step by step. to 2"),
        (lambda g, j, u: chunked(g, j, workers=0), "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(call: object, text: str) -> None:
    with pytest.raises(PenstockError, match=text):
        call(*chain(5))  # type: ignore[operator]
