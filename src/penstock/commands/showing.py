"""``penstock show``: print what is in a file."""

import argparse
from dataclasses import asdict
from typing import assert_never

from penstock.commands.command import Command, print_json
from penstock.commands.files import load_any

__all__ = ["SHOW"]


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="PLAN|PROFILE|CLUSTER", help="a file of Penstock, or PipeDream's graph.txt")


def _run(arguments: argparse.Namespace) -> None:
    from penstock.commands.descriptions import describe_cluster, describe_plan, describe_profile
    from penstock.values import Cluster, Plan, Profile

    value = load_any(arguments.file)
    if arguments.json:
        print_json(asdict(value))
        return
    match value:
        case Plan():
            print(describe_plan(value))
        case Profile():
            print(describe_profile(value))
        case Cluster():
            print(describe_cluster(value))
        case _:
            assert_never(value)


SHOW = Command(
    name="show",
    summary="print a plan with its picture, a profile or a cluster",
    description="Prints what is in a file: a plan with the picture of its schedule, a profile, or a cluster.",
    example="penstock show plan.yaml",
    declare=_declare,
    run=_run,
)
