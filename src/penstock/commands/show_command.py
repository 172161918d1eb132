"""``penstock show``: print what is in a file, and draw it."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.commands.command import Command, answer
from penstock.commands.files import declare_cluster, load_profile, read_cluster
from penstock.errors import PenstockError
from penstock.values import Cluster, LayerProfile, Plan, Profile, schedule
from penstock.values.documents import kind_of, read_text, write_text

if TYPE_CHECKING:
    from penstock.timelines import Timeline


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="PLAN|PROFILE|CLUSTER|TRACE", help="a file of Penstock, or PipeDream's graph.txt"
    )
    parser.add_argument("profile", metavar="PROFILE", nargs="?", help="for a plan: predict its timeline with this")
    declare_cluster(parser)
    pictures = parser.add_argument_group("pictures of a plan or a trace")
    pictures.add_argument("--svg", metavar="FILE", help="write the timeline as a picture")
    pictures.add_argument("--html", metavar="FILE", help="write the timeline as a page to zoom and to ask")
    pictures.add_argument("--trace", metavar="FILE", help="write the timeline for ui.perfetto.dev (JSON)")
    pictures.add_argument("--measured", metavar="TRACE", help="draw this timeline below the plan's prediction")
    pictures.add_argument("--map", metavar="FILE", help="write a picture of the plan over the cluster (SVG)")


def _run(arguments: argparse.Namespace) -> None:
    from penstock.commands.descriptions import describe_cluster, describe_profile
    from penstock.timelines import Timeline

    value = _load(arguments.file)
    match value:
        case Plan():
            text = _show_plan(value, arguments)
        case Timeline():
            _refuse(arguments, "a trace", ("profile", "cluster", "bandwidth", "measured", "map"))
            text = _show_timeline(value, None, arguments, Path(arguments.file).name)
        case _:
            kind = type(value).__name__.lower()
            _refuse(arguments, f"a {kind}", ("profile", "cluster", "bandwidth", "measured", "map", *_PICTURES))
            text = describe_profile(value) if isinstance(value, Profile) else describe_cluster(value)
    figures = _figures(value) if isinstance(value, Timeline) else asdict(value)
    answer(arguments, text, figures, *(getattr(arguments, name) for name in (*_PICTURES, "map")))


_PICTURES = ("svg", "html", "trace")


def _load(path: str) -> "Plan | Profile | Cluster | Timeline":
    """What is in the file. Raises `PenstockError` for another file."""
    from penstock.timelines import Timeline

    match kind := kind_of(read_text(path, PenstockError)):
        case "a trace":
            return Timeline.load_trace(path)
        case "a plan":
            return Plan.load(path)
        case "a cluster":
            return Cluster.load(path)
        case _ if kind == "a profile" or Path(path).suffix in (".txt", ".json"):
            return load_profile(path)
        case _:
            raise PenstockError(
                f"{path}: expected a plan, a profile, a cluster or a trace, found {kind or 'another file'}: give one "
                "that Penstock wrote"
            )


def _refuse(arguments: argparse.Namespace, kind: str, names: tuple[str, ...]) -> None:
    """Raises `PenstockError` if one of the options `names` was given: it would have no effect."""
    for name in names:
        if getattr(arguments, name) is not None:
            option = name.upper() if name in ("profile", "cluster") else f"--{name}"
            raise PenstockError(
                f"{arguments.file} is {kind}: expected no {option} with it, found {getattr(arguments, name)}: drop it, "
                "or give a plan"
            )


def _show_plan(plan: Plan, arguments: argparse.Namespace) -> str:
    from penstock.commands.descriptions import describe_plan
    from penstock.rendering import draw_plan
    from penstock.simulating import simulate
    from penstock.timelines import Timeline

    profile = None if arguments.profile is None else load_profile(arguments.profile)
    if profile is None and arguments.measured is not None:
        raise PenstockError(
            f"--measured {arguments.measured}: expected a profile to predict the plan's timeline with, found none: "
            "give PROFILE after the plan, or show the trace alone"
        )
    devices = max(rank for stage in plan.stages for rank in stage.ranks) + 1 if arguments.cluster is None else None
    cluster = read_cluster(arguments.cluster, devices, arguments.bandwidth, arguments.host_bandwidth)
    text, title = describe_plan(plan), str(plan).partition("\n")[0]
    if arguments.map:
        write_text(arguments.map, draw_plan(plan, cluster, profile), PenstockError)
    if profile is None:
        if any(getattr(arguments, name) for name in _PICTURES):
            halves = schedule(plan).guarantees.splits
            equal = "forward, input backward and weight backward" if halves else "forward and backward"
            _show_timeline(_play(plan), None, arguments, f"{title}; {equal} drawn equally long")
        return text
    if plan.microbatch_size is not None:
        profile = profile.scaled(plan.microbatch_size)
    measured = None if arguments.measured is None else Timeline.load_trace(arguments.measured)
    return f"{text}\n\n{_show_timeline(simulate(plan, profile, cluster), measured, arguments, title)}"


def _play(plan: Plan) -> "Timeline":
    """The plan's timeline, without memory, if every forward and every backward of a stage takes one second.

    If the schedule splits backwards, each half takes one second.
    """
    from penstock.simulating import simulate

    played = schedule(plan)
    backward = 2.0 if played.guarantees.splits else 1.0
    times = {"forward_seconds": 1.0, "backward_seconds": backward, "weight_seconds": backward / 2}
    layer = LayerProfile("stage", **times, cut_bytes=0.0, saved_bytes=0.0, parameter_bytes=0.0)
    cluster = Cluster.uniform(played.ranks, float("inf"))
    timeline = simulate(played, Profile((layer,) * played.stages, 1), cluster, split_seconds=0.0)
    return replace(timeline, memory=())


def _show_timeline(timeline: "Timeline", measured: "Timeline | None", arguments: argparse.Namespace, title: str) -> str:
    from penstock.rendering import render
    from penstock.simulating.critical_paths import critical_path

    if arguments.svg or arguments.html:
        critical = critical_path(timeline) + (() if measured is None else critical_path(measured))
        if arguments.svg:
            timeline.save_svg(arguments.svg, measured=measured, critical=critical)
        if arguments.html:
            timeline.save_html(arguments.html, measured=measured, critical=critical, title=title)
    if arguments.trace:
        timeline.save_trace(arguments.trace)
    if measured is None:
        return render(timeline)
    return f"predicted\n{render(timeline)}\n\nmeasured\n{render(measured)}"


def _figures(timeline: "Timeline") -> dict[str, object]:
    numbers = {"seconds": timeline.seconds, "bubble": timeline.bubble, "steady_bubble": timeline.steady_bubble}
    peaks = [memory.peak_bytes for memory in timeline.memory]
    return {**numbers, "ranks": timeline.ranks, "idle_shares": timeline.idle_shares, "peak_bytes": peaks}


SHOW = Command(
    name="show",
    summary="print and draw a plan, a profile, a cluster or a trace",
    description="Prints what is in a file: a plan with the picture of its schedule, a profile, a cluster, or a trace "
    "that Penstock wrote. With PROFILE it also predicts the timeline of a plan; without, pictures of a plan show every "
    "forward and backward (or both its halves) equally long. Links are instant if neither CLUSTER nor --bandwidth is "
    "given.",
    example="penstock show plan.yaml profile.json cluster.yaml --html timeline.html --map plan.svg",
    declare=_declare,
    run=_run,
)
