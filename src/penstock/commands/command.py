"""What a command is: its words, its arguments, and what it does.

Laws of this directory:
  1. A command reads its arguments, calls one function of the library, and prints what that returns.
  2. Its room is imported when it runs, not before: ``penstock --help`` waits for no torch.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.values import Cluster, Plan, Profile

__all__ = ["Command", "deliver", "given", "print_json"]


@dataclass(frozen=True, slots=True)
class Command:
    """One command of ``penstock``."""

    name: str
    summary: str
    """One line, for the list of commands."""
    description: str
    example: str
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds the arguments."""
    run: Callable[[argparse.Namespace], None]
    """Does it and prints the result. Raises `PenstockError`."""


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options `names` that were given; what was not is left to the library's own default."""
    return {name: value for name, value in vars(arguments).items() if name in names}


def deliver(made: "Cluster | Plan | Profile", text: str, arguments: argparse.Namespace) -> None:
    """Writes what a command made to the file of ``--output``, if any, and prints it: `text`, or JSON if asked."""
    if arguments.output:
        made.save(arguments.output)
    if arguments.json:
        print_json(asdict(made))
        return
    print(text)
    if arguments.output:
        print(f"wrote {arguments.output}")


def print_json(value: object) -> None:
    """Prints `value` as one JSON document. A number that JSON does not know, such as infinity, becomes null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
        case _:
            return value
