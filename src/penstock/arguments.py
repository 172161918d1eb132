"""Checks arguments at the door: a `Rule` says what one may be, and its error has four parts.

The parts are where (the function or class, and the argument), what was expected, what was found, and what to do. A
function or a dataclass states the rules of all its arguments in one table. Numbers of NumPy are taken where those of
Python are, and become numbers of Python: they are compared, printed and saved.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from numbers import Integral, Real
from os import PathLike
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy

from penstock.errors import PenstockError, suggestion

Value = TypeVar("Value", covariant=True)
Other = TypeVar("Other")
Call = TypeVar("Call", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Rule(Generic[Value]):
    """What one argument may be."""

    expected: str
    """The end of "expected ..."."""
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Value]
    """Makes of an accepted value the one that is used."""
    fix: str | Callable[[Any], str] = "give one"
    """What to do, perhaps for the value that was found."""

    def check(self, where: str, value: object, error: type[PenstockError] = PenstockError, within: str = "") -> Value:
        """`value` as it is used; raises `error`, which begins with `where`, if this rule does not accept it. `within`:
        what the value is in.
        """
        if not self.accepts(value):
            raise error(f"{where}: expected {self.expected}, found {text_of(value)}{within}: {self.advice(value)}")
        return self.convert(value)

    def advice(self, value: object) -> str:
        """What to do about `value`."""
        return self.fix if isinstance(self.fix, str) else self.fix(value)

    def but(self, fix: str | Callable[[Any], str], expected: str = "") -> "Rule[Value]":
        """The same rule with other advice, and perhaps other words for what is expected."""
        return replace(self, fix=fix, expected=expected or self.expected)

    def __or__(self, other: "Rule[Other]") -> "Rule[Value | Other]":
        """What one of both accepts. The advice is that of the first."""

        def convert(value: Any) -> Value | Other:
            return self.convert(value) if self.accepts(value) else other.convert(value)

        return Rule(
            f"{self.expected}, or {other.expected}",
            lambda value: self.accepts(value) or other.accepts(value),
            convert,
            self.fix,
        )

    @property
    def optional(self) -> "Rule[Value | None]":
        """Accepts None as well, the default, which leaves the argument out; errors say what else is expected."""
        return replace(self | Rule("None", lambda value: value is None, lambda value: None), expected=self.expected)


@dataclass(frozen=True, slots=True)
class Entries:
    """The rule of an argument with several values: what each of them may be."""

    rule: Rule[Any]

    def check(
        self, where: str, value: object, error: type[PenstockError] = PenstockError, within: str = ""
    ) -> tuple[Any, ...]:
        """The entries of `value` as they are used; raises `error`, which names the first that is not accepted."""
        found = enumerate(entries(where, value, error))
        return tuple(self.rule.check(f"{where}[{index}]", each, error, within) for index, each in found)


FieldRules: TypeAlias = Mapping[str, Rule[Any] | Entries]


def check_arguments(
    where: str, rules: FieldRules, error: type[PenstockError] = PenstockError, /, **arguments: object
) -> dict[str, Any]:
    """The `arguments` of the function `where`, as they are used. Each has one of the `rules`, under its own name.

    Raises `error` for the first that its rule does not accept.
    """
    return {name: rules[name].check(f"{where}({name}=)", value, error) for name, value in arguments.items()}


def check_fields(
    value: object,
    rules: FieldRules,
    error: type[PenstockError] = PenstockError,
    within: str = "",
    *,
    function: str = "",
) -> None:
    """Checks the fields of the dataclass `value`, from its ``__post_init__``, and puts what is used in their place.

    The error names the field, as an argument of `function` if there is one. A file that is read says its own name and
    path before it.
    """
    for name, rule in rules.items():
        found = getattr(value, name)
        used = rule.check(f"{function}({name}=)" if function else name, found, error, within)
        if used is not found:
            object.__setattr__(value, name, used)


def entries(where: str, value: object, error: type[PenstockError] = PenstockError) -> tuple[Any, ...]:
    """The entries of `value`, which may be anything that has several, such as a list or an array, but no text."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        try:
            return tuple(value)
        except TypeError:
            # An array without dimensions says that it has entries.
            pass
    raise error(f"{where}: expected a list or a tuple, found {text_of(value)}: put even a single value into one")


def integer(least: int | None = None, most: int | None = None, unit: str = "") -> Rule[int]:
    """A whole number in a range; True and False are none."""
    what = f"a whole number{f' of {unit}' if unit else ''}{_range(least, most)}"
    return Rule(what, lambda value: _is_whole(value) and _within(value, least, most), int)


def number(
    least: float | None = None,
    *,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    unit: str = "",
) -> Rule[float]:
    """A number in a range, which leaves out NaN, and infinity unless it may be `infinite`."""

    def accepts(value: object) -> bool:
        # Looking for a type in a tuple is far faster than asking an abstract class, and profiles have many numbers.
        if type(value) not in (float, int) and (isinstance(value, bool) or not isinstance(value, Real)):
            return False
        found = _as_number(value)
        return (
            (infinite or math.isfinite(found))
            and _within(found, least, most)
            and (above is None or found > above)
            and (below is None or found < below)
        )

    bounds = f"{'' if above is None else f' above {above}'}{_range(least, most)}"
    bounds += "" if below is None else f"{' and' if bounds else ''} below {below}"
    finite = "" if infinite or most is not None or below is not None else "finite "
    return Rule(f"a {finite}number{f' of {unit}' if unit else ''}{bounds}", accepts, _as_number)


