"""``penstock plan``: cut a model into stages."""

import argparse

from penstock.commands.command import Command, deliver, given
from penstock.commands.files import declare_cluster, declare_wire_share, load_profile, read_cluster
from penstock.commands.quantities import parse_count
from penstock.scheduling.known_schedules import names_of
from penstock.scheduling.placements import StageLayout

__all__ = ["PLAN"]

_OPTIONS = (
    "planner",
    "schedule",
    "microbatches",
    "batch_size",
    "stages",
    "stages_per_rank",
    "allreduce",
    "optimizer_copies",
    "straight",
    "synchronous",
    "vertical_sync",
    "recompute",
    "shared_nic",
    "whole_backwards",
)


def _declare(parser: argparse.ArgumentParser) -> None:
    looping = names_of(lambda each: each.layout is StageLayout.ROUND_ROBIN)
    folded = names_of(lambda each: each.layout is StageLayout.V_SHAPE)
    syncing = names_of(lambda each: each.has_vertical_sync)
    parser.add_argument("profile", metavar="PROFILE", help="a profile file (JSON), or PipeDream's graph.txt")
    declare_wire_share(parser)
    declare_cluster(parser, devices=True)
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file (YAML)")
    for name, kind, metavar, text in (
        ("--planner", str, "NAME", "the method that places the layers"),
        ("--schedule", str, "NAME", names_of(lambda each: True, " or ")),
        ("--microbatches", parse_count, "M", "in one minibatch, over all replicas"),
        ("--batch-size", parse_count, "SAMPLES", "in one minibatch, instead of --microbatches"),
        ("--stages", parse_count, "P", "exactly this many stages, on all ranks together; they may have replicas"),
        ("--stages-per-rank", parse_count, "V", f"with the schedule {looping}; 2 with {folded}"),
        ("--allreduce", str, "MODEL", "what replicas' gradients cost: ring, or shared as in the paper"),
        ("--optimizer-copies", float, "X", "optimizer state in units of the weights: 2 for Adam"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)
    for name, text in (
        ("--straight", "one device per stage, no replicas"),
        ("--shared-nic", "the devices of a server share one link to each other server"),
        ("--synchronous", "only schedules that train as one device does"),
        ("--whole-backwards", "only schedules that do not split backwards"),
        ("--vertical-sync", f"with the schedule {syncing}: one weight version for a microbatch in all stages"),
    ):
        parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
    parser.add_argument(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="run forwards again instead of keeping activations",
    )


def _run(arguments: argparse.Namespace) -> None:
    from penstock.planning import plan

    cluster = read_cluster(arguments.cluster, arguments.devices, arguments.bandwidth, arguments.memory)
    made = plan(load_profile(arguments.profile, arguments.wire_share), cluster, **given(arguments, *_OPTIONS))
    text = f"{made.explain()}\n{_next_steps(arguments)}"
    if arguments.cluster is None and arguments.bandwidth is None and cluster.devices > 1:
        text = f"No bandwidth was given, so links take no time: give --bandwidth, such as 10Gbps.\n{text}"
    deliver(made, text, arguments)


def _next_steps(arguments: argparse.Namespace) -> str:
    """What to do with the plan."""
    if arguments.output is None:
        return "Keep it with -o plan.yaml; train with penstock.Pipeline(..., plan=penstock.Plan.load('plan.yaml'))."
    return f"Train with penstock.Pipeline(..., plan=penstock.Plan.load({arguments.output!r}))."


PLAN = Command(
    name="plan",
    summary="find the fastest plan",
    description="Places the layers of a profile on the devices of a cluster so that training is fastest, and says why. "
    "What is not fixed by an option is tried.",
    example="penstock plan profile.json --devices 4 --bandwidth 10Gbps --microbatches 8 -o plan.yaml",
    declare=_declare,
    run=_run,
)
