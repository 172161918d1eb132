"""`ScanRNN`, `ScanGRU` and `ScanLSTM`: drop-in replacements of PyTorch's recurrences whose backward is a scan.

Forward is PyTorch's own, layer by layer. Backward makes the Jacobians of all steps and scans over them, or goes step by
step without them. Then it computes the gradients of the parameters of all steps at once. Only the order of additions
differs from PyTorch's backward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from penstock.arguments import text_of
from penstock.errors import PenstockError
from penstock.scan.cells import CELLS, Cell, Weights, cell_values
from penstock.scan.estimates import GATES, LayerMethod, estimate, machine_of
from penstock.scan.ranks import gradient_from_later_ranks, receive_state, send_state
from penstock.scan.scans import blelloch, chunked

Choice: TypeAlias = Literal["auto"] | LayerMethod
_CHOICES = ("auto", *get_args(LayerMethod))
_FORWARDS: Mapping[str, Callable[..., Any]] = {
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
    "GRU": torch.gru,
    "LSTM": torch.lstm,
}
States: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Of an LSTM, its hidden values and those of its cell."""
Results: TypeAlias = tuple[Tensor | PackedSequence, States]


@dataclass(frozen=True, slots=True)
class _How:
    """How a layer is computed."""

    mode: str
    method: str
    group: dist.ProcessGroup | None
    """The ranks that time is cut over."""


class _LayerBackward(torch.autograd.Function):
    """One layer in one direction: inputs (T, B, I) and a first state (B, S) make the states (T, B, S) of all steps."""

    @staticmethod
    def forward(ctx: Any, how: "_How", inputs: Tensor, first: Tensor, *weights: Tensor) -> Tensor:
        ctx.how = how
        if how.group is not None:
            first = receive_state(first, how.group)
        states = _run_forward(how.mode, inputs, first, weights)
        if how.group is not None:
            send_state(states[-1], how.group)
        ctx.save_for_backward(inputs, first, states, *weights)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, first, states, *weights = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        own = Weights(*(weight.to(wide) for weight in weights))
        before = _before(first, states).to(wide)
        with torch.autocast(gradient.device.type, enabled=False):
            cell = CELLS[ctx.how.mode](own, inputs.to(wide), before, states.to(wide))
            at_steps, at_first = _gradients_of_states(gradient.to(wide), cell, ctx.how)
            of_inputs, of_hidden = (part.flatten(0, 1) for part in cell.gradients(at_steps))
            found = [
                None,
                (of_inputs @ own.inputs).view_as(inputs) if ctx.needs_input_grad[1] else None,
                at_first,
                of_inputs.T @ inputs.to(wide).flatten(0, 1),
                of_hidden.T @ before[..., : own.hidden.shape[1]].flatten(0, 1),
                of_inputs.sum(0),
                of_hidden.sum(0),
            ][: 3 + len(weights)]
        kinds = [None, inputs, first, *weights]
        return tuple(
            None if part is None or kind is None else part.to(kind.dtype)
            for part, kind in zip(found, kinds, strict=True)
        )


