"""A new cut of the layers from the measured seconds of the stages.

Every layer weighs what it was estimated to, or what a profile says, times the factor by which its stage takes longer.
So layers move away from slow stages, also where the rank is slow and not the layers. Then the first new cut moves a
little too few layers; a second one, from a measurement of the first, moves the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.errors import PlanError
from penstock.values.chain_cuts import Counts, Matrix, cut_evenly, least_bottleneck
from penstock.values.plan_stages import Stage
from penstock.values.plans import Plan
from penstock.values.quantities import seconds_text


def recut(plan: Plan, weights: Sequence[float], seconds: Mapping[int, float]) -> Plan:
    """`plan` with the cut whose slowest stage is fastest, replicas taken into account. The ranks stay.

    `weights`: of each layer; only ratios count. `seconds`: of one microbatch in every stage. The plan's `explanation`
    has both figures, and how to apply it. Raises `PlanError` if a number is missing.
    """
    if missing := [stage for stage in range(len(plan.stages)) if not seconds.get(stage, 0.0) > 0]:
        raise PlanError(
            f"replan: expected measured seconds of all {len(plan.stages)} stages, found none of stages {missing}: "
            "train a step before"
        )
    scaled: list[float] = []
    for index, stage in enumerate(plan.stages):
        own = weights[stage.start : stage.stop]
        total = sum(own)
        # Without an estimate the layers of the stage are taken for equal.
        scaled += [seconds[index] * (weight / total if total > 0 else 1 / len(own)) for weight in own]
    before = np.concatenate([[0.0], np.cumsum(scaled)])
    spans = np.where(np.tri(len(before), dtype=bool), np.inf, before[None, :] - before[:, None])
    shares = [_share(plan, stage) for stage in plan.stages]

    def of_stage(stage: int, starts: Counts) -> Matrix:
        return spans[starts] * shares[stage]

    exchange = [np.zeros(len(before))] * (len(plan.stages) - 1)
    cuts = cut_evenly(of_stage, exchange, least_bottleneck(of_stage, exchange))
    stages = tuple(
        Stage(start, stop, old.ranks) for old, (start, stop) in zip(plan.stages, pairwise(cuts), strict=True)
    )
    slowest = max(seconds[index] * shares[index] for index in range(len(shares)))
    faster = max(float(before[new.stop] - before[new.start]) * share for new, share in zip(stages, shares, strict=True))
    words = (
        f"slowest stage: {seconds_text(slowest)} a microbatch as measured, {seconds_text(faster)} expected with layers "
        f"{', '.join(f'[{new.start}, {new.stop})' for new in stages)}. To apply it: "
        "pipe.replan(apply=directory)"
    )
    return replace(plan, stages=stages, predicted=None, planner="replan", explanation=words)


def _share(plan: Plan, stage: Stage) -> float:
    """The share of the microbatches that one replica of `stage` computes. The seconds of a split one are its own."""
    return 1.0 if plan.routing == "split" else plan.tensor_parallel / len(stage.ranks)
