"""What ranks tell each other, and what a checkpoint keeps, comes back as it was; all else is refused."""

import collections
import json
import math
import os
import pickle
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import CheckpointError, TransportError
from penstock.runtime.files.plain_values import decode, decode_plain, encode, encode_plain

KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS |= st.tuples(KEYS, KEYS)
VALUES = st.recursive(
    KEYS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.sets(KEYS) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


class _Pair(NamedTuple):
    one: int
    other: int


class _Named(StrEnum):
    FIRST = "first"


class _Command:
    """Unpickling it would run a command."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@given(VALUES)
def test_a_plain_value_arrives_as_it_was_sent(value: Any) -> None:
    found = decode_plain(encode_plain(value))

    assert found == value
    # Equality does not tell True from 1, a tuple inside from a list, or -0.0 from 0.0.
    assert repr(_in_order(found)) == repr(_in_order(value))


def _in_order(value: Any) -> Any:
    if isinstance(value, set):
        return sorted(map(repr, value))
    if isinstance(value, dict):
        return [(key, _in_order(part)) for key, part in value.items()]
    return type(value)(map(_in_order, value)) if isinstance(value, list | tuple) else value


def test_numbers_that_are_not_finite_arrive() -> None:
    found = decode_plain(encode_plain((math.nan, math.inf, -math.inf, numpy.float64(0.1))))

    assert math.isnan(found[0])
    assert found[1:] == (math.inf, -math.inf, 0.1)
    assert type(found[3]) is numpy.float64


@pytest.mark.parametrize(
    "value", [_Pair(1, 2), [_Named.FIRST], {"a": object()}, lambda: 0, torch.zeros(1), (numpy.zeros(1),)]
)
def test_another_value_is_refused_by_its_sender(value: Any) -> None:
    with pytest.raises(TransportError, match=r"between ranks.*: expected numbers, texts"):
        encode_plain(value)


def in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def test_a_value_that_contains_itself_is_refused() -> None:
    with pytest.raises(TransportError, match="nested at most 100 deep"):
        encode_plain(in_itself())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\x00",
        b"{",
        pickle.dumps(_Command()),
        b'{"!": ["tuple", 3]}',
        b'{"!": ["list", []]}',
        b'{"!": ["bytes", "xy"]}',
        b'{"!": ["bytes", 3]}',
        b'{"!": ["tuple", [], []]}',
        b'{"!": ["dict", [[1]]]}',
        b'{"!": ["dict", [[[], 1]]]}',
        b'{"!": ["set", [[]]]}',
        b'{"!": ["complex", [1]]}',
        b'{"!": ["device", "nothing"]}',
        b'{"!": ["dtype", "nothing"]}',
        b'{"!": ["number", ["nothing", 1]]}',
        b'{"!": ["number", ["int8", 300]]}',
        b'{"!": ["number", ["O", 1]]}',
        b'{"!": ["tensor", "a"]}',
        b'{"!": ["code", "x"]}',
        b'{"!": {}}',
        b'{"!": []}',
        b'{"!": 3}',
        b"[" * 100_000,
    ],
)
def test_other_bytes_are_refused_by_their_reader(data: bytes) -> None:
    with pytest.raises(TransportError, match="a message between ranks cannot be read"):
        decode_plain(data)


@given(st.binary())
def test_no_bytes_give_another_error(data: bytes) -> None:
    with suppress(TransportError):
        decode_plain(data)


KEPT: list[Any] = [
    float("-inf"),
    "a\ud800\0",
    {"!": ["tuple", [1]]},
    frozenset({"a"}),
    collections.Counter({30: 1, 60: 2}),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    numpy.float32(0.1),
    numpy.bool_(True),
    1 + 2j,
]
"""What is not drawn above."""


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


def test_a_set_is_the_same_bytes_in_every_process() -> None:
    """Python's own order is another one: 8 comes before 1."""
    assert json.loads(encode_plain({8, 1})) == {"!": ["set", [1, 8]]}


def test_tensors_and_arrays_come_back() -> None:
    tensor, array = torch.randn(3, 2), numpy.arange(4, dtype=numpy.uint16).reshape(2, 2)
    found = round_trip({"t": tensor, "a": (array,)})

    assert torch.equal(found["t"], tensor)
    assert found["a"][0].dtype == array.dtype
    assert numpy.array_equal(found["a"][0], array)


class Named(str):
    """A text that is more than a text."""


@pytest.mark.parametrize(
    "value",
    [object(), print, Named("a"), numpy.array([object()]), range(3), in_itself(), torch.nn.Linear(1, 1)],
    ids=type,
)
def test_other_values_are_refused_by_their_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"objects/ema/inner"):
        encode({"inner": [value]}, "objects/ema", lambda tensor, where: where)
