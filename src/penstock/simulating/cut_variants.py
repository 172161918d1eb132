"""Variants of a plan: other cuts of the same stages, all simulated at once.

Moving a cut changes how long actions and messages take, but not their order: a rank runs its row, and a link carries
the messages of one rank in the order of that row. So the actions of all ranks can be sorted once such that each comes
after all that it waits for. Then one pass over them computes the times of any number of variants, a vector for each
action. For a hundred variants that takes about as long as one simulation.

The result is that of `evaluate`, up to rounding, for all options but these: links that several ranks share have no
fixed order of messages, so every two ranks have a link of their own here; and skips are counted as part of the cuts.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.simulating.action_costs import Costs, StageTimes, reduce_handling_seconds, reduce_seconds
from penstock.simulating.assumptions import Assumptions
from penstock.simulating.instructions import (
    COMPUTE,
    RECEIVE,
    REDUCE,
    SEND,
    Instructions,
    MemoryEffect,
    Writer,
    content_stages,
)
from penstock.simulating.outcomes import rows_of_lengths, steady_lengths
from penstock.simulating.simulator import find_symmetry
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, schedule
from penstock.values.profiles import Profile

Cuts: TypeAlias = npt.NDArray[np.int64]
"""(K, stages + 1): of each variant, stage s holds the layers ``[cuts[s], cuts[s + 1])``."""
_Matrix: TypeAlias = npt.NDArray[np.float64]
_Row: TypeAlias = tuple[Any, ...]
"""What one row of the table of costs holds: ("cut", cut, seconds per byte), ("fixed", seconds), ("reduce", stage),
("reduce handling", stage), or (effect, stage, factor, kinds)."""

_GB = 1e9

_PER_STAGE = 6
"""The actions of a microbatch on a stage: forward, backward, and two messages each way."""

_UNIT = {
    MemoryEffect.FORWARD: 1.0,
    MemoryEffect.FORWARD_KEPT: 1.0,
    MemoryEffect.BACKWARD: 2.0,
    MemoryEffect.BACKWARD_KEPT: 2.0,
    MemoryEffect.BACKWARD_INPUT: 1.0,
    MemoryEffect.BACKWARD_INPUT_KEPT: 1.0,
    MemoryEffect.BACKWARD_WEIGHT: 1.0,
    MemoryEffect.UPDATE: 1.0,
    MemoryEffect.RECOMPUTE: 1.0,
}
"""The seconds of an action of a stage whose forward, input backward, weight backward and update take one each."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerSums:
    """Sums over the first 0, 1, ... layers of a profile, and what links carry for the cut before each layer."""

    forward: _Matrix
    backward: _Matrix
    weight: _Matrix
    parameters: _Matrix
    update: _Matrix
    crossing: _Matrix
    split_share: float | None
    """Of the profile."""

    @classmethod
    def of(cls, profile: Profile) -> "LayerSums":
        """The sums of `profile`, on equal devices."""

        def sums(name: str) -> _Matrix:
            return np.concatenate([[0.0], np.cumsum([getattr(layer, name) for layer in profile.layers])])

        crossing = np.array([0.0, *(layer.cut_bytes for layer in profile.on_wire.layers)])
        return cls(
            forward=sums("forward_seconds"),
            backward=sums("backward_seconds"),
            weight=sums("weight_part_seconds"),
            parameters=sums("parameter_bytes"),
            update=sums("update_seconds"),
            crossing=crossing,
            split_share=profile.split_share,
        )

    @classmethod
    def by_kind(cls, profile: Profile, cluster: Cluster) -> "KindSums":
        """The sums of `profile` on every kind of device of `cluster`."""
        return {first: cls.of(profile.on(cluster.class_of(first))) for first in dict.fromkeys(kinds_of(cluster))}


KindSums: TypeAlias = Mapping[int, LayerSums]
"""By kind, which is the number of its first device."""


def kinds_of(cluster: Cluster) -> tuple[int, ...]:
    """By device: the first device of the same kind."""
    if cluster.is_equal:
        return (0,) * cluster.devices
    classes = list(map(cluster.class_of, range(cluster.devices)))
    return tuple(map(classes.index, classes))


_Place: TypeAlias = tuple[str, int]
"""A rank, a link, or a stage with an all-reduce."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The sorted actions of one run, and how often each row of costs occupies each place."""

    nodes: list[tuple[Any, ...]]
    """Without those that all runs begin with."""
    occupied: Mapping[_Place, Mapping[int, int]]


