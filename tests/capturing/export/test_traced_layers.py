"""Layers out of a trace run other Python than their graphs say, with the same operators on the same tensors."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.capturing import capture
from penstock.capturing.export.traced_layers import FUNCTIONS, TracedLayer

aten = torch.ops.aten


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-1.5, 2.0, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def statistics(channels: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64)


UNARY = ("relu", "tanh", "sigmoid", "neg", "exp", "sin", "cos", "gelu", "silu", "t", "contiguous", "clone", "relu_")
ARGUMENTS: dict[Any, tuple[Any, ...]] = {getattr(aten, name).default: (numbers(4, 6),) for name in UNARY} | {
    aten.sqrt.default: (numbers(4, 6).abs() + 1,),
    aten.rsqrt.default: (numbers(4, 6).abs() + 1,),
    aten.add.Tensor: (numbers(4, 6), 2.5),
    aten.add_.Tensor: (numbers(4, 6), numbers(6)),
    aten.sub.Tensor: (numbers(4, 6), numbers(6)),
    aten.mul.Tensor: (numbers(4, 6), numbers(4, 1)),
    aten.div.Tensor: (numbers(4, 6), 3),
    aten.pow.Tensor_Scalar: (numbers(4, 6), 3),
    aten.where.self: (numbers(4, 6) > 0, numbers(4, 6), numbers(4, 1)),
    aten.cat.default: ([numbers(4, 6), numbers(4, 2)], -1),
    aten.stack.default: ([numbers(4, 6), numbers(4, 6)], 1),
    aten.mean.dim: (numbers(4, 6), [-1], True),
    aten.softmax.int: (numbers(4, 6), -1),
    aten.log_softmax.int: (numbers(4, 6), -1),
    aten.transpose.int: (numbers(4, 6), 0, 1),
    aten.unbind.int: (numbers(4, 6), 1),
    aten.select.int: (numbers(4, 6), 1, -2),
    aten.squeeze.dim: (numbers(4, 1), 1),
    aten.unsqueeze.default: (numbers(4, 6), 1),
    aten.flatten.using_ints: (numbers(4, 2, 3), 1),
    aten.masked_fill.Scalar: (numbers(4, 6), numbers(4, 6) > 0, float("-inf")),
    aten.sym_size.int: (numbers(4, 6), 1),
    aten.view.default: (numbers(4, 6), [2, -1]),
    aten.reshape.default: (numbers(4, 6).t(), [-1]),
    aten.expand.default: (numbers(4, 1), [-1, 5]),
    aten.permute.default: (numbers(4, 2, 3), [2, 0, 1]),
    aten.chunk.default: (numbers(4, 6), 4, -1),
    aten.split_with_sizes.default: (numbers(4, 6), [1, 5], 1),
    aten.matmul.default: (numbers(4, 6), numbers(2, 6, 3)),
    aten.bmm.default: (numbers(2, 4, 6), numbers(2, 6, 3)),
    aten.linear.default: (numbers(4, 6), numbers(3, 6), numbers(3)),
    aten.layer_norm.default: (numbers(4, 6), [6], numbers(6), numbers(6), 1e-5, False),
    aten.group_norm.default: (numbers(4, 6, 5), 2, numbers(6), numbers(6), 1e-5),
    aten.batch_norm.default: (numbers(4, 6), numbers(6), numbers(6), *statistics(6), True, 0.1, 1e-5, False),
    aten.embedding.default: (numbers(5, 6), torch.tensor([[0, 4], [2, 2]]), 2),
    aten.dropout.default: (numbers(4, 6), 0.5, True),
    aten.conv1d.default: (numbers(2, 3, 8), numbers(4, 3, 3), numbers(4), [2], [1]),
    aten.conv2d.default: (numbers(2, 3, 8, 8), numbers(4, 3, 3, 3), None, [2, 1], [1, 0]),
    aten.max_pool2d.default: (numbers(2, 3, 8, 8), [3, 3], [2, 2], [1, 1]),
    aten.avg_pool2d.default: (numbers(2, 3, 8, 8), [2, 2], [2, 2]),
    aten.adaptive_avg_pool2d.default: (numbers(2, 3, 8, 8), [2, 1]),
    aten.scaled_dot_product_attention.default: (*(numbers(2, 2, 5, 4) for _ in range(3)), None, 0.0, True),
}
"""Of each operator that has a function: what to call it with."""


@pytest.mark.parametrize("called", FUNCTIONS, ids=str)
def test_functions_call_their_operators(called: Any) -> None:
    """The same numbers, made by the same nodes of autograd, and the same gradients."""
    own, other = outcome(called, ARGUMENTS[called]), outcome(FUNCTIONS[called], ARGUMENTS[called])

    assert other[1:] == own[1:]
    assert len(other[0]) == len(own[0]) > 0
    for ours, theirs in zip(other[0], own[0], strict=True):
        assert torch.equal(ours, theirs)


def outcome(called: Any, arguments: tuple[Any, ...]) -> tuple[list[Tensor], list[str], list[Any]]:
    """The results and the gradients and what was written; the nodes of autograd; what is no tensor."""
    leaves: list[Tensor] = []

    def prepared(argument: Any) -> Any:
        if isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
            return [prepared(each) for each in argument]
        if not isinstance(argument, Tensor) or not argument.is_floating_point():
            return argument
        leaves.append(argument.detach().clone())
        is_statistic = called in (aten.batch_norm.default, torch.batch_norm) and len(leaves) > 3
        # In-place operators write no leaf.
        return leaves[-1] if is_statistic else leaves[-1].requires_grad_().clone()

    torch.manual_seed(0)
    found = called(*map(prepared, arguments))
    results = found if isinstance(found, Sequence) else [found]
    tensors = [result for result in results if isinstance(result, Tensor)]
    for result in tensors:
        (result * numbers(*result.shape)).sum().backward(retain_graph=True)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    nodes = [type(result.grad_fn).__name__ for result in tensors]
    return [*tensors, *gradients, *leaves], nodes, [each for each in results if not isinstance(each, Tensor)]


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
            x = block(x)
        return x


def traced() -> tuple[Blocks, list[TracedLayer]]:
    torch.manual_seed(3)
    model = Blocks()
    modules = [layer.module for layer in capture(model, (torch.randn(6, 4),)).layers]
    return model, [module for module in modules if isinstance(module, TracedLayer)]


def test_what_runs_asks_no_operator_for_its_schema() -> None:
    class Glued(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.linear(x, self.weight))

    first = capture(Glued(), (torch.randn(6, 4),)).layers[0].module

    assert isinstance(first, TracedLayer)
    assert "torch.ops.aten.linear.default" in first.code, "the graph keeps the operators of the trace"
    assert "ops" not in type(first).forward.__code__.co_names


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


def test_an_operator_of_the_model_s_own_runs_as_traced() -> None:
    """Those without a function of PyTorch's."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[:, 1:3].cumsum(1)

    torch.manual_seed(3)
    model, x = Sliced(), torch.randn(6, 4)
    (layer,) = capture(model, (x,)).layers

    assert torch.equal(layer.module(x)[0], model(x))
