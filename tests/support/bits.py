"""Whether two outcomes of a training on a device are the same: really, and to the bit.

A GPU may compute one product by several kernels, whose results differ in the last bit. So outcomes must first be close,
which a mistake of the runtime is not, and then equal, which also depends on how the kernels were chosen.
"""

from functools import partial

import torch
from torch import Tensor

from support.training import Outcome

__all__ = ["CLOSE", "assert_close", "assert_same", "differing", "on_host"]

CLOSE = 1e-12
"""What a last bit that differs grows to in a few steps of float64, and more."""
SHAKY = ("linear.bias", "running_mean")
"""In layers that take the mean off, the bias before it has a gradient that is nothing but rounding. AdamW divides it by
its own size, so that a last bit that differs is 1e-8 of the weight after a few steps. No output depends on it."""
SHAKY_CLOSE = 1e-6


def assert_close(expected: Outcome, actual: Outcome, tolerance: float = CLOSE) -> None:
    """What `actual` has is that of `expected`, but for rounding: otherwise something is wrong."""
    assert len(actual.losses) == len(expected.losses)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=tolerance, atol=tolerance)
    for name, tensor in actual.state.items():
        within = max(SHAKY_CLOSE, tolerance) if name.endswith(SHAKY) else tolerance
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(tensor.cpu(), expected.state[name].cpu(), rtol=within, atol=within, msg=told)


def assert_same(expected: Outcome, actual: Outcome) -> None:
    """The bits of `actual` are those of `expected`; the message says whether it is at least close."""
    assert_close(expected, actual)
    found = differing(expected, actual)
    assert not found, (
        f"close (within {CLOSE:g}), and not to the bit: {len(found)} of {len(actual.losses)} losses and "
        f"{len(actual.state)} tensors differ. By how much at most: {', '.join(found)}"
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
    """With its tensors in the host's memory: another process would otherwise read the memory of the device of this one,
    for as long as this one keeps it.
    """
    state = {name: tensor.cpu() for name, tensor in outcome.state.items()}
    return Outcome(outcome.losses, state, outcome.evaluated)