class PlanVariants:
    """Times the variants of one plan: other cuts on the same ranks, under the same schedule."""

    def __init__(self, plan: Plan, cluster: Cluster, assumptions: Assumptions) -> None:
        if not assumptions.overlap or cluster.blocks or assumptions.slowdowns or plan.tensor_parallel > 1:
            raise PlanError(
                "variants: expected overlap, no slowdowns and no tensor parallelism, found others: use evaluate"
            )
        self._plan = plan
        self._assumptions = assumptions
        made = schedule(plan)
        placement = made.placement
        every, cluster = kinds_of(cluster), plan.used(cluster)
        kinds = [every[device] for device in plan.devices or range(plan.ranks)]
        self._sharers = np.array(plan.replicas if placement.split else (1,) * made.stages, dtype=np.float64)
        stages = made.stages
        unit = Costs(
            (1.0,) * stages,
            (2.0,) * stages,
            update_seconds=(1.0,) * stages,
            weight_seconds=(1.0,) * stages,
            cut_bytes=(1.0,) * (stages - 1),
            cluster=cluster,
            assumptions=replace(assumptions, split_seconds=0.0, shared_nic=False),
        )
        self._rows: dict[_Row, int] = {}
        self._action_seconds, self._step_seconds = cluster.action_seconds, cluster.step_seconds
        # Of an all-reduce, or of each of its halves.
        share = 0.5 if assumptions.shard_optimizer else 1.0
        self._reduces = [
            [share * reduce_seconds(size, stage.ranks, cluster, assumptions.allreduce) for size in (0.0, _GB)]
            for stage in plan.stages
        ]
        self._handling = [
            [share * reduce_handling_seconds(size, stage.ranks, cluster) for size in (0.0, _GB)]
            for stage in plan.stages
        ]
        # Replicas on devices of different kinds are not alike, though their times are all one here.
        differ = tuple(StageTimes((kind,), (kind,), (kind,)) for kind in kinds) if len(set(kinds)) > 1 else ()
        symmetry = find_symmetry(placement, replace(unit, rank_times=differ), made.microbatches)
        lengths = steady_lengths(made)
        self._minibatches = lengths[-1] - (0 if made.flushes else lengths[0])
        writer = Writer(placement, unit)
        runs = [
            {rank: writer.write(rank, row) for rank, row in programs.items()}
            for programs in rows_of_lengths(made, symmetry.simulated, lengths)
        ]
        marked = {
            rank: {
                what.backward
                for own in runs
                for kind, what in zip(own[rank].kinds, own[rank].details, strict=True)
                if kind == REDUCE
            }
            for rank in runs[0]
        }
        sorter = _Sorter(
            runs[0],
            marked,
            [[rank for rank in ranks if rank in runs[0]] for ranks in placement.stages],
            stages,
            self._rows,
            # Replicas that split microbatches wait for the slowest of them.
            kinds={
                rank: tuple(sorted({kinds[other] for other in (ranks if placement.split else (rank,))}))
                for ranks in placement.stages
                for rank in ranks
            },
            action_seconds=cluster.action_seconds,
            handles_reduces=cluster.has_message_costs,
        )
        self._tracks, self._links = len(runs[0]), len(writer.links)
        self._common: list[tuple[Any, ...]] = []
        """The actions that all runs begin with."""
        if len(runs) > 1:
            sorter.sort(_common_lengths(*runs))
            self._common = sorter.nodes
        self._runs = [sorter.end(run) for run in runs]
        places = list(self._runs[-1].occupied)
        self._occupied = np.zeros((len(places), len(self._rows)))
        """How often each row of the table counts in a place, in the minibatches that are timed."""
        for run, sign in zip(self._runs[::-1], (1.0, -1.0), strict=False):
            for index, place in enumerate(places):
                for row, count in run.occupied.get(place, {}).items():
                    self._occupied[index, row] += sign * count

    @property
    def actions(self) -> int:
        """How many actions one pass computes; its time is proportional to that."""
        return len(self._common) + sum(len(run.nodes) for run in self._runs)

    def minibatch_seconds(self, sums: KindSums, cuts: Cuts, below: float = np.inf) -> _Matrix:
        """(K,): the seconds per minibatch of every variant, in the steady state.

        Infinite for those that occupy a rank, link or all-reduce for `below` or longer: they take as long at least.
        """
        table = self._table(sums, cuts)
        least = (self._occupied @ table).max(axis=0) / self._minibatches + self._step_seconds
        seconds = np.full(len(cuts), np.inf)
        chosen = np.flatnonzero(least < below)
        if len(chosen):
            walls = self._play(table if len(chosen) == len(cuts) else table[:, chosen])
            wall = walls[-1] if len(walls) == 1 else walls[1] - walls[0]
            seconds[chosen] = np.maximum(wall / self._minibatches + self._step_seconds, least[chosen])
        return seconds

    def _play(self, table: _Matrix) -> list[_Matrix]:
        """By run, (K,): when the last action of each variant ends."""
        rows = list(table)
        zero = np.zeros(table.shape[1])
        clocks = _Clocks([zero] * self._tracks, [zero] * self._links, [zero] * self._tracks, {}, {})
        clocks.play(self._common, rows)
        ends = []
        for run in self._runs:
            own = clocks if run is self._runs[-1] else clocks.copy()
            own.play(run.nodes, rows)
            ends.append(np.maximum.reduce(own.now))
        return ends

    def _table(self, sums: KindSums, cuts: Cuts) -> _Matrix:
        """(rows, K): the seconds of every kind of action and message."""
        first = sums[0]
        parameters = _between(first.parameters, cuts)
        table = np.empty((len(self._rows), len(cuts)))
        by_kinds: dict[tuple[int, ...], Mapping[MemoryEffect, _Matrix]] = {}
        for row, index in self._rows.items():
            if row[0] == "cut":
                table[index] = first.crossing[cuts[:, row[1] + 1]] * row[2]
            elif row[0] == "fixed":
                table[index] = row[1]
            elif row[0] in ("reduce", "reduce handling"):
                ends = self._reduces if row[0] == "reduce" else self._handling
                table[index] = _of_sizes(ends[row[1]], parameters[row[1]])
            else:
                if row[3] not in by_kinds:
                    by_kinds[row[3]] = self._seconds_by_effect([sums[kind] for kind in row[3]], cuts)
                table[index] = by_kinds[row[3]][row[0]][row[1]] * row[2] + self._action_seconds
        return table

    def _seconds_by_effect(self, sums: Sequence[LayerSums], cuts: Cuts) -> Mapping[MemoryEffect, _Matrix]:
        """(stages, K) each: the seconds of an action on the slowest of the kinds with these sums."""
        forward, backward, weight = (
            np.maximum.reduce([_between(getattr(own, name), cuts) / self._sharers[:, None] for own in sums])
            for name in ("forward", "backward", "weight")
        )
        again = forward * np.array([[stage in self._plan.recomputed] for stage in range(len(forward))])
        inputs = backward - weight
        share = sums[0].split_share
        split = self._assumptions.split_seconds if share is None else share * backward
        parameters = _between(sums[0].parameters, cuts)
        update = _between(sums[0].update, cuts) + parameters * self._assumptions.update_seconds_per_byte
        if self._assumptions.shard_optimizer:
            update /= np.array(self._plan.replicas)[:, None]
            for ends in (self._reduces, self._handling):
                update += np.array([_of_sizes(each, own) for each, own in zip(ends, parameters, strict=True)])
        return {
            MemoryEffect.FORWARD: forward,
            MemoryEffect.FORWARD_KEPT: forward,
            MemoryEffect.RECOMPUTE: forward,
            MemoryEffect.BACKWARD: backward + again,
            MemoryEffect.BACKWARD_KEPT: backward,
            MemoryEffect.BACKWARD_INPUT: inputs + again,
            MemoryEffect.BACKWARD_INPUT_KEPT: inputs,
            MemoryEffect.BACKWARD_WEIGHT: weight + split,
            MemoryEffect.UPDATE: update,
        }


