"""``penstock verify``: prove that a plan's schedule keeps its rules."""

import argparse
from dataclasses import asdict

from penstock.commands.command import Command, answer, declare_option, given
from penstock.commands.quantities import parse_count
from penstock.progress import elapsed_line
from penstock.scheduling import verify
from penstock.values import Plan, schedule


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file (YAML)")
    text = "how many steps to prove (default: into the steady state)"
    declare_option(parser, "--minibatches", text, type=parse_count, metavar="N")


def _run(arguments: argparse.Namespace) -> None:
    planned = schedule(Plan.load(arguments.plan))
    with elapsed_line("proving"):
        proved = verify(planned, **given(arguments, "minibatches"))
    answer(arguments, str(proved), asdict(proved))


VERIFY = Command(
    name="verify",
    summary="prove that a plan's schedule keeps its rules",
    description="Proves that a plan's schedule cannot deadlock, reads the weight versions that it promises and leaks "
    "nothing. Exit code 1 if it violates one of these rules.",
    example="penstock verify plan.yaml --minibatches 8",
    declare=_declare,
    run=_run,
)
