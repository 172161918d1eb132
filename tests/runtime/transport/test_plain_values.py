"""What ranks tell each other arrives as it was sent, and bytes that are no such thing are refused."""

import json
import math
import os
import pickle
from collections import OrderedDict
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TransportError
from penstock.runtime.transport.plain_values import decode_plain, encode_plain

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
    assert type(found[3]) is float


@pytest.mark.parametrize(
    "value", [_Pair(1, 2), [_Named.FIRST], {"a": object()}, OrderedDict(a=1), numpy.int64(1), lambda: 0, 1j]
)
def test_another_value_is_refused_by_its_sender(value: Any) -> None:
    with pytest.raises(TransportError, match="cannot be sent to other ranks: expected None, bool, int"):
        encode_plain(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)

    with pytest.raises(TransportError, match="at most 64 containers"):
        encode_plain(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\x00",
        b"{",
        pickle.dumps(_Command()),
        b'{"tuple": 3}',
        b'{"list": []}',
        b'{"bytes": "xy"}',
        b'{"bytes": 3}',
        b'{"tuple": [], "set": []}',
        b'{"dict": [[1]]}',
        b'{"dict": [[[], 1]]}',
        b'{"set": [[]]}',
        b"{}",
        b"[" * 100_000,
        b"[" * 80 + b"]" * 80,
        json.dumps({"tuple": [{"dict": {"a": 1}}]}).encode(),
    ],
)
def test_other_bytes_are_refused_by_their_reader(data: bytes) -> None:
    with pytest.raises(TransportError, match="a message between ranks cannot be read"):
        decode_plain(data)


@given(st.binary())
def test_no_bytes_give_another_error(data: bytes) -> None:
    with suppress(TransportError):
        decode_plain(data)
