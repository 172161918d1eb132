"""Rows of the tables of wrong uses: a call, the class of its error, and what the error says."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from penstock.errors import PenstockError

COUNT = "a whole number, 1 or more"


class Refusal(NamedTuple):
    call: Callable[..., object]
    error: type[PenstockError]
    says: tuple[str, ...]
    """Parts of the message: where, what was expected, what was found, and what to do."""


def refused(name: str, call: Callable[..., object], error: type[PenstockError], *says: str) -> Any:
    """A row, for `pytest.mark.parametrize`."""
    return pytest.param(Refusal(call, error, says), id=name)


def assert_says(error: PenstockError, says: tuple[str, ...]) -> None:
    """The message of `error` is one line with all of `says` in it."""
    assert [part for part in says if part not in str(error)] == [], str(error)
    assert len(str(error).splitlines()) == 1
