"""Layers out of a trace: graphs over the model's own tensors and modules, or a block alone."""

import copy

import torch
from torch import Tensor, nn

from penstock.capturing import capture
from penstock.capturing.export.cutting import TracedLayer
from penstock.capturing.sequential import EagerLayer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        return self.norm(x + self.inner(x)).reshape(rows, 2, 2).transpose(1, 2).flatten(1)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = 2 * block(x)
        return x


def traced() -> tuple[Blocks, list[TracedLayer]]:
    torch.manual_seed(3)
    model = Blocks()
    modules = [layer.module for layer in capture(model, (torch.randn(6, 4),)).layers]
    return model, [module for module in modules if isinstance(module, TracedLayer)]


def test_a_copy_reads_its_own_tensors() -> None:
    _, layers = traced()
    x = torch.randn(6, 4)
    twin = copy.deepcopy(layers[0])
    (before,) = layers[0](x)
    with torch.no_grad():
        for parameter in layers[0].parameters():
            parameter.zero_()

    assert torch.equal(twin(x)[0], before)
    assert not torch.equal(layers[0](x)[0], before)
    assert next(twin.buffers()).data_ptr() != next(layers[0].buffers()).data_ptr()


def test_what_is_registered_later_is_read() -> None:
    """Hooks put other parameters in the place of a layer's, such as DTensors."""
    _, layers = traced()
    x = torch.randn(6, 4)
    (before,) = layers[0](x)
    linear = layers[0].get_submodule("_blocks.0.body.inner.0")
    linear.register_parameter("weight", nn.Parameter(torch.zeros(4, 4)))

    assert not torch.equal(layers[0](x)[0], before)


class Alone(Blocks):
    """Its second block also takes the input. It returns two tensors, and the model returns one of the third block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1], self.blocks[2] = Pair(), Pair()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.blocks[1](self.blocks[0](x), x)
        a, b = self.blocks[2](b, a)
        return b


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) + y, x - y


def test_a_layer_that_only_calls_a_block_is_that_block() -> None:
    torch.manual_seed(3)
    model, x = Alone(), torch.randn(6, 4)
    chain = capture(model, (x,))
    first, second, third = (layer.module for layer in chain.layers)

    assert isinstance(first, EagerLayer)
    assert first.body is model.blocks[0]
    assert isinstance(second, EagerLayer)
    assert second.body is model.blocks[1]
    # It returns one of the two tensors of its block.
    assert isinstance(third, TracedLayer)
    values = {"args[0]": x}
    for layer in chain.layers:
        values.update(zip(layer.outputs, layer.module(*(values[name] for name in layer.inputs)), strict=True))
    assert torch.equal(values[chain.output.values[0]], model(x))
