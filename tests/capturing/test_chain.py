"""The chain of layers itself: cuts, stages, what is written in place, who holds what."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.capturing import Layer, LayerChain, ModelInputs, ModelOutput
from penstock.errors import CaptureError


class Add(nn.Module):
    """Adds a constant to the sum of its arguments; can write its first argument in place."""

    def __init__(self, weight: nn.Parameter, in_place: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.in_place = in_place

    def forward(self, first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        if self.in_place:
            first.mul_(2)
        return (sum(others, first) + self.weight,)


def chain_of(*layers: tuple[tuple[str, ...], str, tuple[str, ...]], returns: tuple[str, ...]) -> LayerChain:
    """A chain from (inputs, output, mutates) of every layer; the model's only input is called x."""
    built = tuple(
        Layer(name, Add(nn.Parameter(torch.ones(2)), bool(mutates)), reads, (name,), mutates=mutates)
        for reads, name, mutates in layers
    )
    _, structure = pytree.tree_flatten((("x",), {}))
    _, returned = pytree.tree_flatten(returns)
    parameters = {f"{layer.name}.weight": next(layer.module.parameters()) for layer in built}
    chain = LayerChain(
        layers=built,
        inputs=ModelInputs(("args[0]",), structure, {}, frozenset({"args[0]"}), 3),
        output=ModelOutput(returned, returns, (None,) * len(returns)),
        parameters=parameters,
        buffers={},
        evaluation=lambda: chain,
    )
    return chain


def run(chain: LayerChain, x: Tensor, *bounds: int) -> Any:
    values: tuple[Tensor, ...] = ()
    for start, stop in pairwise(bounds):
        values = chain.stage(start, stop)([value.clone() for value in values], {"args[0]": x})
    return chain.output.build(values)


def test_what_is_read_later_crosses_and_inputs_never_do() -> None:
    chain = chain_of(
        (("args[0]",), "a", ()),
        (("a",), "b", ()),
        (("b", "args[0]"), "c", ()),
        (("c", "a"), "d", ()),
        returns=("d", "b"),
    )

    assert [chain.cut(index) for index in range(5)] == [(), ("a",), ("a", "b"), ("a", "b", "c"), ("d", "b")]
    assert chain.stage(2, 4).model_inputs == ("args[0]",)
    assert chain.stage(3, 4).model_inputs == ()
    assert chain.readers == {"a.weight": (0,), "b.weight": (1,), "c.weight": (2,), "d.weight": (3,)}


def test_writes_in_place_reach_what_rides_along_and_nothing_else() -> None:
    chain = chain_of(
        (("args[0]",), "a", ("args[0]",)),
        (("a",), "b", ("a",)),
        (("b",), "c", ()),
        (("c", "a"), "d", ()),
        returns=("d",),
    )
    x = torch.full((2,), 3.0)
    (whole,) = run(chain, x, 0, 4)

    # x is 6 inside; a = 7, then 14; b = 15; c = 16; d = 16 + 14 + 1.
    assert whole.tolist() == [31.0, 31.0]
    assert x.tolist() == [3.0, 3.0]
    for cut in (1, 2, 3):
        assert torch.equal(run(chain, x, 0, cut, 4)[0], whole)
    assert torch.equal(run(chain, x, 0, 1, 2, 3, 4)[0], whole)


def test_an_input_may_be_an_output() -> None:
    chain = chain_of((("args[0]",), "a", ()), (("a",), "b", ()), returns=("b", "args[0]"))
    x = torch.zeros(2)

    assert chain.cut(2) == ("b", "args[0]")
    assert run(chain, x, 0, 1, 2)[1] is x


def test_arguments_must_have_the_captured_form() -> None:
    chain = chain_of((("args[0]",), "a", ()), returns=("a",))

    with pytest.raises(CaptureError, match="captured with 1 positional argument"):
        chain.inputs.bind((torch.ones(2), torch.ones(2)), {})
    with pytest.raises(CaptureError, match=r"args\[0\]: expected a tensor, as in sample=, found 3"):
        chain.inputs.bind((3,), {})
    with pytest.raises(CaptureError, match="another structure"):
        chain.inputs.bind(((torch.ones(2),),), {})
