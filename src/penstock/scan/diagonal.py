"""A recurrence whose steps do not mix its values, ``h[t] = a[t] h[t - 1] + x[t]``, forward and backward by scan.

The Jacobian of a step is diagonal, so a scan multiplies element by element and does no more arithmetic than a loop, but
about twice. State-space layers and gated linear units have such recurrences.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.arguments import check_arguments
from penstock.errors import PenstockError
from penstock.scan.scaled import TENSOR


def diagonal_recurrence(decay: Tensor, inputs: Tensor, first: Tensor | None = None) -> Tensor:
    """The states ``h[t] = decay[t] * h[t - 1] + inputs[t]`` of all steps, in about ``2 log2(T)`` operations.

    Args:
        decay: (T, ...) of floating point or complex numbers, or a shape that broadcasts to that of `inputs`.
        inputs: (T, ...).
        first: ``h`` before the first step, of the shape of a step; zeros by default.

    Returns:
        (T, ...), the state after every step. Gradients reach all three arguments; they are scanned as well.

    Raises:
        PenstockError: `decay` does not broadcast to `inputs`, or `first` is not a step of it.
    """
    rules = {"decay": TENSOR, "inputs": TENSOR, "first": TENSOR.optional}
    check_arguments("diagonal_recurrence", rules, decay=decay, inputs=inputs, first=first)
    try:
        decays = decay.expand_as(inputs)
    except RuntimeError as error:
        raise PenstockError(
            f"diagonal_recurrence: decay has shape {tuple(decay.shape)} and inputs {tuple(inputs.shape)}: expected the "
            "same shape, steps first, or one that broadcasts to it"
        ) from error
    if first is None:
        first = inputs.new_zeros(inputs.shape[1:])
    if first.shape != inputs.shape[1:]:
        raise PenstockError(
            f"diagonal_recurrence: first has shape {tuple(first.shape)}: expected {tuple(inputs.shape[1:])}, that of a "
            "step of inputs"
        )
    found: Tensor = _Recurrence.apply(decays, inputs, first)  # type: ignore[no-untyped-call]
    return found


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor, inputs: Tensor, first: Tensor) -> Tensor:
        if not len(inputs):
            states = inputs.clone()
        else:
            states = _scan(decay, torch.cat([(inputs[:1] + decay[:1] * first), inputs[1:]]))
        ctx.save_for_backward(decay, states, first)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, states, first = ctx.saved_tensors
        if not len(states):
            return torch.zeros_like(decay), gradient, torch.zeros_like(first)
        decay = decay.conj()
        # From the last step to the first: g[t] = gradient[t] + decay[t + 1] g[t + 1].
        of_states = _scan(decay.roll(-1, 0).flip(0), gradient.flip(0)).flip(0)
        before = torch.cat([first.unsqueeze(0), states[:-1]])
        return of_states * before.conj(), of_states, decay[0] * of_states[0]


def _scan(decay: Tensor, inputs: Tensor) -> Tensor:
    """The states from a state of zeros; the decay of the first step is not used."""
    steps = len(inputs)
    if steps == 1:
        return inputs.clone()
    # Two steps are one: h[2 k + 1] = (a[2 k + 1] a[2 k]) h[2 k - 1] + (a[2 k + 1] x[2 k] + x[2 k + 1]).
    even = steps - steps % 2
    odd = _scan(decay[1:even:2] * decay[0:even:2], torch.addcmul(inputs[1:even:2], decay[1:even:2], inputs[0:even:2]))
    states = torch.empty_like(inputs)
    states[1:even:2] = odd
    states[0] = inputs[0]
    rest = len(inputs[2::2])
    states[2::2] = torch.addcmul(inputs[2::2], decay[2::2], odd[:rest])
    return states


class DiagonalRecurrence(nn.Module):
    """A layer of independent linear recurrences, as in state-space models, with the call of `torch.nn.RNN`.

    ``h[t] = a * h[t - 1] + sqrt(1 - a * a) * (W x[t] + b)``, where ``a = exp(-exp(log_rate))`` is between 0 and 1 for
    each hidden value. The factor keeps the size of h that of the inputs (Orvieto and others, ICML 2023, section 3.4).

    Args:
        input_size: I, the values of a step of the inputs.
        hidden_size: H.
        batch_first: inputs and outputs are (B, T, ...) instead of (T, B, ...).
        shortest, longest: the range of the numbers of steps that hidden values remember at first.

    Its call takes inputs (T, B, I) and a first state (1, B, H), zeros by default. It returns outputs (T, B, H) and the
    last state (1, B, H).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        batch_first: bool = False,
        *,
        shortest: float = 2.0,
        longest: float = 1000.0,
        **factory: Any,
    ) -> None:
        super().__init__()
        if not 0 < shortest <= longest:
            raise PenstockError(f"shortest={shortest}, longest={longest}: expected numbers of steps above 0, in order")
        self.batch_first = batch_first
        self.range = shortest, longest
        self.inputs = nn.Linear(input_size, hidden_size, **factory)
        self.log_rate = nn.Parameter(torch.empty(hidden_size, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws what each hidden value remembers, evenly on a logarithmic scale."""
        shortest, longest = self.range
        nn.init.uniform_(self.log_rate, -math.log(longest), -math.log(shortest))
        self.inputs.reset_parameters()

    def forward(self, inputs: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs of all steps, and the last state."""
        rate = torch.exp(self.log_rate)
        decay = torch.exp(-rate)
        # 1 - a * a without cancellation.
        driven = self.inputs(inputs) * torch.sqrt(-torch.expm1(-2 * rate))
        steps = driven.transpose(0, 1) if self.batch_first else driven
        states = diagonal_recurrence(decay, steps, None if first is None else first.squeeze(0))
        return (states.transpose(0, 1) if self.batch_first else states), states[-1:]
