"""The shapes of recurrent operators, without the steps in between.

To find the shape of what an LSTM returns, PyTorch runs it step by step on tensors without content. Tracing then takes a
tenth of a second for every step of the sequence, and fixes the length, although the operator that ends up in the trace
is the LSTM as a whole and takes any length. Its shapes follow from its arguments at once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from penstock.torch_internals.export import traced_by


def _lstm(input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
    hidden, cell = hx
    return _output(input, hidden, params, *options), torch.empty_like(hidden), torch.empty_like(cell)


def _plain(input: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
    return _output(input, hx, params, *options), torch.empty_like(hx)


def _output(
    input: Tensor,
    hidden: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Tensor:
    """(steps, samples, directions * hidden size); with `batch_first` as a view with the samples first."""
    steps, samples = (input.shape[1], input.shape[0]) if batch_first else (input.shape[0], input.shape[1])
    output = input.new_empty(steps, samples, hidden.shape[-1] * (1 + bidirectional))
    # Nothing is computed, but gradients are known to flow.
    output = output + sum(parameter.sum() for parameter in params[:1])
    return output.transpose(0, 1) if batch_first else output


_SHAPES: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.ops.aten.lstm.input: _lstm,
    torch.ops.aten.gru.input: _plain,
    torch.ops.aten.rnn_tanh.input: _plain,
    torch.ops.aten.rnn_relu.input: _plain,
}


def recurrence_in_one_step() -> AbstractContextManager[None]:
    """Lets tracing in this block find the shapes of LSTM, GRU and RNN for a length that stays free."""
    return traced_by(_SHAPES)
