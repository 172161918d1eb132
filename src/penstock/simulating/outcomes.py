"""The outcome of a plan: what planners compare, taken from the simulator without building a timeline.

Steady state. A flushing schedule is played for one minibatch. Of an asynchronous one two runs are played, both long
enough to fill the pipe; what the longer one takes more, per minibatch more, has neither fill nor drain in it. (The
number of minibatches more is a multiple of the period in which unequal replicas meet the same microbatches again.) A
minibatch never takes less than what it occupies any rank, link or all-reduce for: where two of them are nearly equally
slow, runs of this length may not show yet which of them is the slower.

What limits a plan. The wall time of a minibatch falls into three parts, seen from the rank or link that is occupied the
longest (a link as long as there is a message on it in either direction): the time that it is occupied; the time that an
all-reduce takes after the last replica has come to it, so that nothing hides it; and the rest, in which it waits. The
longest part names the limit: that rank's stage, or the link; the all-reduce; and if waiting is the longest, then under
a flush the fill and drain of the pipeline, and else the round trips between the stages. Where two are equal, the one
named first here is taken.
"""

from dataclasses import dataclass, replace
from math import ceil, gcd, inf, lcm
from typing import Unpack

from penstock.scheduling.actions import Action
from penstock.scheduling.definitions import Drain, Step
from penstock.scheduling.schedules import Schedule
from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.costs import plan_costs
from penstock.simulating.loads import Loads, Pair, measure_loads
from penstock.simulating.memory_traces import Sizes, peak_bytes
from penstock.simulating.replica_symmetry import fold
from penstock.simulating.simulator import Played, planned_schedule, play, telling_minibatches
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction
from penstock.values.profiles import Profile

__all__ = ["Outcome", "evaluate"]

_LONGEST_PERIOD = 64
"""Minibatches: where unequal replicas take longer to meet again, the steady state is taken over this many."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan comes to in its steady state, fill and drain of an asynchronous schedule left out."""

    minibatch_seconds: float
    samples_per_second: float
    bubble: float
    """Idle share of the wall time of all ranks: neither forward, backward nor update."""
    peak_bytes: tuple[float, ...]
    """Per rank."""
    bottleneck_seconds: float
    """Per microbatch, of the rank, link or all-reduce that is occupied the longest."""
    limit: str
    """What keeps it from being faster, in words."""

    def prediction(self) -> Prediction:
        """For `Plan.predicted`."""
        return Prediction(
            self.minibatch_seconds,
            self.samples_per_second,
            self.bottleneck_seconds,
            self.peak_bytes,
            self.bubble,
            self.limit,
        )


def evaluate(plan: Plan, profile: Profile, cluster: Cluster, **options: Unpack[Options]) -> Outcome:
    """The outcome of `plan`; keywords as for `simulate`.

    `PlanError` if plan, profile and cluster do not fit each other; `ScheduleError` if the plan's numbers do not fit its
    schedule.
    """
    made = planned_schedule(plan, profile)
    placement = made.placement
    costs = plan_costs(plan, profile, cluster, placement, Assumptions(**options), made.skips)
    folding = fold(placement, costs, made.microbatches)
    lengths = [telling_minibatches(made)]
    if not made.flushes:
        lengths.append(lengths[0] + _period(made, lengths[0]))
    rows = _rows(made, folding.played, lengths)
    runs = [play(row, placement, costs) for row in rows]
    last, more = runs[-1], lengths[-1] - (0 if made.flushes else lengths[0])
    loads = measure_loads(last, more, None if made.flushes else runs[0])
    sizes = Sizes.of(costs, placement)
    peaks = {rank: peak_bytes(track, sizes, costs, made) for rank, track in last.tracks.items()}
    busy = sum(loads.computing[first] for first in folding.stands) / len(folding.stands)
    longest = max(*loads.occupied.values(), *loads.links.values(), *loads.reduces.values(), 0.0)
    seconds = max(loads.wall, longest)
    loads = replace(loads, wall=seconds)
    return Outcome(
        minibatch_seconds=seconds,
        samples_per_second=plan.microbatches * profile.microbatch_size / seconds if seconds else inf,
        bubble=min(1.0, max(0.0, 1 - busy / seconds)) if seconds else 0.0,
        peak_bytes=tuple(peaks[first] for first in folding.stands for _ in range(plan.tensor_parallel)),
        bottleneck_seconds=longest / plan.microbatches,
        limit=_limit(made, loads, last),
    )


def _period(made: Schedule, filling: int) -> int:
    """How many minibatches more the longer run has: at least as many as fill the pipe, and whole periods."""
    placement = made.placement
    every = lcm(*(placement.stride(stage) for stage in range(made.stages)))
    period = every // gcd(every, made.microbatches)
    return period * ceil(filling / period) if period <= _LONGEST_PERIOD else _LONGEST_PERIOD


def _rows(made: Schedule, played: tuple[int, ...], lengths: list[int]) -> list[dict[int, list[Action]]]:
    """The actions of the ranks that are played, for every number of minibatches (ascending); none is made twice."""
    rows: list[dict[int, list[Action]]] = [{} for _ in lengths]
    for rank in played:
        steps: list[Action] = []
        done = 0
        for length, programs in zip(lengths, rows, strict=True):
            for minibatch in range(done, length):
                steps.extend(made.row(rank, Step(minibatch)))
            done = length
            programs[rank] = [*steps, *made.row(rank, Drain(length))]
    return rows


def _limit(made: Schedule, loads: Loads, run: Played) -> str:
    """The rule is the file's docstring."""
    if not loads.wall:
        return "nothing: no action takes time"
    rank = max(loads.occupied, key=loads.occupied.__getitem__)
    share = loads.occupied[rank] / loads.wall
    busiest = f"{_rank_text(made, rank)} (compute {loads.computing[rank] / loads.wall:.0%} of the time)"
    if loads.passing[rank]:
        busiest = f"{busiest[:-1]}, messages {loads.passing[rank] / loads.wall:.0%})"
    pair = max(loads.pairs, key=loads.pairs.__getitem__, default=None)
    if pair is not None and loads.pairs[pair] / loads.wall > share:
        share = loads.pairs[pair] / loads.wall
        busiest = f"{_link_text(run, pair)} (in use {share:.0%} of the time)"
    stage = max(loads.exposed, key=loads.exposed.__getitem__, default=None)
    alone = 0.0 if stage is None else loads.exposed[stage] / loads.wall
    waiting = 1 - share - alone
    if share >= max(alone, waiting):
        return busiest
    if alone >= waiting:
        return f"all-reduce of stage {stage} ({alone:.0%} of the time)"
    if made.flushes:
        return f"fill and drain of the pipeline ({waiting:.0%} of the time; the busiest is {busiest})"
    return f"round trips between the stages ({waiting:.0%} of the time; the busiest is {busiest})"


def _rank_text(made: Schedule, rank: int) -> str:
    stages = made.stages_of(rank)
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"rank {rank} with stages {', '.join(map(str, stages))}"


def _link_text(run: Played, pair: Pair) -> str:
    """Named by the cut whose messages occupy it the longest, one by one."""
    numbers = {number for link, number in run.writer.links.items() if pair == frozenset(link)}
    cuts = {cut: seconds for (number, cut), seconds in run.writer.cuts.items() if number in numbers}
    cut = max(cuts, key=cuts.__getitem__)
    return f"link between stages {cut[0]} and {cut[1]}"
