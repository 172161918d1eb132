"""``penstock rehearse``: compare a pipeline with the user's own loop."""

import argparse
from dataclasses import asdict

from penstock.commands.command import Command, answer, declare_option, given, print_json
from penstock.commands.quantities import parse_count
from penstock.errors import RehearsalError
from penstock.progress import elapsed_line


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that returns a dict: model, batches, and the arguments of penstock.Pipeline",
    )
    declare_option(parser, "--steps", "train for N steps (default: 3)", type=parse_count, metavar="N")
    text = "compare with a loop that adds up the gradients of microbatches, not with the whole batch at once"
    declare_option(parser, "--accumulation", text, action="store_true")


def _run(arguments: argparse.Namespace) -> None:
    from penstock.commands.subject_files import load_function
    from penstock.rehearsing import Rehearsal, rehearse

    _, make = load_function(arguments.subject)
    try:
        with elapsed_line("rehearsing"):
            found = rehearse(make, **given(arguments, "steps", "accumulation"))
    except RehearsalError as error:
        if arguments.json and isinstance(error.rehearsal, Rehearsal):
            print_json(asdict(error.rehearsal))
        raise
    answer(arguments, str(found), asdict(found))


REHEARSE = Command(
    name="rehearse",
    summary="compare a pipeline with your own training loop",
    description="Trains copies of a model for a few steps in a plain loop of PyTorch and in a pipeline, and compares "
    "all numbers. Where they differ, it says what differs first, the likely cause and the way out, with exit code 1. "
    "Under torchrun it compares the pipeline of all processes.",
    example="penstock rehearse train_setup.py:make",
    declare=_declare,
    run=_run,
)
