"""Diagonal recurrences by scan equal a loop, forward and backward."""

import pytest
import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.scan import DiagonalRecurrence, diagonal_recurrence


def by_loop(decay: Tensor, inputs: Tensor, first: Tensor) -> Tensor:
    states, state = [], first
    for each, own in zip(decay.expand_as(inputs), inputs, strict=True):
        state = each * state + own
        states.append(state)
    return torch.stack(states)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_equals_a_loop(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for steps in [*range(1, 40), 257, 1000]:
        given = [
            (torch.rand(steps, 2, 3, dtype=torch.float64) * 0.2 + 0.85).to(dtype),
            torch.randn(steps, 2, 3, dtype=dtype),
            torch.randn(2, 3, dtype=dtype),
        ]
        if dtype.is_complex:
            given[0] = given[0] * torch.exp(1j * torch.rand(steps, 2, 3, dtype=torch.float64))
        leaves = [each.requires_grad_() for each in given]
        factors = torch.randn(steps, 2, 3, dtype=dtype)
        results = []
        for function in (by_loop, diagonal_recurrence):
            states = function(*leaves)
            loss = (states * factors).sum()
            results.append([states, *torch.autograd.grad(loss.real if dtype.is_complex else loss, leaves)])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_gradcheck_of_a_decay_that_all_steps_share() -> None:
    torch.manual_seed(0)
    decay = torch.rand(3, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(diagonal_recurrence, (decay, inputs))


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_layer_equals_its_formula(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = DiagonalRecurrence(4, 5, batch_first, dtype=torch.float64)
    inputs, first = torch.randn(11, 2, 4, dtype=torch.float64), torch.randn(1, 2, 5, dtype=torch.float64)
    outputs, last = layer(inputs.transpose(0, 1) if batch_first else inputs, first)
    decay = torch.exp(-torch.exp(layer.log_rate))
    expected = by_loop(decay, layer.inputs(inputs) * torch.sqrt(1 - decay**2), first[0])

    torch.testing.assert_close(outputs.transpose(0, 1) if batch_first else outputs, expected)
    torch.testing.assert_close(last, expected[-1:])
    assert bool(((decay > 0.5) & (decay < 1)).all())


def test_no_step_has_no_state() -> None:
    assert diagonal_recurrence(torch.ones(3), torch.ones(0, 3)).shape == (0, 3)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PenstockError, match="broadcasts"):
        diagonal_recurrence(torch.ones(2, 3), torch.ones(5, 4))
    with pytest.raises(PenstockError, match="first has shape"):
        diagonal_recurrence(torch.ones(4), torch.ones(5, 4), torch.ones(3))
    with pytest.raises(PenstockError, match="above 0"):
        DiagonalRecurrence(2, 3, shortest=5, longest=1)
