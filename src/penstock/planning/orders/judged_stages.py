"""The stages of a plan as a search for an order sees them: their seconds, bytes and links.

The simulator judges every order of them. Nothing here depends on the limit that a user gave.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from operator import add, sub

from penstock.planning.orders.bounds import Bound, bound_of
from penstock.planning.orders.rows import OrderCosts, TimedRows, rows_of, text_of_rows
from penstock.planning.requests import PlannerName, if_runnable
from penstock.scheduling.orders import METHODS
from penstock.scheduling.written_programs import define_by_programs
from penstock.simulating.action_costs import Costs, plan_costs
from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.outcomes import evaluate
from penstock.simulating.simulator import planned_schedule
from penstock.simulating.transfer_times import Route, find_route
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction, schedule
from penstock.values.profiles import Profile

NAME = "found"
"""The name of an order that was found."""


def named_plans(plan: Plan, *, whole_backwards: bool = False) -> Iterator[Plan]:
    """The stages of `plan` under each named schedule that can run them and could make its updates at the end of a step;
    without predictions. `whole_backwards`: under none that splits backwards.
    """
    for method in METHODS:
        if method.updates_at_once and not method.for_streams and not (whole_backwards and method.splits_backward):
            made = if_runnable(lambda method=method: replace(plan, schedule=method, predicted=None))  # type: ignore[misc]
            if made is not None:
                yield made


@dataclass(frozen=True, slots=True)
class Judged:
    """A plan, what the simulator says of it, and the most bytes that each rank of the schedule holds."""

    plan: Plan
    prediction: Prediction
    peaks: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.prediction.minibatch_seconds


@dataclass(frozen=True)
class JudgedStages:
    """The stages of `plan`, whose schedule says where they lie. `name`: of the orders that are found."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    options: Options
    whole_backwards: bool = False
    name: str = NAME

    def judge(self, plan: Plan) -> Judged:
        """What the simulator says of `plan`."""
        prediction = evaluate(plan, self.profile, self.cluster, **self.options)
        judged = replace(plan, predicted=prediction, planner=PlannerName.ORDER.value)
        return Judged(judged, prediction, prediction.peak_bytes[:: plan.tensor_parallel])

    @cached_property
    def named(self) -> list[Judged]:
        """The stages under each named schedule that can run them."""
        return list(map(self.judge, named_plans(self.plan, whole_backwards=self.whole_backwards)))

    def plan_of(self, costs: OrderCosts, timed: TimedRows) -> Plan:
        """The plan with the order of these rows."""
        text = text_of_rows(costs, timed.rows, repeats=sum(map(len, timed.rows)) < costs.operations)
        return replace(self.plan, schedule=define_by_programs(self.name, text))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """By stage: its rank."""
        return tuple(held[0] for held in self.plan.placement.stages)

    @cached_property
    def _plan_costs(self) -> Costs:
        skips = planned_schedule(self.plan, self.profile).skips if self.profile.crossings else ()
        options = Assumptions(**self.options)
        return plan_costs(self.plan, self.profile, self.cluster, self.plan.placement, options, skips=skips)

    def costs(self, whole: frozenset[int], limits: tuple[float, ...], *, recomputes: bool = True) -> OrderCosts:
        """What orders are judged by whose backwards are split but for those of the stages `whole`. `limits`: by rank,
        the bytes of microbatches in flight. `recomputes`: whether backwards take what `plan` recomputes.
        """
        plan, costs, ranks = self.plan, self._plan_costs, self.ranks
        stages = range(len(ranks))
        times = [costs.times_of(rank) for rank in ranks]
        weight = [own.weight_seconds[stage] for stage, own in zip(stages, times, strict=True)]
        # The backward of the last stage can directly follow its forward, and then recomputes nothing.
        recomputed = plan.recomputed if recomputes else frozenset()
        again = [times[stage].forward_seconds[stage] if stage in recomputed else 0.0 for stage in stages[:-1]] + [0.0]
        added = [costs.split_seconds + costs.split_share * times[stage].backward_seconds[stage] for stage in stages]
        inputs = (0.0, *costs.cut_bytes)
        carried, returned = (tuple(map(_seconds, own)) for own in self._routes)
        saved = tuple((inputs if stage in plan.recomputed else costs.saved_bytes)[stage] for stage in stages)
        return OrderCosts(
            ranks=ranks,
            microbatches=plan.microbatches,
            forward=tuple(own.forward_seconds[stage] for stage, own in zip(stages, times, strict=True)),
            backward=tuple(times[stage].input_seconds[stage] + again[stage] for stage in stages),
            weight=tuple(weight[stage] + (0.0 if stage in whole else added[stage]) for stage in stages),
            activation=carried,
            # A recomputation is over when the gradient comes, if there was time.
            gradient=tuple(seconds - again[stage] for stage, seconds in enumerate(returned)),
            saved=saved,
            limits=limits,
            freed=tuple(min(0.0, own - full) for own, full in zip(saved, costs.saved_bytes, strict=True))
            if recomputes
            else (),
            occupied=tuple(tuple(map(_occupied, own)) for own in self._routes),
            whole=whole,
            movable=costs.offloaded_bytes,
            host_bandwidth=self.cluster.host_bandwidth or 0.0,
        )

    @cached_property
    def _routes(self) -> tuple[list[Route | None], list[Route | None]]:
        """By cut: the routes of an activation, and those of a gradient; None within a rank."""
        cluster, width = self.plan.used(self.cluster), self.plan.tensor_parallel
        shared = Assumptions(**self.options).shared_nic

        def routes(ends: Iterable[tuple[int, int]]) -> list[Route | None]:
            sizes = zip(self._plan_costs.wire_bytes, ends, strict=True)
            return [
                None if here == there else find_route(cluster, size, (here,), (there,), shared=shared, width=width)
                for size, (here, there) in sizes
            ]

        return routes(pairwise(self.ranks)), routes((here, there) for there, here in pairwise(self.ranks))

    @cached_property
    def fixed_bytes(self) -> list[float]:
        """By rank: the least bytes that are not those of microbatches in flight, at the peak of a named schedule."""
        costs = self.costs(frozenset(), (inf,) * len(self._weight_bytes))
        found = [
            [peak - costs.peak(row) for peak, row in zip(judged.peaks, rows, strict=True)]
            for judged in self.named
            if (rows := rows_of(schedule(judged.plan), costs.whole)) is not None
        ]
        return [min(each) for each in zip(*found, strict=True)] or [0.0] * costs.length

    @cached_property
    def other_bytes(self) -> list[float]:
        """By rank: the bytes of weights, gradients and optimizer, and of the microbatch that is computed."""
        costs, most = self._plan_costs, [0.0] * len(self._weight_bytes)
        found = list(self._weight_bytes)
        for stage, rank in enumerate(self.ranks):
            found[rank] += costs.parameter_bytes[stage]
            most[rank] = max(most[rank], costs.workspace_bytes[stage])
        return list(map(add, found, most))

    @cached_property
    def _weight_bytes(self) -> list[float]:
        """By rank: the bytes of weights, optimizer and libraries."""
        costs = self._plan_costs
        options, found = costs.assumptions, [costs.library_bytes] * (max(self.ranks) + 1)
        for rank, size, frozen in zip(self.ranks, costs.parameter_bytes, costs.frozen_bytes, strict=True):
            found[rank] += (options.version_copies + options.kept_copies + options.master_copies) * size + frozen
        return found

    def bound(self, limits: Sequence[float]) -> Bound:
        """The bound under the most bytes of each rank, where splitting takes no time, since then no whole backward is
        faster than its two parts, and where all memory but that of weights and optimizer is free for microbatches.
        """
        return bound_of(replace(self._free_costs, limits=tuple(map(sub, limits, self._weight_bytes))))

    @cached_property
    def _free_costs(self) -> OrderCosts:
        whole = frozenset(range(len(self.ranks)) if self.whole_backwards else {0})
        free: Options = {**self.options, "split_seconds": 0.0}
        stages = replace(self, options=free, profile=replace(self.profile, split_share=0.0))
        # Any backward that directly follows its forward recomputes nothing.
        return stages.costs(whole, (), recomputes=False)


def _occupied(route: Route | None) -> float:
    """How long a message keeps the slowest of its links."""
    return 0.0 if route is None else max(seconds for _, seconds in route.legs)


def _seconds(route: Route | None) -> float:
    """From when a message is sent until it has arrived, alone on its links."""
    return 0.0 if route is None else _occupied(route) + route.latency_seconds + route.handling_seconds