def choice(known: Sequence[str]) -> Rule[str]:
    """One of the names `known`."""
    return Rule(
        f"one of {', '.join(known)}",
        lambda value: isinstance(value, str) and value in known,
        str,
        lambda value: f"{suggestion(str(value), known)}Choose one of them",
    )


def instance(kinds: type | tuple[type, ...], expected: str, fix: str | Callable[[Any], str]) -> Rule[Any]:
    """An object of one of `kinds`."""
    return Rule(expected, lambda value: isinstance(value, kinds), lambda value: value, fix)


def function(takes: Sequence[str], fix: str | Callable[[Any], str], classes: bool = False) -> Rule[Callable[..., Any]]:
    """A function that can be called with positional arguments, which `takes` names.

    `classes`: whether a class may be given, whose constructor is called. What has no signature is accepted.
    """

    def accepts(value: Any) -> bool:
        if not callable(value) or (isinstance(value, type) and not classes):
            return False
        try:
            # A module takes any arguments and hands them to its forward.
            inspect.signature(getattr(value, "forward", value)).bind(*takes)
        except TypeError:
            return False
        except ValueError:
            return True
        return True

    return Rule(f"a function that takes ({', '.join(takes)})", accepts, lambda value: value, fix)


FLAG: Rule[bool] = Rule("True or False", lambda value: isinstance(value, bool | numpy.bool_), bool, "give one of them")
TEXT: Rule[str] = Rule("text", lambda value: isinstance(value, str), str, "give a str")
PATH: Rule[str | PathLike[str]] = Rule(
    "a path",
    lambda value: isinstance(value, str | PathLike) and bool(str(value)) and "\0" not in str(value),
    lambda value: value,
    "give a str or a pathlib.Path that is not empty and has no NUL",
)


def explained(call: Call) -> Call:
    """`call`, whose refusal of a keyword names the nearest that it has, and whose refusal without one says which."""

    @wraps(call)
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except TypeError as error:
            # An error from inside of the call has another frame.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise TypeError(_refusal(call, len(arguments), list(named)) or str(error)) from None

    return cast("Call", called)


def _refusal(call: Callable[..., Any], unnamed: int, named: Sequence[str]) -> str:
    """Why `call` does not take arguments of these names beside `unnamed` ones; empty if they are too many."""
    parameters = inspect.signature(call).parameters
    name, known = call.__qualname__.removesuffix(".__init__"), [each for each in parameters if each != "self"]
    if unknown := [each for each in named if each not in known]:
        near = suggestion(unknown[0], known) or f"It has {', '.join(known)}. "
        return f"{name}({unknown[0]}=): expected one of its arguments, found another name. {near}Rename it"
    given = {*list(parameters)[:unnamed], *named}
    needed = [
        each for each, rule in parameters.items() if rule.default is rule.empty and rule.kind < rule.VAR_POSITIONAL
    ]
    if missing := [each for each in needed if each not in given]:
        return f"{name}: expected {', '.join(needed[needed[0] == 'self' :])}, found no {', '.join(missing)}: give it"
    return ""


def is_count(value: object, least: int) -> bool:
    """Whether `value` is a whole number of at least `least`."""
    return integer(least).accepts(value)


def is_number(value: object) -> bool:
    """Whether `value` is one number, NaN and infinity included."""
    return isinstance(value, Real) and not isinstance(value, bool)


def text_of(value: object) -> str:
    """`value` for an error message, on one line and not too long, with its type if it does not show."""
    if value is None:
        return "nothing"
    try:
        text = " ".join(repr(value).split())
    except Exception:
        # An object may be so broken that it cannot be printed.
        text = object.__repr__(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    kind = type(value).__name__
    plain = isinstance(value, str | bytes | bool | int | float | complex | tuple | list | dict | set | frozenset)
    return text if plain or kind in text else f"{text} of type {kind}"


def _is_whole(value: object) -> bool:
    # Nearly all are plain, and a search makes many thousands of plans.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _as_number(value: Any) -> float:
    if type(value) in (int, float):
        found: float = value
        return found
    return int(value) if isinstance(value, Integral) else float(value)


def _within(value: Any, least: float | None, most: float | None) -> bool:
    return bool((least is None or value >= least) and (most is None or value <= most))


def _range(least: float | None, most: float | None) -> str:
    match least, most:
        case None, None:
            return ""
        case _, None:
            return f", {least} or more"
        case None, _:
            return f", {most} or less"
        case _:
            return f" from {least} to {most}"


SEED: Rule[int] = integer(-(2**63), 2**63 - 1).but("give one such as 0")
"""PyTorch's generators take no other numbers."""
