"""``penstock simulate``: predict a plan's timeline."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.commands.command import Command, answer, declare_option, given
from penstock.commands.files import declare_cluster, declare_samples, declare_wire_share, load_profile, read_cluster
from penstock.commands.quantities import parse_count
from penstock.progress import elapsed_line
from penstock.values import Plan
from penstock.values.quantities import bytes_text, seconds_text

if TYPE_CHECKING:
    from penstock.simulating import Outcome

_OPTIONS = ("update_seconds_per_byte", "overlap", "overlap_reduce", "allreduce", "shared_nic", "split_seconds")


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file (YAML)")
    parser.add_argument("profile", metavar="PROFILE", help="a profile file (JSON), or PipeDream's graph.txt")
    declare_wire_share(parser)
    declare_samples(parser)
    declare_cluster(parser, devices=True)
    declare_option(parser, "--minibatches", "how many steps", type=parse_count, metavar="N")
    ways = "over links of their own, or all through one medium (default: ring)"
    declare_option(parser, "--allreduce", f"how replicas sum gradients: {ways}", choices=["ring", "shared"])
    for name, text in (
        ("--update-seconds-per-byte", "seconds of an update per byte of a stage's parameters (default: 0)"),
        ("--split-seconds", "extra seconds of a split backward (default: 3e-4)"),
    ):
        declare_option(parser, name, text, type=float, metavar="S")
    for name, text in (
        ("overlap", "ranks do not compute while they send and receive"),
        ("overlap_reduce", "the sum of gradients over replicas waits for the last backward"),
    ):
        declare_option(parser, f"--no-{name.replace('_', '-')}", text, dest=name, action="store_false")
    text = "all ranks of a server share its link to each other server"
    declare_option(parser, "--shared-nic", text, action="store_true")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev (JSON)")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.add_argument("--html", metavar="FILE", help="write a page: hover, memory, critical path")


def _run(arguments: argparse.Namespace) -> None:
    from penstock.rendering import render
    from penstock.simulating import critical_path, evaluate, find_losses, simulate

    plan = Plan.load(arguments.plan)
    profile = load_profile(arguments.profile, arguments.wire_share, arguments.graph_samples)
    devices = arguments.devices
    if arguments.cluster is None and devices is None:
        devices = max(plan.devices, default=plan.ranks - 1) + 1
    cluster = read_cluster(arguments.cluster, devices, arguments.bandwidth, arguments.host_bandwidth)
    options = given(arguments, *_OPTIONS)
    with elapsed_line("simulating"):
        timeline = simulate(plan, profile, cluster, **given(arguments, "minibatches"), **options)
        outcome = evaluate(plan, profile, cluster, **options)
        losses = find_losses(plan, profile, cluster, **options)
    shared = cluster.levels[0][0] if options.get("shared_nic") else 1
    critical = critical_path(timeline, shared) if arguments.svg or arguments.html else ()
    if arguments.trace:
        timeline.save_trace(arguments.trace)
    if arguments.svg:
        timeline.save_svg(arguments.svg, critical=critical)
    if arguments.html:
        title = f"{profile.name or arguments.profile}, {plan.schedule}, predicted"
        timeline.save_html(arguments.html, critical=critical, title=title, notes=[str(losses)])
    busy = [timeline.busy_seconds(rank) for rank in range(timeline.ranks)]
    numbers = {"seconds": timeline.seconds, "bubble": timeline.bubble, "steady_bubble": timeline.steady_bubble}
    more = {"ranks": timeline.ranks, "busy_seconds": busy, "outcome": asdict(outcome), "losses": losses.parts}
    text = f"{render(timeline)}\n{_describe(outcome)}\n{losses}"
    pictures = (arguments.trace, arguments.svg, arguments.html)
    answer(arguments, text, {**numbers, **more}, *pictures)


def _describe(outcome: "Outcome") -> str:
    worst = max(range(len(outcome.peak_bytes)), key=outcome.peak_bytes.__getitem__)
    return (
        f"\na minibatch: {seconds_text(outcome.minibatch_seconds)} in the steady state, "
        f"{outcome.samples_per_second:.4g} samples/s, {outcome.bubble:.1%} idle\n"
        f"limited by: {outcome.limit}\n"
        f"peak memory: {bytes_text(outcome.peak_bytes[worst])} on rank {worst}"
    )


SIMULATE = Command(
    name="simulate",
    summary="predict the timeline of a plan",
    description="Plays a plan through with a profile's times. Links are instant if neither CLUSTER nor --bandwidth "
    "is given.",
    example="penstock simulate plan.yaml profile.json --bandwidth 10Gbps --svg timeline.svg",
    declare=_declare,
    run=_run,
)
