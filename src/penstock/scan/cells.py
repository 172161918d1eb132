"""One step of a recurrence: its transposed Jacobian, and the gradients of its parameters after the scan.

A cell looks at all steps of a layer at once. Shapes: T steps, B samples, I inputs, H hidden values, S values of a state
(H, or 2 H in an LSTM: the hidden ones, then those of its cell). PyTorch's gates and names are used: ``torch.nn.RNN``,
``torch.nn.GRU``, ``torch.nn.LSTM``.

Law of this file: only ``step_by_step`` goes from step to step; the rest is batched over T and B.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.scan.diagonal import diagonal_recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The parameters of a layer in one direction; the biases are None without them."""

    inputs: Tensor
    """(G H, I), for G gates."""
    hidden: Tensor
    """(G H, H)."""
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None


class Cell(Protocol):
    """All steps of one layer, after its forward."""

    def jacobians(self) -> Tensor:
        """Transposed, (T, B, S, S): what a gradient after each step becomes before it."""

    def step_by_step(self, gradient: Tensor, entering: Tensor) -> Tensor:
        """What `penstock.scan.linear` returns for the Jacobians, from the last step to the first, without making them.

        `gradient` (B, S) is that after the last step; `entering` (T, B, S) enters before each step, in the same order.
        """

    def gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients (T, B, G H) of the products with the inputs and of those with the hidden values, for the
        gradient (T, B, S) after each step.
        """


class _Plain:
    """A layer ``h = f(W x + b + U h + c)``, with tanh or ReLU."""

    def __init__(self, weights: Weights, slope: Tensor) -> None:
        self._weights, self._slope = weights, slope

    def jacobians(self) -> Tensor:
        return self._weights.hidden.T * self._slope.unsqueeze(-2)

    def step_by_step(self, gradient: Tensor, entering: Tensor) -> Tensor:
        found = _room(gradient, entering)
        steps = zip(self._slope.flip(0), entering, found[:-1], found[1:], strict=True)
        for slope, given, after, before in steps:
            torch.addmm(given, after * slope, self._weights.hidden, out=before)
        return found

    def gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        found = gradient * self._slope
        return found, found


def _tanh(weights: Weights, inputs: Tensor, before: Tensor, after: Tensor) -> Cell:
    return _Plain(weights, 1 - after * after)


def _relu(weights: Weights, inputs: Tensor, before: Tensor, after: Tensor) -> Cell:
    return _Plain(weights, (after > 0).to(after.dtype))


class _Gated:
    """A layer of gated recurrent units: ``h' = (1 - z) n + z h``, where n reads ``r m`` and m is what U makes of h."""

    def __init__(self, weights: Weights, inputs: Tensor, before: Tensor, after: Tensor) -> None:
        from_inputs = functional.linear(inputs, weights.inputs, weights.input_bias)
        from_hidden = functional.linear(before, weights.hidden, weights.hidden_bias)
        reset, update, new = from_inputs.chunk(3, -1)
        reset_hidden, update_hidden, read = from_hidden.chunk(3, -1)
        reset, update = torch.sigmoid(reset + reset_hidden), torch.sigmoid(update + update_hidden)
        new = torch.tanh(new + reset * read)
        self._weights = weights
        # What a gradient after the step is multiplied with, to be that before each gate.
        self._new = (1 - new * new) * (1 - update)
        self._update = update * (1 - update) * (before - new)
        self._reset = reset * (1 - reset) * read * self._new
        self._read = reset * self._new
        self._kept = update

    def jacobians(self) -> Tensor:
        reset, update, read = self._weights.hidden.chunk(3)
        found = reset.T * self._reset.unsqueeze(-2)
        found += update.T * self._update.unsqueeze(-2)
        found += read.T * self._read.unsqueeze(-2)
        found.diagonal(dim1=-2, dim2=-1).add_(self._kept)
        return found

    def step_by_step(self, gradient: Tensor, entering: Tensor) -> Tensor:
        found = _room(gradient, entering)
        gates = torch.stack([self._reset, self._update, self._read], -2)
        steps = zip(gates.flip(0), self._kept.flip(0), entering, found[:-1], found[1:], strict=True)
        for gate, kept, given, after, before in steps:
            directly = torch.addcmul(given, after, kept)
            torch.addmm(directly, (gate * after.unsqueeze(1)).flatten(1), self._weights.hidden, out=before)
        return found

    def gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        reset, update = gradient * self._reset, gradient * self._update
        return (
            torch.cat([reset, update, gradient * self._new], -1),
            torch.cat([reset, update, gradient * self._read], -1),
        )


