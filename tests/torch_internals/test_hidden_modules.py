"""Hidden tables of modules: what a search finds, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.torch_internals.hidden_modules import HiddenModules, UsedHidden


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.own = nn.Linear(2, 2)


def test_a_search_finds_what_is_not_hidden() -> None:
    model = Outer()
    hidden = HiddenModules([model.block])

    with hidden.hidden():
        assert [name for name, _ in model.named_parameters()] == ["own.weight", "own.bias"]
        assert [name for name, _ in model.named_modules()] == ["", "block", "own"]
        assert list(model.buffers()) == []

    assert len(list(model.parameters())) == 6
    assert all(type(vars(each)["_parameters"]) is dict for each in model.modules())


def test_who_names_a_hidden_tensor_gets_it_where_nothing_is_watched() -> None:
    model = Outer()
    weight = model.block[0].weight
    hidden = HiddenModules([model.block])

    with hidden.hidden():
        assert model.block.get_submodule("0").weight is weight
        with hidden.watched():
            found = model.block.get_submodule("1")  # a module that is named is hidden itself
            with pytest.raises(UsedHidden):
                assert found.running_mean is not None


@pytest.mark.parametrize(
    "look",
    [
        lambda block: list(block.parameters()),
        lambda block: list(block.buffers()),
        lambda block: list(block.children()),
        lambda block: block.state_dict(),
        lambda block: block.zero_grad(),
        lambda block: copy.deepcopy(block),
        lambda block: len(block),
        lambda block: block.get_submodule("0").register_parameter("more", None),
        lambda block: block.get_submodule("0").register_buffer("more", None),
        lambda block: setattr(block.get_submodule("0"), "weight", None),
        lambda block: delattr(block.get_submodule("0"), "bias"),
        lambda block: block.get_submodule("0").bias,
        lambda block: block.get_submodule("0")._parameters.get("bias"),
        lambda block: block.get_submodule("0")._parameters.pop("bias"),
        lambda block: list(block.get_submodule("1")._buffers),
        lambda block: list(block.get_submodule("1")._buffers.values()),
        lambda block: list(block.get_submodule("1")._buffers.keys()),
        lambda block: block.to(torch.float64),
    ],
)
def test_who_looks_is_stopped(look: Callable[[Any], Any]) -> None:
    model = Outer()
    hidden = HiddenModules([model.block])

    with hidden.hidden(), hidden.watched(), pytest.raises(UsedHidden):
        look(model.block)
