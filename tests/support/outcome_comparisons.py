"""Compares the outcomes of two trainings on a device: first within a tolerance, then bit for bit.

A GPU may compute one product by several kernels, whose results differ in the last bit. A mistake of the runtime makes
outcomes differ by more than the tolerance; whether they are equal bit for bit also depends on the choice of kernels.
"""

from functools import partial

import torch
from torch import Tensor

from support.training import Outcome

CLOSE = 1e-12
"""More than a difference in the last bit of float64 grows to in a few steps."""
SHAKY = ("linear.bias", "running_mean")
"""Parameters whose gradient is only rounding error, since the next layer subtracts the mean. AdamW divides it by its
own size, so that a difference in the last bit becomes 1e-8 of the weight in a few steps. No output depends on it."""
SHAKY_CLOSE = 1e-6


def assert_close(expected: Outcome, actual: Outcome, tolerance: float = CLOSE) -> None:
    """Asserts that `actual` equals `expected` within `tolerance`."""
    assert len(actual.losses) == len(expected.losses)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=tolerance, atol=tolerance)
    for name, tensor in actual.state.items():
        within = max(SHAKY_CLOSE, tolerance) if name.endswith(SHAKY) else tolerance
        reported = partial("{}: {}".format, name)
        torch.testing.assert_close(tensor.cpu(), expected.state[name].cpu(), rtol=within, atol=within, msg=reported)


def assert_same(expected: Outcome, actual: Outcome) -> None:
    """Asserts that `actual` equals `expected` bit for bit; the message says whether they are at least close."""
    assert_close(expected, actual)
    found = differing(expected, actual)
    assert not found, (
        f"close (within {CLOSE:g}), but not to the bit: {len(found)} of {len(actual.losses)} losses and "
        f"{len(actual.state)} tensors differ, at most by: {', '.join(found)}"
    )


def differing(expected: Outcome, actual: Outcome) -> list[str]:
    """The losses and tensors that differ in a bit, each with the largest difference."""
    steps = enumerate(zip(expected.losses, actual.losses, strict=True))
    losses = [f"loss {step} {abs(one - other):.1e}" for step, (one, other) in steps if one != other]
    pairs = ((name, expected.state[name].cpu(), tensor.cpu()) for name, tensor in actual.state.items())
    return losses + [f"{name} {_distance(one, other):.1e}" for name, one, other in pairs if not torch.equal(one, other)]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def on_host(outcome: Outcome) -> Outcome:
    """`outcome` with its tensors in host memory, which another process can read without sharing device memory."""
    state = {name: tensor.cpu() for name, tensor in outcome.state.items()}
    return Outcome(outcome.losses, state, outcome.evaluated)
