"""``penstock plan``: cut a model into stages."""

import argparse
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

from penstock.commands.command import Command, answer, declare_option, deliver, given
from penstock.commands.files import (
    declare_cluster,
    declare_samples,
    declare_wire_share,
    load_profile,
    load_sweep,
    read_cluster,
)
from penstock.commands.quantities import parse_count, parse_counts
from penstock.errors import PlanError
from penstock.progress import elapsed_line
from penstock.scheduling.placements import StageLayout
from penstock.scheduling.schedule_names import names_of
from penstock.values import Cluster, Profile, Transformer


def _declare(parser: argparse.ArgumentParser) -> None:
    looping = names_of(lambda each: each.layout is StageLayout.ROUND_ROBIN)
    folded = names_of(lambda each: each.layout is StageLayout.V_SHAPE)
    syncing = names_of(lambda each: each.has_vertical_sync)
    stale = names_of(lambda each: not each.flushes, " and ")
    parser.add_argument(
        "profile",
        metavar="PROFILE",
        help="a profile file (JSON), PipeDream's graph.txt, or the shape of a transformer (YAML)",
    )
    declare_wire_share(parser)
    declare_samples(parser)
    declare_cluster(parser, devices=True, memory=True)
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file (YAML)")
    parser.add_argument(
        "--profile",
        dest="profiles",
        action="append",
        metavar="FILE",
        default=[],
        help="of the same model on another kind of device, or at another microbatch size; may be repeated",
    )
    parser.add_argument(
        "--sweep", metavar="FILE", help="compare the clusters in this file (YAML) instead of planning for one"
    )
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="what a step takes with less or more memory, instead of one plan (with -o FILE: FILE.1, FILE.2, ...)",
    )
    parser.add_argument("--svg", metavar="FILE", help="with --frontier: write a picture")
    text = "further sizes to try, scaled from the profile"
    declare_option(parser, "--microbatch-sizes", text, type=parse_counts, metavar="B,B")
    for name, kind, metavar, text in (
        ("--planner", str, "NAME", "the method that places the layers"),
        ("--schedule", str, "NAME", names_of(lambda each: True, " or ")),
        ("--microbatches", parse_count, "M", "in one minibatch, over all replicas"),
        ("--batch-size", parse_count, "SAMPLES", "in one minibatch, instead of --microbatches"),
        ("--stages", parse_count, "P", "exactly this many stages, on all ranks together; they may have replicas"),
        ("--stages-per-rank", parse_count, "V", f"with the schedule {looping}; 2 with {folded}"),
        ("--allreduce", str, "MODEL", "what replicas' gradients cost: ring, or shared as in the paper"),
        ("--optimizer-copies", float, "X", "optimizer state in units of the weights: 2 for Adam"),
        ("--epoch-samples", float, "N", "say what an epoch of N samples costs (a cluster file with prices)"),
        ("--deadline-seconds", float, "S", "the cheapest plan whose epoch takes no longer, instead of the fastest"),
    ):
        declare_option(parser, name, text, type=kind, metavar=metavar)
    for name, text in (
        ("--straight", "one device per stage, no replicas"),
        ("--shared-nic", "the devices of a server share one link to each other server"),
        ("--asynchronous", f"also schedules with stale weights: {stale}"),
        ("--synchronous", "only schedules that train as one device does, also with --planner (else by default)"),
        ("--whole-backwards", "only schedules that do not split backwards"),
        ("--every-device", "only plans that use all devices"),
        ("--state-on-host", "the optimizer's state and older weight versions are on the host"),
        ("--shard-optimizer", "each replica of a stage has a share of the optimizer's state"),
        ("--vertical-sync", f"with the schedule {syncing}: one weight version for a microbatch in all stages"),
    ):
        declare_option(parser, name, text, action="store_true")
    for name, text in (
        ("--recompute", "run forwards again instead of keeping activations"),
        ("--streamed", "weights are on the host while they are not used (else where nothing fits otherwise)"),
    ):
        declare_option(parser, name, text, action=argparse.BooleanOptionalAction)


