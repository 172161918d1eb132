"""``penstock completion``: print what makes a shell complete the words of ``penstock``."""

import argparse

from penstock.commands.command import Command, print_json
from penstock.errors import PenstockError


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell to print it for")


def _run(arguments: argparse.Namespace) -> None:
    try:
        import shtab
    except ImportError:
        raise PenstockError(
            "completion: expected the package shtab, which writes the script, found none: pip install 'shtab>=1.9'"
        ) from None
    # `python -m penstock` has no name that a shell could complete.
    arguments.parser.prog = "penstock"
    _complete_files(arguments.parser, shtab.FILE)
    script = shtab.complete(arguments.parser, shell=arguments.shell)
    if arguments.json:
        print_json({"shell": arguments.shell, "script": script})
    else:
        print(script)


def _complete_files(parser: argparse.ArgumentParser, mark: object) -> None:
    """Marks the arguments of `parser` and its commands that are paths."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_files(inner, mark)
        elif action.type is None and action.choices is None and action.metavar not in (None, "NAME", "IMAGE"):
            action.complete = mark  # type: ignore[attr-defined]


COMPLETION = Command(
    name="completion",
    summary="print a script that completes commands in a shell",
    description="Prints a script with which bash, zsh or fish completes commands, options and files. The package shtab "
    "writes it; the shell needs neither that package nor Python when it completes. Print it again after an update.",
    example="penstock completion bash > ~/.local/share/bash-completion/completions/penstock",
    declare=_declare,
    run=_run,
)