def _of_sizes(ends: Sequence[float], sizes: _Matrix) -> _Matrix:
    """The seconds for `sizes` of what takes the first of `ends` for nothing and the second for a gigabyte."""
    fixed, much = ends
    return fixed + sizes * ((much - fixed) / _GB)


def _between(sums: _Matrix, cuts: Cuts) -> _Matrix:
    """(stages, K): the sum over the layers of each stage."""
    difference: _Matrix = (sums[cuts[:, 1:]] - sums[cuts[:, :-1]]).T
    return difference


def estimate_actions(plan: Plan) -> float:
    """About how many actions a pass over the variants of `plan` computes, without sorting them."""
    made = schedule(plan)
    microbatches = sum(steady_lengths(made)) * plan.microbatches
    replicas = set(plan.replicas)
    # Equal pipelines are simulated as one.
    pipelines = min(replicas) if len(replicas) == 1 and plan.microbatches % min(replicas) == 0 else 1
    return microbatches * len(plan.stages) * _PER_STAGE / (1 if made.placement.split else pipelines)


_COMPUTE, _MARKED, _SEND, _RECEIVE, _REDUCE = range(5)


@dataclass(slots=True, eq=False)
class _Sorter:
    """Sorts the instructions of all ranks such that each comes after all that it waits for."""

    written: Mapping[int, Instructions]
    marked: Mapping[int, set[int]]
    """By rank: the indices of the actions with which an all-reduce may begin, in any run."""
    members: Sequence[Sequence[int]]
    """By stage: the simulated ranks."""
    stages: int
    rows: dict[_Row, int]
    kinds: Mapping[int, tuple[int, ...]]
    """By rank: the kinds of the devices of which the slowest determines its seconds."""
    action_seconds: float
    handles_reduces: bool
    """Whether all-reduces take time of the ranks."""
    actions: dict[tuple[int, float, tuple[int, ...]], int] = field(default_factory=dict)
    """By effect, seconds and kinds of an action: its row."""
    nodes: list[tuple[Any, ...]] = field(default_factory=list)
    occupied: defaultdict[_Place, defaultdict[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    position: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By rank: the next instruction."""
    passed: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By rank: how many messages come before that."""
    queues: defaultdict[int, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    """By edge: the messages that were sent and not received."""
    arrived: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """By stage and version of an all-reduce that has not begun: the ranks that it may begin with."""
    reducing: set[int] = field(default_factory=set)
    """The ranks that wait for an all-reduce to begin."""
    sent: int = 0

    def end(self, written: Mapping[int, Instructions]) -> _Run:
        """What is left of the run `written`, which begins with all that was sorted. It leaves this sorter as it is."""
        counts = {place: defaultdict(int, rows) for place, rows in self.occupied.items()}
        last = replace(
            self,
            written=written,
            nodes=[],
            occupied=defaultdict(lambda: defaultdict(int), counts),
            position=self.position.copy(),
            passed=self.passed.copy(),
            queues=defaultdict(deque, {edge: queue.copy() for edge, queue in self.queues.items()}),
            arrived={reduce: joined.copy() for reduce, joined in self.arrived.items()},
            reducing=self.reducing.copy(),
        )
        last.sort({rank: len(own.kinds) for rank, own in written.items()})
        return _Run(last.nodes, last.occupied)

    def sort(self, stops: Mapping[int, int]) -> None:
        """Sorts the instructions before the stop of each rank, as far as they wait for none behind the stops."""
        places = {rank: place for place, rank in enumerate(self.written)}
        cuts = {rank: self._cuts_of(own) for rank, own in self.written.items()}
        position, passed, queues = self.position, self.passed, self.queues
        waiting: dict[int, int] = {}
        ready = [rank for rank in list(self.written)[::-1] if rank not in self.reducing]
        while ready:
            rank = ready.pop()
            own, place, stop, marked = self.written[rank], places[rank], stops[rank], self.marked[rank]
            index = position[rank]
            while index < stop:
                kind, what = own.kinds[index], own.details[index]
                if kind == COMPUTE:
                    self._add_compute(place, own, index, rank, marks=index in marked)
                elif kind == SEND:
                    cut = cuts[rank][passed[rank]]
                    row = self._row(("cut", cut, what.seconds))
                    self._add_fixed(place, rank, what.handling_seconds)
                    self.nodes.append((_SEND, place, what.link, row, what.latency_seconds, self.sent))
                    self._add_copying(place, rank, cut, what.copying_seconds)
                    self.occupied["link", what.link][row] += 1
                    queues[what.edge].append(self.sent)
                    self.sent += 1
                    passed[rank] += 1
                    if what.edge in waiting:
                        ready.append(waiting.pop(what.edge))
                elif kind == RECEIVE:
                    if not queues[what.edge]:
                        waiting[what.edge] = rank
                        break
                    self._add_copying(place, rank, cuts[rank][passed[rank]], what.copying_seconds)
                    self.nodes.append((_RECEIVE, place, queues[what.edge].popleft()))
                    self._add_fixed(place, rank, what.handling_seconds)
                    passed[rank] += 1
                elif kind == REDUCE:
                    if self.handles_reduces:
                        self._add_busy(place, rank, ("reduce handling", what.stage))
                    joined = self.arrived.setdefault((what.stage, what.version), [])
                    joined.append((place, what.backward if what.blocking < 1 else -1))
                    if len(joined) < len(self.members[what.stage]):
                        self.reducing.add(rank)
                        position[rank] = index + 1
                        break
                    row = self._row(("reduce", what.stage))
                    self.nodes.append((_REDUCE, tuple(joined), row))
                    self.occupied["reduce", what.stage][row] += 1
                    others = [other for other in self.members[what.stage] if other != rank]
                    self.reducing.difference_update(others)
                    ready += others
                else:
                    raise PlanError("variants: expected no norms, tied weights and offloads: use evaluate")
                index += 1
                position[rank] = index

    def _add_compute(self, place: int, own: Instructions, index: int, rank: int, *, marks: bool) -> None:
        key = own.effects[index], own.details[index], self.kinds[rank]
        row = self.actions.get(key)
        if row is None:
            effect, stage = divmod(key[0], self.stages)
            factor = (key[1] - self.action_seconds) / _UNIT[MemoryEffect(effect)]
            row = self.actions[key] = self._row((MemoryEffect(effect), stage, factor, self.kinds[rank]))
        self.nodes.append((_MARKED, place, row, index) if marks else (_COMPUTE, place, row))
        self.occupied["rank", rank][row] += 1

    def _add_fixed(self, place: int, rank: int, seconds: float) -> None:
        """The time that a rank is busy with a message, whatever its size."""
        if seconds:
            self._add_busy(place, rank, ("fixed", seconds))

    def _add_copying(self, place: int, rank: int, cut: int, seconds_per_byte: float) -> None:
        """The time that a rank is busy with the bytes of a message."""
        if seconds_per_byte:
            self._add_busy(place, rank, ("cut", cut, seconds_per_byte))

    def _add_busy(self, place: int, rank: int, key: _Row) -> None:
        row = self._row(key)
        self.nodes.append((_COMPUTE, place, row))
        self.occupied["rank", rank][row] += 1

    def _row(self, row: _Row) -> int:
        return self.rows.setdefault(row, len(self.rows))

    def _cuts_of(self, own: Instructions) -> list[int]:
        """The cut of every message of a rank, in the order of the row."""
        source, target = content_stages(np.array(own.contents, dtype=np.int64), self.stages)
        cuts: list[int] = np.minimum(source, target).tolist()
        return cuts


def _common_lengths(one: Mapping[int, Instructions], other: Mapping[int, Instructions]) -> dict[int, int]:
    """By rank: how many instructions two runs begin with alike."""
    lengths = {}
    for rank, own in one.items():
        there = other[rank]

        def differ(length: int, own: Instructions = own, there: Instructions = there) -> bool:
            pairs = (own.kinds, there.kinds), (own.effects, there.effects), (own.details, there.details)
            return any(here[:length] != others[:length] for here, others in pairs)

        lengths[rank] = bisect_left(range(1, min(len(own.kinds), len(there.kinds)) + 1), True, key=differ)
    return lengths


@dataclass(slots=True, eq=False)
class _Clocks:
    """The times of all ranks and links, a vector of the variants each, while actions are played."""

    now: list[_Matrix]
    free: list[_Matrix]
    """When each link is free."""
    ring: list[_Matrix]
    """When the last all-reduce of each rank ended."""
    arrivals: dict[int, _Matrix]
    marks: dict[tuple[int, int], _Matrix]
    """The beginnings of the actions with which all-reduces may begin."""

    def copy(self) -> "_Clocks":
        """The same times; the vectors, which never change, are shared."""
        return _Clocks(self.now.copy(), self.free.copy(), self.ring.copy(), self.arrivals.copy(), self.marks.copy())

    def play(self, nodes: Sequence[tuple[Any, ...]], rows: Sequence[_Matrix]) -> None:
        """Moves the times on by `nodes`, which take the seconds in `rows`."""
        now, free, ring, arrivals, marks = self.now, self.free, self.ring, self.arrivals, self.marks
        most = np.maximum
        for node in nodes:
            code, place = node[0], node[1]
            if code == _COMPUTE:
                now[place] = now[place] + rows[node[2]]
            elif code == _SEND:
                left = free[node[2]] = most(now[place], free[node[2]]) + rows[node[3]]
                arrivals[node[5]] = left + node[4] if node[4] else left
            elif code == _RECEIVE:
                now[place] = most(now[place], arrivals.pop(node[2]))
            elif code == _MARKED:
                marks[place, node[3]] = now[place]
                now[place] = now[place] + rows[node[2]]
            else:
                _reduce(place, rows[node[2]], now, ring, marks)


def _reduce(
    joined: Sequence[tuple[int, int]],
    seconds: _Matrix,
    now: list[_Matrix],
    ring: list[_Matrix],
    marks: Mapping[tuple[int, int], _Matrix],
) -> None:
    """One all-reduce of the ranks `joined`, each with the action that it may start with."""
    begun = [marks.get((place, backward), now[place]) if backward >= 0 else now[place] for place, backward in joined]
    starts = [np.maximum(begin, ring[place]) for begin, (place, _) in zip(begun, joined, strict=True)]
    end = np.maximum.reduce([*(start + seconds for start in starts), *(now[place] for place, _ in joined)])
    for place, _ in joined:
        now[place] = ring[place] = end
