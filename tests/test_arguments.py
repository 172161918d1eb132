"""Rules of arguments: what they accept, what they make of it, and what their errors say."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.arguments import (
    FLAG,
    Rule,
    check_arguments,
    check_fields,
    choice,
    entries,
    function,
    integer,
    number,
    text_of,
)
from penstock.errors import PenstockError, PlanError


@pytest.mark.parametrize(
    ("rule", "given", "used"),
    [
        (integer(), -3, -3),
        (integer(1), np.uint8(7), 7),
        (integer(0, 7), 7, 7),
        (integer().optional, None, None),
        (number(), np.float32(0.5), 0.5),
        (number(), np.int64(2), 2),
        (number(0, most=1), Fraction(1, 2), 0.5),
        (number(infinite=True), math.inf, math.inf),
        (FLAG, np.True_, True),
        (choice(["a", "b"]) | integer(1), 3, 3),
        (choice(["a", "b"]) | integer(1), "b", "b"),
    ],
)
def test_what_is_accepted_becomes_plain(rule: Rule[Any], given: object, used: object) -> None:
    found = rule.check("f(x=)", given)

    assert (found, type(found)) == (used, type(used))


@pytest.mark.parametrize(
    ("rule", "given", "message"),
    [
        (integer(1), True, "f(x=): expected a whole number, 1 or more, found True: give one"),
        (integer(0, 7), 8, "f(x=): expected a whole number from 0 to 7, found 8: give one"),
        (integer(unit="samples"), 1.0, "f(x=): expected a whole number of samples, found 1.0: give one"),
        (number(above=0), math.nan, "f(x=): expected a finite number above 0, found nan: give one"),
        (number(0, below=1), 1, "f(x=): expected a number, 0 or more and below 1, found 1: give one"),
        (number(), np.bool_(True), "f(x=): expected a finite number, found np.True_ of type bool: give one"),
        (number().but("measure it"), None, "f(x=): expected a finite number, found nothing: measure it"),
        (FLAG, 1, "f(x=): expected True or False, found 1: give one of them"),
        (choice(["ring", "tree"]), "rng", "f(x=): expected one of ring, tree, found 'rng': Did you mean 'ring'? "
         "Choose one of them"),
        (choice(["a"]) | integer(1), 0, "f(x=): expected one of a, or a whole number, 1 or more, found 0: Choose one "
         "of them"),
    ],
)  # fmt: skip
def test_what_is_refused_has_four_parts(rule: Rule[Any], given: object, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        rule.check("f(x=)", given, PlanError)

    assert str(caught.value) == message


class Callable2:
    def __call__(self, a: int, b: int = 0, *, c: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        (lambda a, b: None, True),
        (lambda *all: None, True),
        (lambda a, b, c: None, False),
        (lambda a: None, False),
        (lambda a, b, *, c: None, False),
        (partial(lambda a, b, c: None, c=1), True),
        (Callable2(), True),
        (Callable2, False),
        (max, True),  # it has no signature
        ("f", False),
    ],
)
def test_functions_are_judged_by_what_they_can_be_called_with(given: object, accepted: bool) -> None:
    assert function(("a", "b"), "").accepts(given) is accepted


def test_entries_are_those_of_anything_but_texts() -> None:
    assert entries("x", np.array([1, 2])) == (1, 2)
    assert entries("x", range(2)) == (0, 1)
    for wrong in ("ab", 5, {"a": 1}, np.array(3)):
        with pytest.raises(PenstockError, match="x: expected a list or a tuple, found "):
            entries("x", wrong)


def test_dataclasses_and_functions_state_their_rules_in_one_table() -> None:
    rules = {"size": integer(1), "name": choice(["a"])}

    @dataclass(frozen=True)
    class Value:
        size: int
        name: str

        def __post_init__(self) -> None:
            check_fields(self, rules, PlanError, " in a file")

    three: Any = np.int64(3)
    assert repr(Value(three, "a")).endswith("(size=3, name='a')")
    with pytest.raises(PlanError, match=r"^size: expected a whole number, 1 or more, found 0 in a file: give one$"):
        Value(0, "a")
    assert check_arguments("f", rules, size=three, name="a") == {"size": 3, "name": "a"}
    with pytest.raises(PenstockError, match=r"^f\(name=\): expected one of a, found 'b'"):
        check_arguments("f", rules, name="b", size=2)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_values_are_shown_on_one_short_line() -> None:
    assert text_of("a\nb\x1b[31m") == r"'a\nb\x1b[31m'"
    assert len(text_of("x" * 500)) == 80
    assert text_of(np.zeros((3, 3))).startswith("array([[0., 0., 0.], [0.")
    assert "Unprintable object at" in text_of(Unprintable())
