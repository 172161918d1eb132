"""Values as JSON: what a checkpoint keeps comes back equal and of the same type, and the rest is refused."""

import collections
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.plain_values import decode, encode

KEPT: list[Any] = [
    None,
    True,
    2**80,
    0.1,
    float("-inf"),
    "a\ud800\0",
    b"\0\xff",
    (1, (2.5, "x")),
    {1: "a", None: "b", (1, 2): 3.0},
    {"!": ["tuple", [1]]},
    {1, 2},
    frozenset({"a"}),
    collections.Counter({30: 1, 60: 2}),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    np.float32(0.1),
    np.bool_(True),
    1 + 2j,
    [],
    {},
]


def round_trip(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}

    def keep(tensor: Tensor, where: str) -> str:
        tensors[where] = tensor
        return where

    return decode(json.loads(json.dumps(encode(value, "x", keep), allow_nan=False)), tensors.__getitem__)


@pytest.mark.parametrize("value", KEPT, ids=repr)
def test_values_come_back(value: Any) -> None:
    found = round_trip(value)

    assert found == value
    assert type(found) is type(value)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(round_trip([math.nan])[0])


def test_tensors_and_arrays_come_back() -> None:
    tensor, array = torch.randn(3, 2), np.arange(4, dtype=np.uint16).reshape(2, 2)
    found = round_trip({"t": tensor, "a": (array,)})

    assert torch.equal(found["t"], tensor)
    assert found["a"][0].dtype == array.dtype
    assert np.array_equal(found["a"][0], array)


class Named(str):
    """A text that is more than a text."""


def in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value", [object(), print, Named("a"), np.array([object()]), range(3), in_itself(), torch.nn.Linear(1, 1)], ids=type
)
def test_other_values_are_refused_by_their_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"objects/ema/inner"):
        encode({"inner": [value]}, "objects/ema", lambda tensor, where: where)


@pytest.mark.parametrize("text", ['{"!": ["code", "x"]}', '{"!": 3}', '{"!": ["number", ["O", 1]]}', '{"!": []}'])
def test_what_was_not_encoded_is_no_value(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(json.loads(text), lambda key: key)