def _run(arguments: argparse.Namespace) -> None:
    from penstock.planning import plan

    path, share = arguments.profile, arguments.wire_share
    is_transformer = Path(path).suffix in (".yaml", ".yml")
    subject = Transformer.load(path) if is_transformer else load_profile(path, share, arguments.graph_samples)
    others = [load_profile(path, share) for path in arguments.profiles]
    profiles = subject if isinstance(subject, Transformer) else [subject, *others]
    options = given(arguments, *signature(plan).parameters.keys() - {"profile", "cluster"})
    if arguments.sweep is not None:
        _compare(profiles, arguments, options)
        return
    links = arguments.bandwidth, arguments.host_bandwidth
    cluster = read_cluster(arguments.cluster, arguments.devices, *links, arguments.memory)
    if arguments.svg is not None and not arguments.frontier:
        raise PlanError("--svg: expected --frontier with it; draw one plan with penstock show PLAN --map FILE")
    if arguments.frontier:
        _show_frontier(profiles, cluster, arguments, options)
        return
    made = plan(profiles, cluster, **options)
    keep = "" if arguments.output else "Keep it with -o plan.yaml. "
    load = f"penstock.Plan.load({arguments.output or 'plan.yaml'!r})"
    lines = [made.explain(), f"{keep}Train with penstock.Pipeline(..., plan={load})."]
    if arguments.cluster is None and arguments.bandwidth is None and cluster.devices > 1:
        lines.insert(1, "No bandwidth was given, so links take no time: give --bandwidth, such as 10Gbps.")
    deliver(made, "\n".join(lines), arguments)


def _compare(profiles: list[Profile] | Transformer, arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    from penstock.planning import compare_clusters

    if isinstance(profiles, Transformer):
        where = f"--sweep and {arguments.profile}"
        raise PlanError(f"{where}: expected a profile, found a transformer: plan each by itself")
    beside = ("cluster", "devices", "bandwidth", "memory", "output")
    if extra := [name for name in beside if getattr(arguments, name) is not None]:
        raise PlanError(f"--sweep and {', '.join(extra)} were given: expected one of them; drop the other")
    clusters = load_sweep(arguments.sweep)
    with elapsed_line("planning for each cluster"):
        found = compare_clusters(profiles, clusters, **options)
    costs = ((asdict(option), option.cost_per_million_samples) for option in found.options)
    answer(arguments, str(found), [{**option, "cost_per_million_samples": cost} for option, cost in costs])


def _show_frontier(
    profiles: list[Profile] | Transformer, cluster: Cluster, arguments: argparse.Namespace, options: dict[str, Any]
) -> None:
    from penstock.planning import frontier

    if isinstance(profiles, Transformer) or len(profiles) > 1:
        where = f"--frontier and {arguments.profile}"
        raise PlanError(f"{where}: expected one profile; measure the model, and give it alone")
    # What all of its plans are already may be said.
    options = {name: options[name] for name in options if name not in ("synchronous", "straight", "every_device")}
    if extra := [name for name in options if name not in signature(frontier).parameters]:
        raise PlanError(f"--frontier and {', '.join(extra)}: expected one of them at most; drop the others")
    with elapsed_line("finding orders"):
        found = frontier(profiles[0], cluster, **options)
    if arguments.output is not None:
        for number, point in enumerate(found.points, 1):
            point.plan.save(f"{arguments.output}.{number}")
    if arguments.svg is not None:
        found.save_svg(arguments.svg)
    answer(arguments, str(found), [asdict(point) for point in found.points])


PLAN = Command(
    name="plan",
    summary="find the fastest plan",
    description="Places the layers of a profile on the devices of a cluster so that training is fastest, and says why. "
    "What is not fixed by an option is tried.",
    example="penstock plan profile.json --devices 4 --bandwidth 10Gbps --microbatches 8 -o plan.yaml",
    declare=_declare,
    run=_run,
)