class _LongShort:
    """A layer of long short-term memory: ``c' = f c + i n`` and ``h' = o tanh(c')``."""

    def __init__(self, weights: Weights, inputs: Tensor, before: Tensor, after: Tensor) -> None:
        hidden, cell = before.chunk(2, -1)
        enter, forget, new, leave = _long_short_gates(weights, inputs, hidden)
        shown = torch.tanh(after.chunk(2, -1)[1])
        self._weights = weights
        self._kept = forget
        # What the gradient of h' adds to that of c'.
        self._shown = leave * (1 - shown * shown)
        # What these are multiplied with, to be those before each gate: c' has the first three, and h' the last.
        of_enter, of_forget = enter * (1 - enter) * new, forget * (1 - forget) * cell
        of_new, of_leave = enter * (1 - new * new), leave * (1 - leave) * shown
        self._gates = torch.cat([of_enter, of_forget, of_new, of_leave], -1)

    def jacobians(self) -> Tensor:
        width = self._kept.shape[-1]
        parts = zip(self._weights.hidden.chunk(4), self._gates.unsqueeze(-2).chunk(4, -1), strict=True)
        enter, forget, new, leave = (weight.T * gate for weight, gate in parts)
        of_cell = enter + forget + new
        found = of_cell.new_zeros(*self._kept.shape[:-1], 2 * width, 2 * width)
        found[..., :width, :width] = of_cell * self._shown.unsqueeze(-2) + leave
        found[..., :width, width:] = of_cell
        found[..., width:, :width].diagonal(dim1=-2, dim2=-1).copy_(self._kept * self._shown)
        found[..., width:, width:].diagonal(dim1=-2, dim2=-1).copy_(self._kept)
        return found

    def step_by_step(self, gradient: Tensor, entering: Tensor) -> Tensor:
        found = _room(gradient, entering)
        width = self._kept.shape[-1]
        own = (self._gates.flip(0), self._shown.flip(0), self._kept.flip(0))
        for gate, shown, kept, given, after, before in zip(*own, entering, found[:-1], found[1:], strict=True):
            of_gates, of_cell = _before_gates(gate, shown, after)
            torch.addmm(given[:, :width], of_gates, self._weights.hidden, out=before[:, :width])
            torch.addcmul(given[:, width:], of_cell, kept, out=before[:, width:])
        return found

    def gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        found, _ = _before_gates(self._gates, self._shown, gradient)
        return found, found


def _before_gates(gates: Tensor, shown: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients before the gates, and that of the cell, for the `gradient` (..., S) after a step."""
    of_hidden, of_cell = gradient.chunk(2, -1)
    of_cell = torch.addcmul(of_cell, of_hidden, shown)
    return gates * torch.cat([of_cell, of_cell, of_cell, of_hidden], -1), of_cell


def _long_short_gates(weights: Weights, inputs: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    """What enters the cell, what it keeps, what is new, and what leaves it, each (T, B, H)."""
    before = functional.linear(inputs, weights.inputs, weights.input_bias)
    before = before + functional.linear(hidden, weights.hidden, weights.hidden_bias)
    enter, forget, new, leave = before.chunk(4, -1)
    return torch.sigmoid(enter), torch.sigmoid(forget), torch.tanh(new), torch.sigmoid(leave)


def cell_values(weights: Weights, inputs: Tensor, hidden: Tensor, first: Tensor) -> Tensor:
    """The values of an LSTM's cell after each step, (T, B, H), which PyTorch returns for the last step only.

    `hidden`: those before each step, (T, B, H). `first`: the values of the cell before all steps.
    """
    enter, forget, new, _ = _long_short_gates(weights, inputs, hidden)
    return diagonal_recurrence(forget, enter * new, first)


def _room(gradient: Tensor, entering: Tensor) -> Tensor:
    """Memory for the gradients of all steps. `gradient` is at its first place."""
    found = torch.empty(len(entering) + 1, *gradient.shape, dtype=gradient.dtype, device=gradient.device)
    found[0] = gradient
    return found


CELLS: Mapping[str, Callable[[Weights, Tensor, Tensor, Tensor], Cell]] = {
    "RNN_TANH": _tanh,
    "RNN_RELU": _relu,
    "GRU": _Gated,
    "LSTM": _LongShort,
}
"""By the mode of PyTorch's module. Each takes the weights, the inputs (T, B, I), and the states (T, B, S) before and
after each step."""
