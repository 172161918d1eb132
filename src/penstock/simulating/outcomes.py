"""The outcome of a plan: what planners compare, taken from the simulator without building a timeline.

Steady state. A flushing schedule is simulated for one minibatch. For an asynchronous one, two runs are simulated, both
long enough to fill the pipe: their difference, per minibatch, contains neither fill nor drain. (The number of further
minibatches is a multiple of the period after which unequal replicas take the same microbatches again.) A minibatch
never takes less time than it occupies any rank, link or all-reduce for: where two of them are nearly equally slow, runs
of this length may not show yet which of them is the slower. `Cluster.step_seconds` come on top, since no rank computes
meanwhile.

Limit. Take the rank or link that is occupied the longest (a link while there is a message on it in either direction).
The wall time of a minibatch consists of three shares: the time that it is occupied; the exposed time of an all-reduce,
after its last replica has arrived; and the rest, in which it waits. The largest share names the limit: the stage of the
rank, or the link; the all-reduce; or, for waiting, the fill and drain of the pipeline under a flush and the round trips
between the stages otherwise. Of equal shares, the first in this order is taken.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import ceil, gcd, inf, lcm
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from penstock.scheduling.actions import Action
from penstock.scheduling.definitions import Drain, Step
from penstock.scheduling.schedules import Schedule
from penstock.simulating.action_costs import plan_costs
from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.instructions import RECEIVE, SEND, MessagePath
from penstock.simulating.memory_traces import Sizes, peak_bytes
from penstock.simulating.simulator import SimulatedRun, default_minibatches, find_symmetry, planned_schedule, play
from penstock.simulating.transfer_times import Link
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction
from penstock.values.profiles import Profile

RankPair: TypeAlias = frozenset[int]
"""The two ranks (or servers) of a link, in either direction."""

_Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Loads:
    """The seconds for which one minibatch occupies each resource."""

    wall: float
    computing: Mapping[int, float]
    """By rank that was simulated."""
    blocking_messages: Mapping[int, float]
    """By rank: messages during which it cannot compute."""
    links: Mapping[Link, float]
    """By link: one direction."""
    pairs: Mapping[RankPair, float]
    """By link: while there is a message on it in either direction."""
    hosts: Mapping[int, float]
    """By rank: the busier direction of the link to its host."""
    reduces: Mapping[int, float]
    """By stage: all-reduces."""
    exposed_reduces: Mapping[int, float]
    """By stage: the time of all-reduces that nothing hides, after the last replica has arrived."""

    @property
    def occupied(self) -> dict[int, float]:
        """By rank: computation, and messages during which it cannot compute."""
        return {rank: seconds + self.blocking_messages[rank] for rank, seconds in self.computing.items()}


def measure_loads(run: SimulatedRun, minibatches: int, shorter: SimulatedRun | None = None) -> Loads:
    """The loads of `run`, less those of the `shorter` run if there is one, per minibatch of `minibatches`."""
    whole = _measure(run)
    before = None if shorter is None else _measure(shorter)
    per_minibatch: dict[str, Any] = {}
    for field in fields(Loads):
        more, less = getattr(whole, field.name), None if before is None else getattr(before, field.name)
        if isinstance(more, Mapping):
            per_minibatch[field.name] = {
                key: (value - (less or {}).get(key, 0.0)) / minibatches for key, value in more.items()
            }
        else:
            per_minibatch[field.name] = (more - (less or 0.0)) / minibatches
    return Loads(**per_minibatch)


def _measure(run: SimulatedRun) -> Loads:
    events = run.events
    return Loads(
        wall=run.seconds,
        computing={rank: track.busy_seconds for rank, track in run.tracks.items()},
        blocking_messages={rank: track.message_seconds for rank, track in run.tracks.items()},
        links={link: events.link_seconds[number] for link, number in run.writer.links.items()},
        pairs=_pair_seconds(run),
        hosts={rank: max(track.host_seconds) for rank, track in run.tracks.items()},
        reduces={stage: whole for stage, (whole, _) in events.reduce_seconds.items()},
        exposed_reduces={stage: exposed for stage, (_, exposed) in events.reduce_seconds.items()},
    )


def _pair_seconds(run: SimulatedRun) -> dict[RankPair, float]:
    pair_of = {number: frozenset(link) for link, number in run.writer.links.items()}
    intervals: defaultdict[RankPair, list[tuple[_Numbers, _Numbers]]] = defaultdict(list)
    for track in run.tracks.values():
        kinds = np.array(track.instructions.kinds)
        messages = kinds[(kinds == SEND) | (kinds == RECEIVE)]
        sends = np.flatnonzero(kinds == SEND)
        begun, left = np.array(track.starts)[sends], np.array(track.messages)[messages == SEND]
        paths: list[MessagePath] = [track.instructions.details[index] for index in sends.tolist()]
        edges = np.array([path.edge for path in paths])
        for edge in np.unique(edges):
            members = np.flatnonzero(edges == edge)
            pairs = {pair_of[link] for link, _ in paths[members[0]].legs}
            for pair in pairs:
                intervals[pair].append((begun[members], left[members]))
    return {pair: _union_seconds(found) for pair, found in intervals.items()}


def _union_seconds(intervals: list[tuple[_Numbers, _Numbers]]) -> float:
    """The length of the union of intervals, given as arrays of (starts, stops)."""
    starts, stops = (np.concatenate(side) for side in zip(*intervals, strict=True))
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    reached = np.concatenate([starts[:1], np.maximum.accumulate(stops)[:-1]])
    return float(np.maximum(stops - np.maximum(starts, reached), 0.0).sum())


_LONGEST_PERIOD = 64
"""In minibatches; a longer period of unequal replicas is cut to this for the steady state."""


_SHOWN = 8
"""The most stages of a rank whose numbers a text has."""


Outcome: TypeAlias = Prediction
"""The performance of a plan in its steady state, without fill and drain of an asynchronous schedule."""


def evaluate(plan: Plan, profile: Profile, cluster: Cluster, **options: Unpack[Options]) -> Outcome:
    """The outcome of `plan`; keywords as for `simulate`.

    Raises `PlanError` if plan, profile and cluster do not match, and `ScheduleError` if the plan's numbers do not suit
    its schedule.
    """
    made = planned_schedule(plan, profile)
    placement = made.placement
    costs = plan_costs(plan, profile, cluster, placement, Assumptions(**options), skips=made.skips)
    symmetry = find_symmetry(placement, costs, made.microbatches)
    lengths = steady_lengths(made)
    rows = rows_of_lengths(made, symmetry.simulated, lengths)
    runs = [play(row, placement, costs) for row in rows]
    last, more = runs[-1], lengths[-1] - (0 if made.flushes else lengths[0])
    loads = measure_loads(last, more, None if made.flushes else runs[0])
    sizes = Sizes.of(costs, placement)
    peaks = {rank: peak_bytes(track, sizes, costs, made) for rank, track in last.tracks.items()}
    busy = sum(loads.computing[first] for first in symmetry.representatives) / len(symmetry.representatives)
    every = (loads.occupied, loads.links, loads.reduces, loads.hosts)
    longest = max(chain.from_iterable(each.values() for each in every), default=0.0)
    seconds = max(loads.wall, longest) + cluster.step_seconds
    loads = replace(loads, wall=seconds)
    return Outcome(
        minibatch_seconds=seconds,
        samples_per_second=plan.microbatches * profile.microbatch_size / seconds if seconds else inf,
        bubble=min(1.0, max(0.0, 1 - busy / seconds)) if seconds else 0.0,
        peak_bytes=tuple(peaks[first] for first in symmetry.representatives for _ in range(plan.tensor_parallel)),
        bottleneck_seconds=longest / plan.microbatches,
        limit=_limit(made, loads, last),
        stage_seconds=tuple(
            (1 + (stage in costs.recomputed)) * forward + backward
            for stage, (forward, backward) in enumerate(zip(costs.forward_seconds, costs.backward_seconds, strict=True))
        ),
    )


def steady_lengths(made: Schedule) -> list[int]:
    """The minibatches of each run that is needed for the steady state, ascending: one run, or two without a flush."""
    lengths = [default_minibatches(made)]
    return lengths if made.flushes else [*lengths, lengths[0] + _period(made, lengths[0])]


def _period(made: Schedule, filling: int) -> int:
    """How many more minibatches the longer run has: whole periods, at least as many as fill the pipe."""
    placement = made.placement
    every = lcm(*(placement.stride(stage) for stage in range(made.stages)))
    period = every // gcd(every, made.microbatches)
    return period * ceil(filling / period) if period <= _LONGEST_PERIOD else _LONGEST_PERIOD


def rows_of_lengths(made: Schedule, simulated: tuple[int, ...], lengths: list[int]) -> list[dict[int, list[Action]]]:
    """The actions of the simulated ranks for each of `lengths` minibatches, ascending; none is created twice."""
    rows: list[dict[int, list[Action]]] = [{} for _ in lengths]
    for rank in simulated:
        steps: list[Action] = []
        done = 0
        for length, programs in zip(lengths, rows, strict=True):
            for row in made.rows(rank, map(Step, range(done, length))):
                steps.extend(row)
            done = length
            programs[rank] = [*steps, *made.row(rank, Drain(length))]
    return rows


def _limit(made: Schedule, loads: Loads, run: SimulatedRun) -> str:
    """The limit in words, by the rule of this file's docstring."""
    if not loads.wall:
        return "nothing: no action takes time"
    rank = max(loads.occupied, key=loads.occupied.__getitem__)
    share = loads.occupied[rank] / loads.wall
    busiest = f"{_rank_text(made, rank)} (compute {loads.computing[rank] / loads.wall:.0%} of the time)"
    if loads.blocking_messages[rank]:
        busiest = f"{busiest[:-1]}, messages {loads.blocking_messages[rank] / loads.wall:.0%})"
    pair = max(loads.pairs, key=loads.pairs.__getitem__, default=None)
    if pair is not None and loads.pairs[pair] / loads.wall > share:
        share = loads.pairs[pair] / loads.wall
        busiest = f"{_link_text(run, pair)} (in use {share:.0%} of the time)"
    host = max(loads.hosts, key=loads.hosts.__getitem__)
    if loads.hosts[host] / loads.wall > share:
        share = loads.hosts[host] / loads.wall
        busiest = f"link between {_rank_text(made, host)} and its host (in use {share:.0%} of the time)"
    stage = max(loads.exposed_reduces, key=loads.exposed_reduces.__getitem__, default=None)
    alone = 0.0 if stage is None else loads.exposed_reduces[stage] / loads.wall
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
    shown = ", ".join(map(str, stages)) if len(stages) <= _SHOWN else f"{stages[0]}, ..., {stages[-1]}"
    return f"rank {rank} with stages {shown}"


def _link_text(run: SimulatedRun, pair: RankPair) -> str:
    """The link in words, named by the cut whose single message occupies it the longest."""
    numbers = {number for link, number in run.writer.links.items() if pair == frozenset(link)}
    cuts = {cut: seconds for (number, cut), seconds in run.writer.cuts.items() if number in numbers}
    cut = max(cuts, key=cuts.__getitem__)
    return f"link between stages {cut[0]} and {cut[1]}"
