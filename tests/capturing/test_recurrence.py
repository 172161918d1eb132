"""Recurrent models: captured at one length, they run at any, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.capturing import capture
from penstock.capturing.samples import Call
from penstock.errors import CaptureError
from support.chain_execution import assert_equals_model

WIDTH = 4


class Recurrent(nn.Module):
    """Two recurrent layers; the second starts from what the first ended with, and its last state is an output."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first, self.second = kind(WIDTH, WIDTH, **options), kind(WIDTH, WIDTH, **options)
        self.head = nn.Linear(WIDTH * (1 + self.first.bidirectional), 3)
        self.samples_first = self.first.batch_first

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        x = x if self.samples_first else x.transpose(0, 1)
        output, state = self.first(x)
        output, state = self.second(output[..., :WIDTH] + x, state)
        # A reshape of what is no contiguous tensor; BatchNorm and others come with one.
        flat = self.head(output.reshape(-1, output.shape[-1]))
        return flat.view(*output.shape[:2], 3), state


def data(samples: int, length: int) -> Call:
    generator = torch.Generator().manual_seed(samples * length)
    return Call((torch.randn(samples, length, WIDTH, dtype=torch.float64, generator=generator),), {})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"bias": False}),
        (nn.GRU, {"batch_first": True, "bidirectional": True}),
        (nn.GRU, {"num_layers": 2}),
        (nn.RNN, {"batch_first": True}),
        (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    ],
    ids=str,
)
def test_every_length_and_number_of_samples(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, **options).double()
    chain = capture(model, data(3, 5).args)

    assert [layer.name for layer in chain.layers] == ["first", "second", "head"]
    for samples, length in ((3, 5), (5, 9), (1, 2)):
        assert_equals_model(chain, model, data(samples, length))


def test_dropout_between_recurrent_layers_is_random() -> None:
    model = Recurrent(nn.LSTM, num_layers=2, dropout=0.5, batch_first=True).double()
    chain = capture(model, data(3, 5).args)

    assert [layer.random for layer in chain.layers] == [True, True, False]
    assert not any(layer.random for layer in chain.evaluation().layers)


def test_a_recurrence_that_is_no_block_holds_for_the_length_of_the_sample() -> None:
    model = nn.LSTM(WIDTH, WIDTH, batch_first=True).double()
    chain = capture(model, data(3, 5).args)

    assert_equals_model(chain, model, data(4, 5))
    with pytest.raises(CaptureError, match="the capture holds for"):
        assert_equals_model(chain, model, data(3, 4))
