"""``penstock completion``: print what makes a shell complete the words of ``penstock``."""

import argparse
from typing import Any

from penstock.commands.command import Command, answer
from penstock.errors import PenstockError


class Word(argparse.Action):
    """Stores a word of the command line, which a shell completes as a path if it names a file."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        setattr(namespace, self.dest, values)

    @property
    def complete(self) -> object:
        """What shtab looks for. It has none where the word is no path."""
        if self.type is not None or self.choices is not None or self.metavar in (None, "NAME", "IMAGE"):
            raise AttributeError(self.dest)
        import shtab

        return shtab.FILE


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
    script = shtab.complete(arguments.parser, shell=arguments.shell)
    answer(arguments, script, {"shell": arguments.shell, "script": script})


COMPLETION = Command(
    name="completion",
    summary="print a script that completes commands in a shell",
    description="Prints a script with which bash, zsh or fish completes commands, options and files. The package shtab "
    "writes it; the shell needs neither that package nor Python when it completes. Print it again after an update.",
    example="penstock completion bash > ~/.local/share/bash-completion/completions/penstock",
    declare=_declare,
    run=_run,
)
