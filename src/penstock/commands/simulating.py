"""``penstock simulate``: predict a plan's timeline."""

import argparse

from penstock.commands.command import Command, given, print_json
from penstock.commands.files import declare_cluster, load_profile, read_cluster
from penstock.commands.quantities import parse_count

__all__ = ["SIMULATE"]


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file (YAML)")
    parser.add_argument("profile", metavar="PROFILE", help="a profile file (JSON), or PipeDream's graph.txt")
    declare_cluster(parser, devices=False)
    parser.add_argument(
        "--minibatches", type=parse_count, metavar="N", default=argparse.SUPPRESS, help="how many steps"
    )
    parser.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev (JSON)")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")


def _run(arguments: argparse.Namespace) -> None:
    from penstock.rendering import render
    from penstock.simulating import simulate
    from penstock.values import Plan

    plan = Plan.load(arguments.plan)
    profile = load_profile(arguments.profile)
    devices = plan.ranks if arguments.cluster is None else None
    cluster = read_cluster(arguments.cluster, devices, arguments.bandwidth)
    timeline = simulate(plan, profile, cluster, **given(arguments, "minibatches"))
    if arguments.trace:
        timeline.save_trace(arguments.trace)
    if arguments.svg:
        timeline.save_svg(arguments.svg)
    if arguments.json:
        busy = [timeline.busy_seconds(rank) for rank in range(timeline.ranks)]
        numbers = {"seconds": timeline.seconds, "bubble": timeline.bubble, "steady_bubble": timeline.steady_bubble}
        print_json({**numbers, "ranks": timeline.ranks, "busy_seconds": busy})
        return
    print(render(timeline))
    for path in (arguments.trace, arguments.svg):
        if path:
            print(f"wrote {path}")


SIMULATE = Command(
    name="simulate",
    summary="predict the timeline of a plan",
    description="Plays a plan through with a profile's times. Links are instant if neither CLUSTER nor --bandwidth "
    "is given.",
    example="penstock simulate plan.yaml profile.json --bandwidth 10Gbps --svg timeline.svg",
    declare=_declare,
    run=_run,
)
