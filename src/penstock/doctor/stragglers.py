"""Stragglers: ranks, stages, links and layers that are slower than expected, from a measured timeline; and a new cut.

The work of a stage is the median forward plus the median backward of one microbatch. It is compared

- with other replicas of the stage, which do the same work;
- with the profile of its layers, if there is one;
- with the other stages otherwise: each is expected to take its share of the estimated work.

A link takes the time from the start of a send to the end of its receive, if the receiver was waiting by then. It is
compared with the other links, whose messages may be smaller, so only large differences count.

Medians over the steps make single late actions, such as those of the first step, count for nothing.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median, median_low

import numpy as np

from penstock.errors import PlanError
from penstock.timelines.timelines import Span, Timeline
from penstock.values.chain_cuts import Counts, Matrix, cut_evenly, least_bottleneck
from penstock.values.plan_stages import Stage
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import seconds_text

_LINK_FACTOR = 3.0
"""A link this many times as slow as the others is named, since messages differ in size."""
_LINK_SHARE = 0.02
"""The share of a step that a link must take at least, with all its messages."""


class SlowPart(StrEnum):
    """What is slow."""

    RANK = "rank"
    STAGE = "stage"
    LINK = "link"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank, stage, link or layer that is slower than expected, with both figures: seconds of one microbatch, of one
    message for a link.
    """

    kind: SlowPart
    name: str
    """``rank 1``, ``stage 2 on rank 1``, ``link 0->1``, ``layer 3 (blocks.3)``."""
    seconds: float
    expected_seconds: float
    compared: str
    """What it was compared with."""

    @property
    def factor(self) -> float:
        """How many times as long as expected it takes."""
        return self.seconds / self.expected_seconds if self.expected_seconds > 0 else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.name}: {seconds_text(self.seconds)}, expected {seconds_text(self.expected_seconds)} "
            f"({self.factor:.2f} times) by {self.compared}"
        )


@dataclass(frozen=True, slots=True)
class Stragglers:
    """What is slower than expected, the worst first. Empty, and false, if nothing is."""

    found: tuple[Straggler, ...]
    work: tuple[tuple[int, int, float], ...]
    """The rank, the stage, and its seconds of one microbatch, as measured."""
    links: tuple[tuple[int, int, float], ...]
    """The two ranks, and the seconds of one message, as measured."""

    def __bool__(self) -> bool:
        return bool(self.found)

    def __str__(self) -> str:
        lines = [str(one) for one in self.found] or ["no stragglers: every rank, stage and link is as fast as expected"]
        if self.work:
            parts = (f"stage {stage} on rank {rank} {seconds_text(seconds)}" for rank, stage, seconds in self.work)
            lines.append(f"a microbatch takes: {', '.join(parts)}")
        if self.links:
            parts = (f"{source}->{target} {seconds_text(seconds)}" for source, target, seconds in self.links)
            lines.append(f"a message takes: {', '.join(parts)}")
        return "\n".join(lines)


def find_stragglers(
    timeline: Timeline, plan: Plan, weights: Sequence[float], *, profile: Profile | None = None, tolerance: float = 1.25
) -> Stragglers:
    """Compares what `timeline` shows of the stages of `plan`.

    `weights`: the estimated work of each layer; only ratios count. With a `profile`, of microbatches of the same size,
    the layers' measured seconds take their place. `tolerance`: how many times as long as expected is slow. Raises
    `PlanError` if a number does not fit the plan.
    """
    _check(plan, weights, profile, tolerance)
    work = _work(timeline)
    expected = _expected(plan, work, weights, profile)
    compared = "the profile of its layers" if profile is not None else "its share of the estimated work"
    found: list[Straggler] = []
    for rank in sorted({rank for rank, _ in work}):
        found += _of_rank(rank, plan, work, expected=expected, compared=compared, tolerance=tolerance)
    links = _links(timeline)
    found += _slow_links(links, timeline)
    found.sort(key=lambda one: -one.factor)
    shown = tuple((rank, stage, seconds) for (rank, stage), seconds in sorted(work.items()))
    message = tuple((source, target, median(seen)) for (source, target), seen in sorted(links.items()))
    return Stragglers(tuple(found), shown, message)


def find_slow_layers(
    names: Sequence[str], measured: Sequence[Sequence[float]], profile: Profile | None, tolerance: float = 1.25
) -> tuple[Straggler, ...]:
    """The layers that some process measured as slower than `profile` says, or without it than other processes did; the
    worst first.

    `measured`: from every process, the seconds of each layer of `names`.
    """
    found = []
    for process, own in enumerate(measured):
        for index, (name, seconds) in enumerate(zip(names, own, strict=True)):
            usual = median_low(other[index] for other in measured)
            if profile is not None:
                usual = profile.layers[index].seconds
            compared = "its profile" if profile is not None else "the other processes"
            text = f"layer {index} ({name}) in process {process}"
            found.append(Straggler(SlowPart.LAYER, text, seconds, usual, compared))
    slow = [one for one in found if one.seconds > tolerance * one.expected_seconds]
    return tuple(sorted(slow, key=lambda one: -one.factor))


def stage_seconds(timeline: Timeline) -> dict[int, float]:
    """The seconds of one microbatch in every stage that `timeline` shows; of its slowest replica."""
    slowest: dict[int, float] = {}
    for (_, stage), seconds in _work(timeline).items():
        slowest[stage] = max(seconds, slowest.get(stage, 0.0))
    return slowest


