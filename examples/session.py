"""The code that the two training examples share: options, processes, the plan, and printing.

A training script of your own needs little of this: `penstock.Pipeline` alone takes `stages=` or a plan. The examples
show each step separately: profile, plan, schedule, picture, prediction, measurement.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

import penstock
from penstock.values import SCHEDULES

__all__ = ["Options", "build", "compare", "join_processes", "option_parser", "read_options", "say"]

BANDWIDTH = 2e9
"""Approximate bytes per second between two processes of one machine."""
TIMED_MINIBATCHES = 8
"""The number of minibatches over which the predicted and the measured bubble are taken."""

Options = argparse.Namespace


def option_parser(description: str) -> argparse.ArgumentParser:
    """The options that every example takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, help="a YAML file with options by name; the command line comes first")
    parser.add_argument("--schedule", metavar="NAME", default="1f1b-flush", help=", ".join(SCHEDULES))
    parser.add_argument(
        "--vertical-sync", action="store_true", help="one weight version at all stages (pipedream only)"
    )
    parser.add_argument("--stages", type=int, help="all stages (one for each process; interleaved and zb-v: two)")
    parser.add_argument("--microbatches", type=int, default=4, help="pieces that a minibatch is cut into")
    parser.add_argument("--plan", type=Path, help="a plan's file to use as it is, instead of making a plan")
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a minibatch")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=100, help="minibatches to train on")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def read_options(parser: argparse.ArgumentParser) -> Options:
    """The options from the command line, else from the file of ``--config``, else their defaults."""
    config = parser.parse_args().config
    if config is not None:
        values = yaml.safe_load(config.read_text()) or {}
        known = {action.dest for action in parser._actions}
        if unknown := set(values) - known:
            parser.error(f"{config} names the unknown option(s) {sorted(unknown)}; known are {sorted(known)}")
        parser.set_defaults(**values)
    options = parser.parse_args()
    if options.batch_size % options.microbatches:
        parser.error(f"{options.batch_size} samples cannot be cut into {options.microbatches} microbatches of one size")
    return options


def join_processes() -> None:
    """Joins the processes that torchrun started; does nothing without torchrun."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")


def say(text: str) -> None:
    """Prints `text` on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def build(
    model: nn.Module, sample: tuple[Tensor, ...], loss_fn: Callable[[Tensor, Tensor], Tensor], options: Options
) -> tuple[penstock.Pipeline, penstock.Timeline]:
    """A pipeline for `model` and its predicted timeline. `sample` is the inputs of one microbatch."""
    profile, plan = choose_plan(model, sample, options)
    cluster = penstock.Cluster.uniform(plan.ranks, BANDWIDTH)
    expected = penstock.simulate(plan, profile, cluster, minibatches=TIMED_MINIBATCHES)
    say(profile_table(profile))
    say(plan_table(plan, profile))
    say(penstock.render(penstock.schedule(plan)))
    pipe = penstock.Pipeline(
        model,
        sample=sample,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=options.learning_rate),
        plan=plan,
    )
    return pipe, expected


def choose_plan(
    model: nn.Module, sample: tuple[Tensor, ...], options: Options
) -> tuple[penstock.Profile, penstock.Plan]:
    """Rank 0's profile and plan, on every rank: measurements differ, and all ranks must use one plan."""
    found: list[tuple[penstock.Profile, penstock.Plan] | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        profile = penstock.profile(model, sample)
        found = [(profile, make_plan(profile, options))]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    (chosen,) = found
    assert chosen is not None
    return chosen


def make_plan(profile: penstock.Profile, options: Options) -> penstock.Plan:
    """The plan of ``--plan``, or the best straight pipeline for `profile`; equal stages if a rank has two."""
    if options.plan is not None:
        return penstock.Plan.load(options.plan)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if options.schedule in ("interleaved", "zb-v"):
        stages = options.stages or 2 * processes
        return penstock.Plan.uniform(
            len(profile.layers),
            stages,
            schedule=options.schedule,
            microbatches=options.microbatches,
            stages_per_rank=2 if processes == 1 else stages // processes,
        )
    stages = options.stages or processes
    return penstock.plan(
        profile,
        penstock.Cluster.uniform(stages, BANDWIDTH),
        stages=stages,
        schedule=options.schedule,
        microbatches=options.microbatches,
        vertical_sync=options.vertical_sync,
        straight=True,
    )


def profile_table(profile: penstock.Profile) -> str:
    """One line per layer: milliseconds and kilobytes of one microbatch."""
    width = max(len(layer.name) for layer in profile.layers)
    lines = [f"{'layer':{width}}  forward ms  backward ms  crosses cut kB  saved kB  weights kB"]
    for layer in profile.layers:
        lines.append(
            f"{layer.name:{width}}  {layer.forward_seconds * 1e3:10.2f}  {layer.backward_seconds * 1e3:11.2f}"
            f"  {layer.cut_bytes / 1e3:14.0f}  {layer.saved_bytes / 1e3:8.0f}  {layer.parameter_bytes / 1e3:10.0f}"
        )
    return "\n".join(lines)


def plan_table(plan: penstock.Plan, profile: penstock.Profile) -> str:
    """One line per stage: its rank and its layers."""
    lines = [f"plan: {plan.schedule}, {len(plan.stages)} stages, {plan.microbatches} microbatches"]
    for index, stage in enumerate(plan.stages):
        names = [layer.name for layer in profile.layers[stage.start : stage.stop]]
        held = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"  stage {index} on rank {stage.ranks[0]}: {held}")
    return "\n".join(lines)


def compare(pipe: penstock.Pipeline, expected: penstock.Timeline) -> None:
    """Prints the predicted and the measured bubble of the last minibatches. Every rank must call it, before a drain."""
    measured = pipe.timeline(minibatches=TIMED_MINIBATCHES)
    if pipe.schedule.flushes:
        predicted_bubble, measured_bubble = expected.bubble, measured.bubble
    else:
        # The minibatches before and after these keep the pipe full.
        predicted_bubble, measured_bubble = expected.steady_bubble, measured.steady_bubble
    alone = "" if dist.is_initialized() else ", where the ranks took turns in one process"
    say(f"bubble (idle share of wall time): predicted {predicted_bubble:.1%}, measured {measured_bubble:.1%}{alone}")