def _run_forward(mode: str, inputs: Tensor, first: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """PyTorch's forward of one layer in one direction: the states (T, B, S)."""
    width = weights[1].shape[1]
    given = [part.unsqueeze(0).contiguous() for part in torch.split(first, width, -1)]
    outputs: Tensor
    outputs, *last = _FORWARDS[mode](
        input=inputs,
        hx=given if mode == "LSTM" else given[0],
        params=weights,
        has_biases=len(weights) > 2,
        num_layers=1,
        dropout=0.0,
        train=False,
        bidirectional=False,
        batch_first=False,
    )
    if mode != "LSTM":
        return outputs
    wide = torch.promote_types(outputs.dtype, torch.float32)
    hidden, cell = (part.to(wide) for part in given)
    with torch.autocast(inputs.device.type, enabled=False):
        own = Weights(*(weight.to(wide) for weight in weights))
        cells = cell_values(own, inputs.to(wide), _before(hidden[0], outputs.to(wide)), cell[0]).to(outputs.dtype)
    # PyTorch's own, to the bit.
    cells[-1] = last[1][0]
    return torch.cat([outputs, cells], -1)


def _before(first: Tensor, states: Tensor) -> Tensor:
    """The states before each step."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _gradients_of_states(gradient: Tensor, cell: Cell, how: _How) -> tuple[Tensor, Tensor]:
    """The whole gradients after every step, and that of the first state. `gradient`: what enters after every step."""
    entering = gradient.flip(0)
    before_each = torch.cat([entering[1:], torch.zeros_like(entering[:1])])
    last = entering[0]
    # Going step by step within one process needs no Jacobians.
    jacobians = None if how.method == "linear" and how.group is None else cell.jacobians().flip(0)
    if jacobians is not None and how.group is not None:
        last = last + gradient_from_later_ranks(last, jacobians, before_each, how.group)
    if jacobians is None or how.method == "linear":
        found = cell.step_by_step(last, before_each)
    elif how.method == "blelloch":
        found = blelloch(last, jacobians, before_each)
    else:
        found = chunked(last, jacobians, before_each, workers=machine_of(gradient.device.type).matrix_workers)
    # The first state of another rank than the first one is that of the rank before.
    own_first = how.group is None or dist.get_rank(how.group) == 0
    return found[:-1].flip(0), found[-1] if own_first else torch.zeros_like(found[-1])


class _Scanning(nn.RNNBase):
    """What `ScanRNN`, `ScanGRU` and `ScanLSTM` share."""

    def __init__(
        self, *args: Any, method: Choice = "auto", group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise PenstockError(
                f"{type(self).__name__}(group={text_of(group)}): expected a torch.distributed.ProcessGroup, such as "
                "torch.distributed.group.WORLD, or None"
            )
        if group is not None and self.bidirectional:
            raise PenstockError(
                f"{type(self).__name__}(group=..., bidirectional=True): expected one direction, since the forward of "
                "each rank waits for that of the one before. Leave out one of them"
            )
        if self.proj_size:
            raise PenstockError(
                f"{type(self).__name__}(proj_size={self.proj_size}): expected 0, since the Jacobian of a projected "
                "state is not known. Use torch.nn.LSTM"
            )
        if method not in _CHOICES:
            raise PenstockError(
                f"{type(self).__name__}(method={method!r}): expected one of {', '.join(map(repr, _CHOICES))}"
            )
        if group is not None and method == "torch":
            raise PenstockError(
                f"{type(self).__name__}(group=..., method='torch'): expected another method, since PyTorch's backward "
                "knows no other ranks. Use 'linear' for steps one after the other"
            )
        self.method = method
        self.group = group

    def forward(self, input: Tensor | PackedSequence, hx: States | None = None) -> Results:
        """The outputs of the last layer at every step, and the last states, as of PyTorch's module."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        batched = input.dim() == 3
        steps = input if batched else input.unsqueeze(0 if self.batch_first else 1)
        steps = steps.transpose(0, 1) if self.batch_first else steps
        if self.chosen_method(steps) == "torch":
            return super().forward(input, hx)  # type: ignore[no-any-return]
        first = self._first(steps, hx, unbatched=not batched)
        given: Any = self._parted(first)
        self.check_forward_args(steps.transpose(0, 1) if self.batch_first else steps, given, None)
        outputs, last = self._run(steps, first, None)
        outputs = outputs.transpose(0, 1) if self.batch_first else outputs
        if not batched:
            outputs, last = outputs.squeeze(0 if self.batch_first else 1), last.squeeze(1)
        return outputs, self._parted(last)

    def _run_packed(self, input: PackedSequence, hx: States | None) -> Results:
        if self.group is not None:
            raise PenstockError(
                f"{type(self).__name__}(group=...): expected a tensor of this rank's steps, found a PackedSequence. "
                "Pad it, and cut all samples at the same steps"
            )
        # Without its indices: the samples stay sorted by length.
        steps, lengths = pad_packed_sequence(PackedSequence(input.data, input.batch_sizes))
        if self.chosen_method(steps) == "torch":
            return super().forward(input, hx)  # type: ignore[no-any-return]
        first = nn.RNNBase.permute_hidden(self, self._first(steps, hx), input.sorted_indices)
        outputs, last = self._run(steps, first, lengths.to(steps.device))
        packed = pack_padded_sequence(outputs, lengths)
        return (
            PackedSequence(packed.data, packed.batch_sizes, input.sorted_indices, input.unsorted_indices),
            self._parted(nn.RNNBase.permute_hidden(self, last, input.unsorted_indices)),
        )

    def _first(self, steps: Tensor, hx: States | None, *, unbatched: bool = False) -> Tensor:
        """The first states (L, B, S) of all layers and directions."""
        if hx is None:
            count, width = self.num_layers * (2 if self.bidirectional else 1), 2 if self.mode == "LSTM" else 1
            return steps.new_zeros(count, steps.shape[1], width * self.hidden_size)
        # Both states of an LSTM must have the same shape.
        first = torch.stack(hx, -2).flatten(-2) if isinstance(hx, tuple) else hx
        return first.unsqueeze(1) if unbatched else first

    def _parted(self, states: Tensor) -> States:
        """The states (..., S) as PyTorch's module has them."""
        return torch.split(states, self.hidden_size, -1) if self.mode == "LSTM" else states  # type: ignore[return-value]

    def _run(self, steps: Tensor, first: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """All layers. `lengths`: of the samples, the longest first; None if all are as long as `steps`."""
        last: list[Tensor] = []
        for layer in range(self.num_layers):
            outputs = []
            for suffix in ("", "_reverse")[: 2 if self.bidirectional else 1]:
                inputs = _reversed(steps, lengths) if suffix else steps
                found = self._run_layer(inputs, first[len(last)], f"l{layer}{suffix}")
                last.append(found[-1] if lengths is None else found[lengths - 1, torch.arange(found.shape[1])])
                hidden = found[..., : self.hidden_size].contiguous() if self.mode == "LSTM" else found
                outputs.append(_reversed(hidden, lengths) if suffix else hidden)
            steps = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                steps = functional.dropout(steps, self.dropout, self.training)
        return steps, torch.stack(last)

    def _run_layer(self, inputs: Tensor, first: Tensor, name: str) -> Tensor:
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if self.bias else 2]
        weights = [getattr(self, f"{kind}_{name}") for kind in kinds]
        found: Tensor = _LayerBackward.apply(  # type: ignore[no-untyped-call]
            _How(self.mode, self.chosen_method(inputs), self.group), inputs, first, *weights
        )
        return found

    def chosen_method(self, inputs: Tensor) -> str:
        """The method of the backward for inputs (T, B, I). `estimate` says why ``"auto"`` chooses it."""
        if self.group is None and not torch.is_grad_enabled():
            return "torch"
        if self.method != "auto":
            return self.method
        steps, batch = inputs.shape[:2]
        found = estimate(steps, batch, self.hidden_size, gates=GATES[self.mode], device=inputs.device.type)
        # Time over ranks is not for PyTorch's backward.
        seconds = {name: each for name, each in found.seconds.items() if self.group is None or name != "torch"}
        return min(seconds, key=seconds.__getitem__)


class ScanRNN(_Scanning, nn.RNN):  # type: ignore[misc]
    """`torch.nn.RNN` with a backward by parallel scan.

    Parameters, their names and initialization, options and call are those of `torch.nn.RNN`: layers, directions,
    ``batch_first``, packed sequences. It takes an option more.

    Args:
        method: ``"blelloch"`` scans in about ``2 log2(T)`` steps. ``"chunked"`` goes through pieces of the sequence
            side by side. ``"linear"`` goes step by step, without Jacobians. All three compute the gradients of the
            parameters of all steps at once. ``"torch"`` is PyTorch's own backward. ``"auto"`` takes what `estimate`
            predicts to be the fastest for the sizes of the call.
        group: a process group over which the time of one sequence is cut. Rank 0 passes its first steps and its first
            state, each other rank the steps that follow. Forward goes from rank to rank; backward is a scan over the
            ranks. Gradients of parameters are those of this rank's steps: sum them over the group. All ranks must run
            forward and backward. It excludes ``bidirectional`` and packed sequences.

    A backward of a scan holds the Jacobians of a layer, ``T * B * H * H`` numbers. Only that of ``"torch"`` can be
    differentiated again.
    """


class ScanGRU(_Scanning, nn.GRU):  # type: ignore[misc]
    """`torch.nn.GRU` with a backward by parallel scan. Its options are those of `ScanRNN`."""


class ScanLSTM(_Scanning, nn.LSTM):  # type: ignore[misc]
    """`torch.nn.LSTM` with a backward by parallel scan. Its options are those of `ScanRNN`; ``proj_size`` is not taken.

    A step passes on 2 H values, the hidden ones and those of the cell, so a scan holds ``4 * T * B * H * H`` numbers.
    """


def _reversed(steps: Tensor, lengths: Tensor | None) -> Tensor:
    """`steps` (T, B, ...) of each sample from its last to its first; what is behind its end stays there."""
    if lengths is None:
        return steps.flip(0)
    places = torch.arange(len(steps), device=steps.device).unsqueeze(1)
    index = torch.where(places < lengths, lengths - 1 - places, places)
    return steps.gather(0, index.unsqueeze(-1).expand_as(steps))