def _check(plan: Plan, weights: Sequence[float], profile: Profile | None, tolerance: float) -> None:
    layers = plan.stages[-1].stop
    for name, count in (("weights", len(weights)), ("profile", layers if profile is None else len(profile.layers))):
        if count != layers:
            raise PlanError(
                f"{name}: expected {layers} layers, as the plan has, found {count}: give those of the same model"
            )
    if not 1 < tolerance < float("inf"):
        raise PlanError(f"tolerance: expected a number above 1, found {tolerance!r}: 1.25 is a quarter too slow")


def _work(timeline: Timeline) -> dict[tuple[int, int], float]:
    """By rank and stage: the seconds of one microbatch. The halves of a split backward are added."""
    seen: defaultdict[tuple[int, int], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        if span.kind.startswith(("forward", "backward")):
            seen[span.rank, span.stage][span.kind].append(span.seconds)
    work = {}
    for place, kinds in seen.items():
        medians = {kind: median(seconds) for kind, seconds in kinds.items()}
        # A schedule may split some backwards only; a split one is as much work as a whole one.
        halves = medians.pop("backward input", 0.0) + medians.pop("backward weight", 0.0)
        work[place] = sum(medians.values()) + (0.0 if "backward" in medians else halves)
    return work


def _expected(
    plan: Plan, work: Mapping[tuple[int, int], float], weights: Sequence[float], profile: Profile | None
) -> dict[int, float]:
    """The expected seconds of one microbatch in every stage."""
    layers = [layer.seconds for layer in profile.layers] if profile is not None else list(weights)
    share = {
        index: sum(layers[stage.start : stage.stop]) / (len(stage.ranks) if plan.routing == "split" else 1)
        for index, stage in enumerate(plan.stages)
    }
    if profile is not None:
        return share
    ratios = [seconds / share[stage] for (_, stage), seconds in work.items() if share[stage] > 0]
    scale = median_low(ratios) if ratios else 0.0
    return {stage: scale * size for stage, size in share.items()}


def _of_rank(
    rank: int,
    plan: Plan,
    work: Mapping[tuple[int, int], float],
    *,
    expected: Mapping[int, float],
    compared: str,
    tolerance: float,
) -> list[Straggler]:
    """The straggler that `rank` is, or the slow ones among its stages."""
    own = {stage: seconds for (other, stage), seconds in work.items() if other == rank}
    peers = {stage: [seconds for (_, other), seconds in work.items() if other == stage] for stage in own}
    total = sum(own.values())
    if all(len(seen) > 1 for seen in peers.values()):
        usual = sum(median_low(seen) for seen in peers.values())
        if total > tolerance * usual:
            return [Straggler(SlowPart.RANK, f"rank {rank}", total, usual, "the other replicas of its stages")]
    if total > tolerance * sum(expected[stage] for stage in own) and len(own) > 1:
        slow = [stage for stage, seconds in own.items() if seconds > tolerance * expected[stage]]
        if len(slow) == len(own):
            usual = sum(expected[stage] for stage in own)
            return [Straggler(SlowPart.RANK, f"rank {rank}", total, usual, compared)]
    return [
        Straggler(SlowPart.STAGE, _stage_name(stage, rank, plan), seconds, expected[stage], compared)
        for stage, seconds in sorted(own.items())
        if seconds > tolerance * expected[stage]
    ]


def _stage_name(stage: int, rank: int, plan: Plan) -> str:
    held = plan.stages[stage]
    return f"stage {stage} on rank {rank} (layers [{held.start}, {held.stop}))"


def _links(timeline: Timeline) -> dict[tuple[int, int], list[float]]:
    """By source and target: the seconds of every message that the timeline shows with both ends and a receiver that
    waited for it.
    """
    sends: defaultdict[tuple[int, int, int, str], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind == "send":
            sends[span.stage, span.reference, span.number, span.topic].append(span)
    links: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind != "receive":
            continue
        sent = sends[span.reference, span.stage, span.number, span.topic]
        # Replicas that share a microbatch have several sends of one name; these do not say which rank they are for.
        if len(sent) == 1 and span.start_seconds <= sent[0].start_seconds:
            links[sent[0].rank, span.rank].append(max(0.0, span.stop_seconds - sent[0].start_seconds))
    return dict(links)


def _slow_links(links: Mapping[tuple[int, int], list[float]], timeline: Timeline) -> list[Straggler]:
    medians = {edge: median(seen) for edge, seen in links.items()}
    found = []
    for (source, target), seconds in medians.items():
        others = [other for edge, other in medians.items() if edge != (source, target)]
        if not others or seconds * len(links[source, target]) < _LINK_SHARE * timeline.seconds:
            continue
        usual = median_low(others)
        if seconds > _LINK_FACTOR * usual:
            found.append(Straggler(SlowPart.LINK, f"link {source}->{target}", seconds, usual, "the other links"))
    return found


def recut(plan: Plan, weights: Sequence[float], seconds: Mapping[int, float]) -> Plan:
    """`plan` with the cut whose slowest stage is fastest, replicas taken into account. The ranks stay.

    `weights`: of each layer; only ratios count. `seconds`: of one microbatch in every stage. The plan's `explanation`
    has both figures, and how to apply it. Raises `PlanError` if a number is missing.

    Every layer weighs its weight times the factor by which its stage takes longer. So layers move away from slow
    stages, also where the rank is slow and not the layers. Then the first new cut moves a little too few layers; a
    second one, from a measurement of the first, moves the rest.
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
    # The share of the microbatches that one replica of a stage computes. The seconds of a split one are its own.
    split = plan.routing == "split"
    shares = [1.0 if split else plan.tensor_parallel / len(stage.ranks) for stage in plan.stages]

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
