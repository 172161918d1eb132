"""Layers of bitsandbytes and torchao train with the numbers of a plain loop. No job of CI installs these."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.models import Blocks, sgd

WIDTH = 64
"""bitsandbytes packs weights of this width on processors with AVX512-BF16."""


class Adapted(nn.Module):
    """A frozen layer with a trained adapter."""

    def __init__(self, quantized: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.base = quantized(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x)) + torch.tanh(self.base(x))


def of_four_bits(linear: nn.Linear) -> nn.Module:
    made = pytest.importorskip("bitsandbytes").nn.Linear4bit(WIDTH, WIDTH, quant_type="nf4")
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")  # type: ignore[no-any-return]


def of_eight_bits(linear: nn.Linear) -> nn.Module:
    made = pytest.importorskip("bitsandbytes").nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")  # type: ignore[no-any-return]


def of_torchao(configuration: str) -> Callable[[nn.Linear], nn.Module]:
    def quantized(linear: nn.Linear) -> nn.Module:
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(linear, getattr(torchao, configuration)())
        return linear

    return quantized


KINDS = {
    "bitsandbytes NF4": of_four_bits,
    "bitsandbytes int8": of_eight_bits,
    "torchao int8": of_torchao("Int8WeightOnlyConfig"),
    "torchao float8": of_torchao("Float8WeightOnlyConfig"),
    "torchao int8 of both": of_torchao("Int8DynamicActivationInt8WeightConfig"),
}


def setting(kind: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    return Blocks(partial(Adapted, KINDS[kind])), [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]


# After an evaluation, on a processor with AVX512-BF16, weights of NF4 train in no plain loop.
@pytest.mark.parametrize(
    ("kind", "evaluates"),
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS if kind != "bitsandbytes NF4")],
)
def test_quantized_layers_train_as_in_a_loop(kind: str, evaluates: bool) -> None:
    model, batches = setting(kind)
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    expected = []
    for x, target in batches:
        for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            loss = F.mse_loss(model(part), wanted) / 4
            loss.backward()  # type: ignore[no-untyped-call]
            expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            model.eval()
            with torch.no_grad():
                expected.append(F.mse_loss(model(x[:2]), target[:2]).item())
            model.train()
    model, batches = setting(kind)
    found: list[float] = []
    with penstock.Pipeline(model, (batches[0][0][:2],), F.mse_loss, sgd, microbatches=4, stages=2) as pipe:
        for x, target in batches:
            found.append(float(pipe.step(x, target).loss))
            if evaluates:
                found.append(float(pipe.evaluate(x[:2], target[:2]).loss))
    size = 5 if evaluates else 4
    rounds = [expected[start : start + size] for start in range(0, len(expected), size)]
    sums = [[sum(each[:4]), *each[4:]] for each in rounds]
    assert found == [number for each in sums for number in each]
