"""Lower bounds: what a minibatch takes at least, whatever the cuts of a structure.

A structure is a plan without its cuts: a schedule, and the ranks of every stage. Each rank, link and all-reduce has its
work, and under a flush more comes before and after that:

    rank      forwards of the layers before its stage, its own work, backwards of the layers before its stage
    link      the forwards and backwards of all layers for one microbatch, and all messages of one direction
    ring      all of its rank's work but the last backward, and the all-reduce, which begins with that backward

The longest of these is a bound for given cuts, within rounding. What comes before and after depends on where the stage
begins and not on the cuts before it, so the least bound over all cuts is found as the least slowest stage is.
Structures are compared by that, and those whose bound is above the seconds of a known plan need no simulation.
Latencies are left out.
"""

from itertools import pairwise
from math import ceil, lcm

import numpy as np

from penstock.planning.stage_costs import ChainCosts, Counts, Matrix
from penstock.planning.two_bw.orientations import LinkTable
from penstock.simulating.action_costs import reduce_seconds
from penstock.simulating.assumptions import Assumptions
from penstock.simulating.cut_variants import LayerSums
from penstock.values.chain_cuts import cut_evenly, least_bottleneck
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan

_GB = 1e9

_KEPT_NUMBERS = 4_000_000
"""How many seconds of stages are kept, 32 MB."""


class LowerBounds:
    """The bounds of all structures with one stage per rank, for one profile on one cluster."""

    def __init__(self, costs: ChainCosts, sums: LayerSums, cluster: Cluster, assumptions: Assumptions) -> None:
        self._costs = costs
        self._sums = sums
        self._cluster = cluster
        self._assumptions = assumptions
        self._links = LinkTable(cluster)
        self._rings: dict[tuple[int, ...], tuple[float, float]] = {}
        self._slowest: dict[tuple[object, ...], float] = {}
        self._tables: dict[tuple[object, ...], Matrix] = {}
        self._found: dict[object, tuple[float, tuple[int, ...] | None]] = {}

    def least_seconds(self, plan: Plan) -> float:
        """The bound of the structure of `plan`, for a minibatch; infinite if there are too few layers."""
        key = self._key(plan)
        if key not in self._found:
            self._found[key] = least_bottleneck(lambda *stage: self._seconds(plan, *stage), self._exchange(plan)), None
        return self._found[key][0]

    def cuts(self, plan: Plan) -> tuple[int, ...]:
        """Balanced cuts with the least bound; none if there are too few layers."""
        limit = self.least_seconds(plan)
        key = self._key(plan)
        cuts = self._found[key][1]
        if cuts is None:
            cuts = ()
            if limit < np.inf:
                cuts = cut_evenly(lambda *stage: self._seconds(plan, *stage), self._exchange(plan), limit)
            self._found[key] = limit, cuts
        return cuts

    def _key(self, plan: Plan) -> object:
        return (tuple(stage.ranks for stage in plan.stages), plan.microbatches, plan.routing, *_kind_of(plan))

    def _seconds(self, plan: Plan, stage: int, starts: Counts) -> Matrix:
        """(len(starts), N+1): the bound that a stage sets from each of `starts` up to every layer."""
        ranks = plan.stages[stage].ranks
        split, count = plan.placement.split, len(ranks)
        fixed, slope = self._ring(ranks)
        widest = max(plan.replicas) if split else 1
        last = stage == len(plan.stages) - 1
        key = count, split, fixed, slope, plan.microbatches, widest, last and plan.recompute, *_kind_of(plan)
        if key not in self._tables:
            if len(self._tables) * self._costs.seconds.size > _KEPT_NUMBERS:
                self._tables.clear()
            self._tables[key] = self._table(plan, count, (fixed, slope), widest, last=last)
        return self._tables[key][starts]

    def _table(self, plan: Plan, replicas: int, ring: tuple[float, float], widest: int, *, last: bool) -> Matrix:
        definition, split = plan.definition, plan.placement.split
        share = replicas if split else 1
        turns = 1 if split else replicas
        rounds = plan.microbatches / turns
        again = self._sums.forward if plan.recompute else np.zeros_like(self._sums.forward)
        # A backward that directly follows its forward recomputes nothing: every one of the last stage, and the only one
        # of a rank that takes one microbatch between two flushes.
        direct = last or (definition.flushes and ceil(rounds) == 1)
        work = (self._costs.seconds - (again - again[:, None] if direct else 0.0)) / share
        exposed: float | Matrix = 0.0
        if replicas > 1:
            hidden = self._sums.backward + again
            reduced = ring[0] + ring[1] * self._costs.parameter_bytes
            exposed = np.maximum(0.0, reduced - (hidden - hidden[:, None]) / share)
        if definition.updates_per_microbatch:
            each: Matrix = (work + exposed) * rounds
            return each
        if not definition.flushes:
            whole: Matrix = work * rounds + exposed
            return whole
        work = work * ceil(rounds)
        behind = 0.0 if definition.splits_backward else self._sums.backward[:, None] / widest
        table: Matrix = self._sums.forward[:, None] / widest + work + np.maximum(behind, exposed)
        return table

    def _exchange(self, plan: Plan) -> list[Matrix]:
        """By cut: the bound that it sets at each position."""
        split, flushes = plan.placement.split, plan.definition.flushes
        whole = 0.0
        if flushes:
            sums = self._sums
            inputs = sums.backward - sums.weight if plan.definition.splits_backward else sums.backward
            whole = float(sums.forward[-1] + inputs[-1]) / (max(plan.replicas) if split else 1)
        exchange = []
        for one, other in pairwise(plan.stages):
            ways = len(one.ranks) * len(other.ranks) if split else lcm(len(one.ranks), len(other.ranks))
            messages = plan.microbatches / ways
            if flushes and not split:
                messages = plan.microbatches // ways
            slowest = self._slowest_link(one.ranks, other.ranks, split=split)
            exchange.append(np.append(self._sums.crossing[:-1] * (messages * slowest) + whole, np.inf))
        return exchange

    def _ring(self, ranks: tuple[int, ...]) -> tuple[float, float]:
        """The seconds of an all-reduce: whatever its size, and for every byte."""
        if ranks not in self._rings:
            fixed, much = (
                reduce_seconds(size, ranks, self._cluster, self._assumptions.allreduce) for size in (0.0, _GB)
            )
            self._rings[ranks] = fixed, (much - fixed) / _GB
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


def _kind_of(plan: Plan) -> tuple[bool, bool, bool, bool]:
    """Equal for plans whose schedules have the same bounds."""
    definition = plan.definition
    return definition.flushes, definition.splits_backward, definition.updates_per_microbatch, plan.recompute
