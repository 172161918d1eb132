"""``penstock fleet``: divide unequal machines among jobs, simulate it, or run it."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.arguments import choice
from penstock.commands.command import Command, answer, show
from penstock.commands.quantities import parse_count
from penstock.errors import PlanError
from penstock.progress import elapsed_line
from penstock.values.documents import write_text

if TYPE_CHECKING:
    from penstock.fleet import FleetFile, FleetRun, Policy, ThroughputTable

_NUMBER, _FILE = {"type": float, "metavar": "S"}, {"metavar": "FILE"}
_OPTIONS: Sequence[tuple[str, str, Any, Mapping[str, Any], str]] = (
    ("simulate run", "--round-seconds", None, _NUMBER, "default: 360 to simulate, 30 to run"),
    ("simulate run", "--html", None, _FILE, "write a page with the run's figures and pictures"),
    ("simulate", "--restart-seconds", 5.0, _NUMBER, "lost by a lease that is new"),
    ("simulate", "--prices", None, _FILE, "prices over time (CSV: seconds,kind,price)"),
    ("simulate", "--seed", 0, {"type": int, "metavar": "N"}, "of the times at which spot devices are lost"),
    ("simulate", "--ideal", False, {"action": "store_true"}, "exact shares at any time, without rounds"),
    ("run", "--directory", None, {"metavar": "DIR"}, "of the run"),
    ("run", "--grace-seconds", 60.0, _NUMBER, "to save and leave (default: 60)"),
    ("run", "--ray", "", {"metavar": "ADDRESS"}, "run on the nodes of this Ray cluster: auto, or HOST:PORT"),
    ("run", "--most-failures", 3, {"type": parse_count, "metavar": "N"}, "in a row (default: 3)"),
)
"""The options that only some actions read: those, the option, its default, its form, and its help."""


def _declare(parser: argparse.ArgumentParser) -> None:
    text = "shares of time; a simulation; real trainings"
    parser.add_argument("action", choices=["allocate", "simulate", "run"], help=text)
    parser.add_argument("fleet", metavar="FLEET", help="a file with kinds of machines and jobs (YAML)")
    parser.add_argument("--policy", metavar="NAME", default="water-filling", help="default: water-filling")
    parser.add_argument("--plans", metavar="DIR", help="write the plan of each job on each kind into this directory")
    groups = {actions: parser.add_argument_group(actions.replace(" ", ", ")) for actions, *_ in _OPTIONS}
    for actions, option, _, form, text in _OPTIONS:
        names = ("-d", option) if option == "--directory" else (option,)
        groups[actions].add_argument(*names, **form, default=argparse.SUPPRESS, help=text)


def _run(arguments: argparse.Namespace) -> None:
    from penstock.fleet import POLICIES, FleetFile

    _settle_options(arguments)
    fleet = FleetFile.load(arguments.fleet)
    policy = POLICIES[choice(list(POLICIES)).check("--policy", arguments.policy, PlanError)]
    with elapsed_line("planning every job"):
        table = fleet.table()
    if arguments.plans:
        Path(arguments.plans).mkdir(parents=True, exist_ok=True)
        for model, row in zip(table.jobs, table.speeds, strict=True):
            for machines, speed in zip(table.machines, row, strict=True):
                if speed.plan is not None:
                    speed.plan.save(Path(arguments.plans) / f"{model.job.name}-{machines.kind.name}.yaml")
    match arguments.action:
        case "allocate":
            with elapsed_line("dividing the machines"):
                found = policy(fleet.problem(table))
            document = {**found.as_document(), "throughputs": table.throughputs()}
            answer(arguments, f"{table.describe()}\n\n{found.explain()}", document)
        case "simulate":
            _simulate(arguments, fleet, policy, table)
        case _:
            _execute(arguments, fleet, policy)


def _settle_options(arguments: argparse.Namespace) -> None:
    """Gives the options that are missing their defaults. `PlanError` for one that the action does not read."""
    for actions, option, default, *_ in _OPTIONS:
        name, expected = option[2:].replace("-", "_"), actions.replace(" ", " or ")
        if name not in vars(arguments):
            setattr(arguments, name, default)
        elif arguments.action not in actions.split():
            raise PlanError(f"{option}: expected the action {expected}, found {arguments.action}: leave it out")


def _simulate(arguments: argparse.Namespace, fleet: "FleetFile", policy: "Policy", table: "ThroughputTable") -> None:
    from penstock.fleet import PriceHistory, simulate_fleet

    with elapsed_line("simulating"):
        run = simulate_fleet(
            fleet.workload(table),
            fleet.kinds,
            policy,
            round_seconds=360.0 if arguments.round_seconds is None else arguments.round_seconds,
            restart_seconds=arguments.restart_seconds,
            entities=fleet.entities,
            prices=PriceHistory.load(arguments.prices) if arguments.prices else None,
            pairs=fleet.shared_speeds(),
            seed=arguments.seed,
            ideal=arguments.ideal,
            record=bool(arguments.html) and not arguments.ideal,
            budget=fleet.budget,
        )
    _print_run(arguments, run)


def _execute(arguments: argparse.Namespace, fleet: "FleetFile", policy: "Policy") -> None:
    from penstock.fleet import FleetExecutor, RayNodes

    if not arguments.directory:
        raise PlanError("--directory: expected a place for what run makes, found none: give one")
    executor = FleetExecutor(
        fleet,
        policy,
        arguments.directory,
        round_seconds=30.0 if arguments.round_seconds is None else arguments.round_seconds,
        grace_seconds=arguments.grace_seconds,
        most_failures=arguments.most_failures,
        report=(lambda line: None) if arguments.json else show,
        nodes=RayNodes(arguments.ray) if arguments.ray else None,
    )
    _print_run(arguments, executor.run())


def _print_run(arguments: argparse.Namespace, run: "FleetRun") -> None:
    from penstock.fleet import run_page

    if arguments.html:
        write_text(arguments.html, run_page(f"{arguments.fleet}, {arguments.policy}", run), PlanError)
    answer(arguments, run.describe(), run.as_document(), arguments.html)


FLEET = Command(
    name="fleet",
    summary="divide unequal machines among jobs",
    description="Finds the throughput of every job on every kind of machine by planning it, and divides the machines "
    "by a policy: prints the shares, simulates the jobs, or runs them on this machine or on the nodes of Ray.",
    example="penstock fleet simulate fleet.yaml --policy finish-time-fairness --html run.html",
    declare=_declare,
    run=_run,
)
