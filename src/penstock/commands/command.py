"""A command of ``penstock``: its texts, its arguments and its function.

Laws of this directory:
  1. A command reads its arguments, calls one function of the library, and prints what that returns.
  2. It imports what is more than values when it runs, so that ``penstock --help`` does not wait for torch.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from penstock.errors import visible
from penstock.values import Cluster, Plan, Profile


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
    """Runs the command and prints the result. Raises `PenstockError`."""


def declare_option(parser: argparse.ArgumentParser, name: str, help: str, **form: Any) -> None:
    """Adds an option for which the library has the default: `given` finds it only where it was given."""
    parser.add_argument(name, default=argparse.SUPPRESS, help=help, **form)


def declare_progress(parser: argparse.ArgumentParser) -> None:
    """Adds the option of commands whose progress can be foreseen."""
    text = "a progress line on stderr (default: on a terminal)"
    declare_option(parser, "--progress", text, action=argparse.BooleanOptionalAction)


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options among `names` that were given; for the others the library has defaults."""
    return {name: value for name, value in vars(arguments).items() if name in names}


def deliver(made: Cluster | Plan | Profile, text: str, arguments: argparse.Namespace) -> None:
    """Writes the result of a command to the file of ``--output``, if any, and prints it as `text` or as JSON."""
    if arguments.output:
        made.save(arguments.output)
    answer(arguments, text, asdict(made), arguments.output)


def answer(arguments: argparse.Namespace, text: str, document: object, *written: str | None) -> None:
    """Prints what a command has found: `text` and the names of the files that were `written`, or with ``--json`` the
    `document`.
    """
    if arguments.json:
        print_json(document)
    else:
        show("\n".join([text, *(f"wrote {path}" for path in written if path)]))


def show(text: str) -> None:
    """Prints `text`, whose names may come from files. None of its characters commands the terminal."""
    print(visible(text, lines=True))


def print_json(value: object) -> None:
    """Prints `value` as one JSON document. A number that JSON cannot write, such as infinity, becomes null."""
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
