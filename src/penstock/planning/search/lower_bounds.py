"""Lower bounds: what a minibatch takes at least, whatever the cuts of a structure.

A structure is a plan without its cuts: a schedule, and the ranks of every stage. Each rank, link and all-reduce has its
work, and under a flush more comes before and after that:

    rank      forwards of the layers before its stage, its own work, backwards of the layers before its stage
    link      the forwards and backwards of all layers for one microbatch, and all messages of one direction
    ring      all of its rank's work but the last backward, and the all-reduce, which begins with that backward

The longest of these is a bound for given cuts, within rounding. What comes before and after depends on where the stage
begins and not on the cuts before it, so the least bound over all cuts is found as the least slowest stage is.
Structures are compared by that, and those whose bound is above the seconds of a known plan need no simulation.
Latencies are left out. Where devices differ, all layers outside of a stage are on the fastest ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import lcm

import numpy as np

from penstock.planning.requests import stages_on_devices
from penstock.planning.stage_costs import ChainCosts, Counts, Matrix
from penstock.planning.two_bw.orientations import LinkTable
from penstock.simulating.action_costs import reduce_seconds
from penstock.simulating.assumptions import Assumptions
from penstock.simulating.cut_variants import LayerSums, kinds_of
from penstock.values.chain_cuts import cut_evenly, least_bottleneck
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile

_GB = 1e9

_KEPT_NUMBERS = 4_000_000
"""How many seconds of stages are kept, 32 MB."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A plan with one stage per rank, without its cuts."""

    groups: tuple[tuple[int, ...], ...]
    """The devices of every stage."""
    microbatches: int
    split: bool
    """Whether replicas split every microbatch."""
    recompute: bool
    flushes: bool
    splits_backward: bool
    updates_per_microbatch: bool

    @classmethod
    def of(cls, plan: Plan) -> "Structure":
        """The structure of `plan`."""
        definition = plan.definition
        return cls(
            tuple(stage.ranks for stage in stages_on_devices(plan)),
            plan.microbatches,
            split=plan.routing == "split",
            recompute=bool(plan.recompute),
            flushes=definition.flushes,
            splits_backward=definition.splits_backward,
            updates_per_microbatch=definition.updates_per_microbatch,
        )

    @property
    def widest(self) -> int:
        """The most ranks that share a microbatch."""
        return max(map(len, self.groups)) if self.split else 1


class LowerBounds:
    """The bounds of all structures for one profile on one cluster."""

    def __init__(self, profile: Profile, costs: ChainCosts, cluster: Cluster, assumptions: Assumptions) -> None:
        self._costs = costs
        self._cluster = cluster
        self._assumptions = assumptions
        self._links = LinkTable(cluster)
        self._kinds = kinds_of(cluster)
        self._sums = LayerSums.by_kind(profile, cluster)
        measured = [profile.on(cluster.class_of(kind)).layers for kind in self._sums]

        def least(seconds: Callable[[LayerProfile], float]) -> Matrix:
            """(N+1,): the sums over the first layers, each on its fastest device."""
            return np.concatenate([[0.0], np.cumsum(np.min([list(map(seconds, own)) for own in measured], axis=0))])

        self._forward = least(lambda layer: layer.forward_seconds)
        self._backward = least(lambda layer: layer.backward_seconds)
        self._inputs = least(lambda layer: layer.backward_seconds - layer.weight_part_seconds)
        self._rings: dict[tuple[int, ...], tuple[float, float]] = {}
        self._slowest: dict[tuple[object, ...], float] = {}
        self._tables: dict[tuple[object, ...], Matrix] = {}
        self._found: dict[Structure, tuple[float, tuple[int, ...] | None]] = {}

    def least_seconds(self, structure: Structure) -> float:
        """The bound of a minibatch, whatever the cuts; infinite if there are too few layers."""
        if structure not in self._found:
            seconds = partial(self._seconds, structure)
            self._found[structure] = least_bottleneck(seconds, self._exchange(structure)), None
        return self._found[structure][0]

    def cuts(self, structure: Structure) -> tuple[int, ...]:
        """Balanced cuts with the least bound; none if there are too few layers."""
        limit = self.least_seconds(structure)
        cuts = self._found[structure][1]
        if cuts is None:
            cuts = ()
            if limit < np.inf:
                cuts = cut_evenly(partial(self._seconds, structure), self._exchange(structure), limit)
            self._found[structure] = limit, cuts
        return cuts

    def _seconds(self, structure: Structure, stage: int, starts: Counts) -> Matrix:
        """(len(starts), N+1): the bound that a stage sets from each of `starts` up to every layer."""
        return self._table(structure, stage)[starts]

    def _table(self, structure: Structure, stage: int) -> Matrix:
        """(N+1, N+1): the bound that a stage sets with any layers."""
        devices = structure.groups[stage]
        ways = 1 if structure.split else len(devices)
        turns: dict[int, int] = {}
        for way, device in enumerate(devices[: structure.microbatches * len(devices) // ways]):
            turns.setdefault(self._kinds[device], len(range(way % ways, structure.microbatches, ways)))
        last = structure.recompute and stage == len(structure.groups) - 1
        ring = self._ring(devices)
        key = (*turns.items(), structure.widest, len(devices), ring, last, replace(structure, groups=()))
        if key not in self._tables:
            if len(self._tables) * self._costs.seconds.size > _KEPT_NUMBERS:
                self._tables.clear()
            parts = [self._part(structure, turn, len(devices), ring, last=last) for turn in turns.items()]
            self._tables[key] = np.maximum.reduce(parts)
        return self._tables[key]

    def _part(
        self, structure: Structure, turn: tuple[int, int], replicas: int, ring: tuple[float, float], *, last: bool
    ) -> Matrix:
        """`_table` for the replicas of one kind, which take that number of microbatches."""
        kind, taken = turn
        sums = self._sums[kind]
        share = replicas if structure.split else 1
        rounds = structure.microbatches * share / replicas
        again = sums.forward if structure.recompute else np.zeros_like(sums.forward)
        # A backward that directly follows its forward recomputes nothing: every one of the last stage, and the only one
        # of a rank that takes one microbatch between two flushes.
        direct = last or (structure.flushes and taken == 1)
        work = (self._costs.seconds_on([kind]) - (again - again[:, None] if direct else 0.0)) / share
        exposed: float | Matrix = 0.0
        if replicas > 1:
            reduced = ring[0] + ring[1] * self._costs.parameter_bytes
            exposed = np.maximum(0.0, reduced - (sums.backward - sums.backward[:, None]) / share)
        if structure.updates_per_microbatch:
            each: Matrix = (work + exposed) * rounds
            return each
        if not structure.flushes:
            whole: Matrix = work * rounds + exposed
            return whole
        behind = 0.0 if structure.splits_backward else self._backward[:, None] / structure.widest
        table: Matrix = self._forward[:, None] / structure.widest + work * taken + np.maximum(behind, exposed)
        return table

    def _exchange(self, structure: Structure) -> list[Matrix]:
        """By cut: the bound that it sets at each position."""
        whole = 0.0
        if structure.flushes:
            back = self._inputs if structure.splits_backward else self._backward
            whole = float(self._forward[-1] + back[-1]) / structure.widest
        exchange = []
        for one, other in pairwise(structure.groups):
            ways = len(one) * len(other) if structure.split else lcm(len(one), len(other))
            messages = structure.microbatches / ways
            if structure.flushes and not structure.split:
                messages = structure.microbatches // ways
            slowest = self._slowest_link(one, other, split=structure.split)
            exchange.append(np.append(self._sums[0].crossing[:-1] * (messages * slowest) + whole, np.inf))
        return exchange

    def _ring(self, ranks: tuple[int, ...]) -> tuple[float, float]:
        """The seconds of an all-reduce: whatever its size, and for every byte."""
        if ranks not in self._rings:
            fixed, much = (
                reduce_seconds(size, ranks, self._cluster, self._assumptions.allreduce) for size in (0.0, _GB)
            )
            # The half that gathers the weights is in the update.
            share = 0.5 if self._assumptions.shard_optimizer else 1.0
            self._rings[ranks] = share * fixed, share * (much - fixed) / _GB
        return self._rings[ranks]

    def _slowest_link(self, one: tuple[int, ...], other: tuple[int, ...], *, split: bool) -> float:
        """The seconds per byte of the slowest link between two stages that carries messages."""
        key = one, other, split
        if key not in self._slowest:
            senders, receivers = np.array(one), np.array(other)
            if split:
                senders, receivers = np.repeat(senders, len(other)), np.tile(receivers, len(one))
            else:
                turns = np.arange(lcm(len(one), len(other)))
                senders, receivers = senders[turns % len(one)], receivers[turns % len(other)]
            there, back = self._links.links(senders, receivers)[0], self._links.links(receivers, senders)[0]
            self._slowest[key] = float(max(there.max(), back.max()))
        return self._slowest[key]
