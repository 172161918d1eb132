"""The search for an order: the fastest that keeps within a limit in bytes, and a bound of what any order can reach.

A plan says which layers each stage has and where it lies. The order is sought for its measured stages, links and
limits: seeds first, then local moves on the best of them. The simulator judges the best found and every named schedule,
in seconds and bytes; the fastest that fits is the answer, so it is never slower than a named schedule that fits. If
that is asked for, stages change as well: from the best seed on, a cut moves by a layer or a stage begins or ends to
recompute, as long as an order that is adapted to it makes the step shorter; or, if nothing fits, until something does.
The search draws from a fixed seed: the same question has the same answer. For many microbatches an order of fewer is
found, and a part in its middle repeated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import inf
from operator import add, sub
from typing import Unpack

from penstock.arguments import FLAG, check_arguments, instance, number
from penstock.errors import PlanError
from penstock.planning.orders.bounds import Bound, bound_of
from penstock.planning.orders.local_moves import StageMoves, improve
from penstock.planning.orders.offloads import offload_order
from penstock.planning.orders.rows import (
    ROUNDING,
    OrderCosts,
    Rows,
    TimedRows,
    repeated,
    rows_of,
    text_of_rows,
    time_rows,
)
from penstock.planning.orders.seeds import adapted_seeds, delay_rows, find_seeds, spread_weights
from penstock.planning.orders.windows import rearrange
from penstock.planning.planner_names import PlannerName
from penstock.planning.requests import if_runnable
from penstock.scheduling.orders import METHODS
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.written_programs import define_by_programs
from penstock.simulating.action_costs import Costs, plan_costs
from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.outcomes import evaluate
from penstock.simulating.simulator import planned_schedule
from penstock.simulating.transfer_times import Route, find_route
from penstock.values.clusters import CLUSTER, Cluster
from penstock.values.plans import Plan, Prediction, schedule
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text, seconds_text, table_lines

NAME = "found"
"""The name of an order that was found."""
_MOVES, _MOVED_OPERATIONS = 1_000, 200_000
"""Local moves on a seed end when there have been so many, or when this number of operations has been timed ..."""
_PUT = 12_000
"""... and then this number of operations is put in windows."""
_IMPROVED = 2
"""The seeds that are improved, each of another choice of split backwards or limits."""
_ROUNDS = 5
"""How often limits are lowered by what the simulator found above them: links and messages take bytes, too."""
_FEWER = 0.8
"""The share of a limit under which orders of several stages per rank are sought, too."""
_LONG = 6, 64
"""An order of more microbatches than 6 times the ranks, and than 64, repeats its middle ..."""
_SHORT = 3, 48
"""... and is found for 3 times the ranks, or for 48 if these are more."""
_RELAXED = 1.5, 2.5
"""How much more memory orders may take that are brought within their limits by offloads."""
_MOVED_STAGES, _LEAST_MOVES = 20_000, 6
"""Moves of stages end when seeds for them have this number of operations, but not before there are 6."""
_MORE, _LOOKED_AT = 16, 24
"""How much longer rows are when they are compared, and how many are."""

_RULES = {
    "plan": instance(Plan, "a penstock.Plan", "make one with penstock.plan or Plan.balanced"),
    "profile": instance(Profile, "a penstock.Profile", "measure the model with penstock.profile"),
    "cluster": CLUSTER,
    "memory_bytes": number(above=0, unit="bytes").but("give the most bytes of a rank, or leave it out").optional,
    **dict.fromkeys(("whole_backwards", "move_cuts", "choose_recompute"), FLAG),
}


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """Holds a plan with its order, and what any other order of the same stages takes at least."""

    plan: Plan
    """With `predicted` and `explanation`. Its schedule is a named one if no order that was found is faster."""
    bound: Bound

    @property
    def gap(self) -> float:
        """At most this share of a step's time can be gained by another order of the same stages, 0 to 1."""
        return 1.0 if self.plan.predicted is None else self.bound.gap(self.plan.predicted.minibatch_seconds)


def find_order(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    memory_bytes: float | None = None,
    whole_backwards: bool = False,
    move_cuts: bool = False,
    choose_recompute: bool = False,
    **options: Unpack[Options],
) -> FoundOrder:
    """The fastest order for the stages of `plan` that keeps each rank within its memory, as the simulator predicts it.

    `move_cuts`: stages may take layers of their neighbours. `choose_recompute`: other stages may recompute than in
    `plan`. Such moves are made one by one, each of which shortens the step. `memory_bytes`: the most that a rank may
    hold, with weights, optimizer and messages; by default the memory of its device, if the cluster says so.
    `whole_backwards`: no backward is split. `options`: those of `penstock.simulate`. Of the schedule of `plan` only the
    places of its stages are used. Raises `PlanError` if stages have replicas, and if no order fits.
    """
    flags = {"whole_backwards": whole_backwards, "move_cuts": move_cuts, "choose_recompute": choose_recompute}
    check_arguments("find_order", _RULES, PlanError, **flags)
    search = _search("find_order", plan, profile, cluster, memory_bytes=memory_bytes, options=options)
    return search.run(StageMoves(move_cuts, choose_recompute), whole_backwards=whole_backwards)


def limit_order(
    plan: Plan, profile: Profile, cluster: Cluster, *, memory_bytes: float | None = None, **options: Unpack[Options]
) -> Plan:
    """`plan` with the order of its schedule changed so that each rank keeps within its memory, with its prediction.

    A forward waits until its bytes fit, and weight backwards come earlier; where that is not enough, no backward is
    split. Moves on the critical path then shorten the step. A plan that fits keeps its schedule; else `Plan.order` has
    the order. Arguments as for `find_order`. Raises `PlanError` if stages have replicas, if the schedule does not
    flush, and if not even one microbatch at a time fits.
    """
    search = _search("limit_order", plan, profile, cluster, memory_bytes=memory_bytes, options=options)
    if not plan.definition.updates_at_once:
        raise PlanError(
            f"limit_order: expected a schedule that flushes, found {plan.schedule}, whose microbatches in flight train "
            "on older weights: plan with synchronous=True"
        )
    return replace(replace(search, name=f"{plan.schedule}-limited").limited(), planner=plan.planner)


def _search(
    name: str,
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    memory_bytes: float | None,
    options: Options,
) -> "_Search":
    given = {"plan": plan, "profile": profile, "cluster": cluster, "memory_bytes": memory_bytes}
    check_arguments(name, _RULES, PlanError, **given)
    if max(plan.replicas) > 1:
        raise PlanError(
            f"{name}: expected stages without replicas, found {plan.replicas} replicas: plan with straight=True"
        )
    plain = replace(plan, vertical_sync=False, predicted=None)
    return _Search(plain, profile, cluster, _limits(plan, cluster, memory_bytes), options)


def named_plans(plan: Plan, *, whole_backwards: bool = False) -> Iterator[Plan]:
    """The stages of `plan` under each named schedule that can run them and could make its updates at the end of a step;
    without predictions. `whole_backwards`: under none that splits backwards.
    """
    for method in METHODS:
        if method.updates_at_once and not (whole_backwards and method.splits_backward):
            made = if_runnable(lambda method=method: replace(plan, schedule=method, predicted=None))  # type: ignore[misc]
            if made is not None:
                yield made


def _limits(plan: Plan, cluster: Cluster, memory_bytes: float | None) -> tuple[float, ...]:
    """By rank of the schedule: the least memory of its devices."""
    used, width = plan.used(cluster), plan.tensor_parallel
    memories = [used.memory_of(rank) for rank in range(plan.ranks)] if memory_bytes is None else []
    known = [inf if memory is None else memory for memory in memories] or [memory_bytes or inf] * plan.ranks
    return tuple(min(known[first : first + width]) for first in range(0, plan.ranks, width))


@dataclass(frozen=True, slots=True)
class _Judged:
    """A plan, what the simulator says of it, and the most bytes that each rank of the schedule holds."""

    plan: Plan
    prediction: Prediction
    peaks: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.prediction.minibatch_seconds


@dataclass(frozen=True, slots=True)
class _Start:
    """The best seed under `costs`, and what the simulator says of it; it fits."""

    search: "_Search"
    """That for its stages."""
    costs: OrderCosts
    seed: TimedRows
    judged: _Judged


@dataclass(frozen=True)
class _Search:
    plan: Plan
    profile: Profile
    cluster: Cluster
    limits: tuple[float, ...]
    """By rank of the schedule."""
    options: Options
    name: str = NAME
    """Of an order that is found."""

    def run(self, moves: StageMoves, *, whole_backwards: bool) -> FoundOrder:
        """The best of all orders, and of the stages that `moves` lead to."""
        made = list(named_plans(self.plan, whole_backwards=whole_backwards))
        named = list(map(self._judge, made))
        fixed = self._fixed_bytes(list(map(schedule, made)), named)
        limits = tuple(map(sub, self.limits, fixed))
        every = list(self._all_costs(limits, whole_backwards=whole_backwards))
        starts = [start for costs in every if min(costs.limits) > 0 for start in self._starts(costs)]
        starts.sort(key=lambda each: each.judged.seconds)
        moved = self._moved(starts[0], moves) if starts else []
        judged = [each for each in named if self._fits(each)] + [start.judged for start in (*starts, *moved)]
        for start in (*starts[:_IMPROVED], *moved[:1]):
            judged += filter(self._fits, start.search._improved(start))
        offloaded = partial(_Search._offloaded, whole_backwards=whole_backwards)
        judged += filter(self._fits, offloaded(self, named, limits))
        for start in moved:
            judged += filter(self._fits, offloaded(start.search, (), start.costs.limits))
        if not judged and (other := self._roomier(moves)) is not None:
            return other.run(moves, whole_backwards=whole_backwards)
        if not judged:
            least = [bytes_text(min(max(each.peaks) for each in named))] if named else []
            raise PlanError(
                f"find_order: expected an order that takes at most {bytes_text(min(self.limits))} on every rank, found "
                f"none{''.join(f'; the named schedules take {size} or more' for size in least)}. Give more memory or "
                "ranks, smaller microbatches, or recompute=True"
            )
        best = min(judged, key=lambda each: each.seconds)
        bound = replace(self, plan=best.plan)._bound(whole_backwards=whole_backwards)
        explained = replace(best.plan, explanation=_explain(best, named, bound, self._fits))
        return FoundOrder(explained, bound)

    def limited(self) -> Plan:
        """The plan with its order delayed where its bytes are above a limit."""
        named = self._judge(self.plan)
        if self._fits(named):
            return named.plan
        made = schedule(self.plan)
        whole = frozenset(stage for stage, late in enumerate(made.guarantees.pending_weight_backwards) if not late)
        rows = rows_of(made, whole)
        assert rows is not None, "backwards of these stages are whole"
        costs = self._costs(whole, self.limits)
        room = zip(self.limits, named.peaks, rows, strict=True)
        own = replace(costs, limits=tuple(limit - peak + costs.peak(row) for limit, peak, row in room))
        joined = replace(own, whole=frozenset(range(costs.stages)))
        # One microbatch in flight: no rank runs ahead of another, so that no message waits.
        alone = replace(joined, saved=(1.0,) * costs.stages, limits=tuple(map(len, costs.held)))
        for tried in (own, joined, alone):
            starts = [each for overtakes in (False, True) for each in self._delayed(tried, rows, overtakes=overtakes)]
            if starts:
                start = min(starts, key=lambda each: each.judged.seconds)
                is_short = _searched(start.costs) is start.costs
                held = [start.judged, *filter(self._fits, self._improved(start) if is_short else ())]
                return min(held, key=lambda each: each.seconds).plan
        rank = max(range(len(self.limits)), key=lambda rank: named.peaks[rank] / self.limits[rank])
        raise PlanError(
            f"limit_order: expected an order of {made.name} that takes at most {bytes_text(self.limits[rank])} on rank "
            f"{rank}, found none; as it is it takes {bytes_text(named.peaks[rank])}, and one microbatch at a time "
            "takes more than there is, too. Give more memory, smaller microbatches, other stages, or recompute=True"
        )

    def _delayed(self, costs: OrderCosts, rows: Rows, *, overtakes: bool) -> Iterator[_Start]:
        """The plan with `rows` delayed until it fits, under lower limits where that takes more than was known."""
        # No order has less in flight than one microbatch on all stages of a rank.
        least = [sum(costs.saved[stage] for stage in held) for held in costs.held]
        before: tuple[float, ...] = ()
        for _ in range(_ROUNDS):
            limits = tuple(map(max, costs.limits, least))
            if limits == before:
                return
            costs, before = replace(costs, limits=limits), limits
            timed = min(delay_rows(costs, rows, overtakes=overtakes), key=lambda each: each.score, default=None)
            if timed is None:
                return
            judged = self._judge(self._plan(costs, timed))
            if self._fits(judged):
                yield _Start(self, costs, timed, judged)
                return
            costs = replace(costs, limits=tuple(self._lowered(costs, judged, timed)))

    def _offloaded(
        self, named: Sequence[_Judged], limits: tuple[float, ...], *, whole_backwards: bool
    ) -> Iterator[_Judged]:
        """Orders that take too much memory, with what they have too much of offloaded."""
        if self.cluster.host_bandwidth is None or len(self.plan.recomputed) == len(self.plan.stages):
            return
        over = [each.plan for each in named if not self._fits(each)]
        for factor in _RELAXED if max(limits) < inf else ():
            relaxed = replace(self, limits=tuple(factor * limit for limit in self.limits))
            lower = tuple(factor * limit - limit + rest for limit, rest in zip(self.limits, limits, strict=True))
            every = relaxed._all_costs(lower, whole_backwards=whole_backwards)
            over += [start.judged.plan for costs in every if min(costs.limits) > 0 for start in relaxed._starts(costs)]
        for plan in over:
            made = offload_order(NAME, plan, self.profile, self.cluster, self.limits, **self.options)
            if made is not None:
                yield self._judge(made)

    def _judge(self, plan: Plan) -> _Judged:
        prediction = evaluate(plan, self.profile, self.cluster, **self.options)
        judged = replace(plan, predicted=prediction, planner=PlannerName.ORDER.value)
        return _Judged(judged, prediction, prediction.peak_bytes[:: plan.tensor_parallel])

    def _fits(self, judged: _Judged) -> bool:
        return all(peak <= limit for peak, limit in zip(judged.peaks, self.limits, strict=True))

    def _fixed_bytes(self, made: Sequence[Schedule], named: Sequence[_Judged]) -> list[float]:
        """By rank: the least bytes that are not those of microbatches in flight, at the peak of a named schedule."""
        costs = self._costs(frozenset(), self.limits)
        found = [
            [peak - costs.peak(row) for peak, row in zip(judged.peaks, rows, strict=True)]
            for schedule_of, judged in zip(made, named, strict=True)
            if (rows := rows_of(schedule_of, costs.whole)) is not None
        ]
        return [min(each) for each in zip(*found, strict=True)] or [0.0] * len(self.limits)

    def _all_costs(self, limits: tuple[float, ...], *, whole_backwards: bool) -> Iterator[OrderCosts]:
        """One for each choice of the stages whose backwards are split: none, all, and all that have room for it.

        Where a rank has several stages, lower limits are tried, too.

        The backward of the input stage is whole: it sends no gradient, so nothing waits for its first half.
        """
        stages = range(len(self.plan.stages))
        yield (every := self._costs(frozenset(stages), limits))
        if not whole_backwards:
            # A split backward is followed by a forward only where two microbatches fit.
            full = {stage for stage in stages if limits[every.ranks[stage]] < 2.5 * every.saved[stage]}
            for whole in dict.fromkeys((frozenset({0}), frozenset({0, *full}))):
                if len(whole) < len(stages):
                    yield (split := self._costs(whole, limits))
                    if len(stages) > len(limits) and max(limits) < inf:
                        # Greedy forwards in a V delay what returns: less in flight may be faster.
                        yield replace(split, limits=tuple(_FEWER * limit for limit in limits))

    def _starts(self, costs: OrderCosts) -> Iterator[_Start]:
        """The best seed that fits. Where messages and workspace take more than was known, under lower limits."""
        for _ in range(_ROUNDS):
            short = _searched(costs)
            named = named_plans(replace(self.plan, microbatches=short.microbatches))
            seeds = find_seeds(short, list(map(schedule, named)))
            seed = min(seeds[:_LOOKED_AT], key=partial(_whole_score, costs), default=None)
            if seed is None or _whole_score(costs, seed) == inf:
                return
            judged = self._judge(self._plan(costs, seed))
            if self._fits(judged):
                yield _Start(self, costs, seed, judged)
                return
            costs = replace(costs, limits=tuple(self._lowered(costs, judged, seed)))

    def _lowered(self, costs: OrderCosts, judged: _Judged, seed: TimedRows) -> Iterator[float]:
        """The limits by which `seed` would have fewer microbatches in flight on the ranks where it does not fit."""
        for rank, row in enumerate(seed.rows):
            excess = judged.peaks[rank] - self.limits[rank]
            yield costs.peak(row) - excess if excess > 0 else costs.limits[rank]

    def _moved(self, best: _Start, moves: StageMoves) -> list[_Start]:
        """The best seed of the stages that `moves` lead to, each of which shortens the step; none if no move does."""
        found = [self._descended(start, moves) for start in (best, *self._recomputed(best, moves))]
        others = [start for start in found if start.search is not self]
        return sorted(others, key=lambda each: each.judged.seconds)[:1]

    def _recomputed(self, best: _Start, moves: StageMoves) -> list[_Start]:
        """The start where all stages recompute, if it is faster: one stage that does so may gain nothing.

        Backwards are whole, since a weight part keeps all that was recomputed.
        """
        if not moves.recomputation or self.plan.recompute is True or max(self.limits) == inf:
            return []
        again = replace(self, plan=replace(self.plan, recompute=True))
        costs = replace(again._costs_like(best), whole=frozenset(range(best.costs.stages)))
        return [start for start in again._starts(costs) if start.judged.seconds < best.judged.seconds]

    def _descended(self, best: _Start, moves: StageMoves) -> _Start:
        """The start that moves lead to from `best`, as long as they shorten the step."""
        left = max(_LEAST_MOVES, _MOVED_STAGES // _searched(best.costs).operations)
        found: _Start | None = best
        while found is not None and left > 0:
            best, found = found, None
            for search, costs in best.search._promising(best, moves)[:left]:
                left -= 1
                found = search._start_near(best, costs)
                if found is not None:
                    break
        return found or best

    def _roomier(self, moves: StageMoves) -> "_Search | None":
        """The search for stages of which a microbatch takes a smaller share of the limits; None if no move leads there.

        Moves end when the share is at most 1.
        """
        best, share = self, self._fullest()
        while best is self or share > 1:
            near = min((replace(self, plan=plan) for plan in moves.of(best.plan)), key=_Search._fullest, default=best)
            if near._fullest() >= share:
                break
            best, share = near, near._fullest()
        return None if best is self else best

    def _fullest(self) -> float:
        """The largest share of its limit that a rank takes with one microbatch in flight."""
        costs = self._costs(frozenset(), self.limits)
        kept = [sum(costs.saved[stage] for stage in held) for held in costs.held]
        return max((own + other) / most for own, other, most in zip(kept, self._other_bytes, self.limits, strict=True))

    def _promising(self, best: _Start, moves: StageMoves) -> list[tuple["_Search", OrderCosts]]:
        """The searches one move away whose bound is below the step of `best`, the least bound first."""
        made: list[tuple[float, int, _Search, OrderCosts]] = []
        for search in (replace(self, plan=plan) for plan in moves.of(self.plan)):
            costs = search._costs_like(best)
            if (least := bound_of(costs).seconds) < best.seed.seconds:
                made.append((least, len(made), search, costs))
        return [(search, costs) for *_, search, costs in sorted(made)]

    def _costs_like(self, best: _Start) -> OrderCosts:
        """The costs with the split backwards and in the memory of `best`, and in that of one microbatch at least."""
        room = map(add, best.costs.limits, best.search._other_bytes)
        costs = self._costs(best.costs.whole, tuple(map(sub, room, self._other_bytes)))
        least = [sum(costs.saved[stage] for stage in held) for held in costs.held]
        return replace(costs, limits=tuple(map(max, costs.limits, least)))

    def _start_near(self, best: _Start, costs: OrderCosts) -> _Start | None:
        """The start from a seed like that of `best`; None if it does not fit or is not faster."""
        score = partial(_whole_score, costs)
        seed = min(adapted_seeds(_searched(costs), best.seed.rows), key=score, default=None)
        if seed is None or score(seed) >= _whole_score(best.costs, best.seed):
            return None
        judged = self._judge(self._plan(costs, seed))
        faster = self._fits(judged) and judged.seconds < best.judged.seconds
        return _Start(self, costs, seed, judged) if faster else None

    def _improved(self, start: _Start) -> Iterator[_Judged]:
        """The best order that leads on from `start`, if it can be repeated; it may not fit."""
        short = _searched(start.costs)
        tries = min(_MOVES, _MOVED_OPERATIONS // short.operations)
        # Nothing is to be gained where the seed is as fast as any order can be.
        moved = improve(short, start.seed, tries if start.seed.seconds > bound_of(short).seconds * ROUNDING else 0)
        improved = rearrange(short, moved, _PUT)
        score = partial(_whole_score, start.costs)
        best = min((improved, *spread_weights(short, improved)), key=score)
        if score(best) < inf:
            yield self._judge(self._plan(start.costs, best))

    def _plan(self, costs: OrderCosts, timed: TimedRows) -> Plan:
        """The plan with the order of these rows."""
        text = text_of_rows(costs, timed.rows, repeats=sum(map(len, timed.rows)) < costs.operations)
        return replace(self.plan, schedule=define_by_programs(self.name, text))

    @cached_property
    def _plan_costs(self) -> Costs:
        skips = planned_schedule(self.plan, self.profile).skips
        options = Assumptions(**self.options)
        return plan_costs(self.plan, self.profile, self.cluster, self.plan.placement, options, skips=skips)

    def _costs(self, whole: frozenset[int], limits: tuple[float, ...], *, recomputes: bool = True) -> OrderCosts:
        plan, costs = self.plan, self._plan_costs
        ranks = tuple(held[0] for held in plan.placement.stages)
        stages = range(len(ranks))
        times = [costs.times_of(rank) for rank in ranks]
        weight = [own.weight_seconds[stage] for stage, own in zip(stages, times, strict=True)]
        # The backward of the last stage can directly follow its forward, and then recomputes nothing.
        recomputed = plan.recomputed if recomputes else frozenset()
        again = [times[stage].forward_seconds[stage] if stage in recomputed else 0.0 for stage in stages[:-1]] + [0.0]
        added = [costs.split_seconds + costs.split_share * times[stage].backward_seconds[stage] for stage in stages]
        inputs = (0.0, *costs.cut_bytes)
        routes = self._routes
        carried, returned = (tuple(map(_seconds, own)) for own in routes)
        return OrderCosts(
            ranks=ranks,
            microbatches=plan.microbatches,
            forward=tuple(own.forward_seconds[stage] for stage, own in zip(stages, times, strict=True)),
            backward=tuple(times[stage].input_seconds[stage] + again[stage] for stage in stages),
            weight=tuple(weight[stage] + (0.0 if stage in whole else added[stage]) for stage in stages),
            activation=carried,
            # A recomputation is over when the gradient comes, if there was time.
            gradient=tuple(seconds - again[stage] for stage, seconds in enumerate(returned)),
            saved=tuple((inputs if stage in plan.recomputed else costs.saved_bytes)[stage] for stage in stages),
            limits=limits,
            occupied=tuple(tuple(map(_occupied, own)) for own in routes),
            whole=whole,
            movable=costs.offloaded_bytes,
            host_bandwidth=self.cluster.host_bandwidth or 0.0,
        )

    @cached_property
    def _other_bytes(self) -> list[float]:
        """By rank: the bytes of weights, gradients and optimizer, and of the microbatch that is computed."""
        costs, ranks = self._plan_costs, [held[0] for held in self.plan.placement.stages]
        found, most = _weight_bytes(costs, ranks), [0.0] * len(self.limits)
        for stage, rank in enumerate(ranks):
            found[rank] += costs.parameter_bytes[stage]
            again = costs.saved_bytes[stage] if stage in costs.recomputed else 0.0
            most[rank] = max(most[rank], costs.workspace_bytes[stage] + again)
        return list(map(add, found, most))

    @cached_property
    def _routes(self) -> tuple[list[Route | None], list[Route | None]]:
        """By cut: the routes of an activation, and those of a gradient; None within a rank."""
        cluster, width = self.plan.used(self.cluster), self.plan.tensor_parallel
        shared, ranks = Assumptions(**self.options).shared_nic, [held[0] for held in self.plan.placement.stages]

        def routes(ends: Iterable[tuple[int, int]]) -> list[Route | None]:
            sizes = zip(self._plan_costs.wire_bytes, ends, strict=True)
            return [
                None if here == there else find_route(cluster, size, (here,), (there,), shared=shared, width=width)
                for size, (here, there) in sizes
            ]

        return routes(pairwise(ranks)), routes((here, there) for there, here in pairwise(ranks))

    def _bound(self, *, whole_backwards: bool) -> Bound:
        """The bound where splitting takes no time, since then no whole backward is faster than its two parts, and where
        all memory but that of weights and optimizer is free for microbatches.
        """
        whole = frozenset(range(len(self.plan.stages)) if whole_backwards else {0})
        free: Options = {**self.options, "split_seconds": 0.0}
        search = replace(self, options=free, profile=replace(self.profile, split_share=0.0))
        costs, ranks = self._plan_costs, [held[0] for held in self.plan.placement.stages]
        limits = map(sub, self.limits, _weight_bytes(costs, ranks))
        # Any backward that directly follows its forward recomputes nothing.
        return bound_of(search._costs(whole, tuple(limits), recomputes=False))


def _whole_score(costs: OrderCosts, timed: TimedRows) -> float:
    """The score of rows with some more microbatches, if their middle is repeated; infinite if that cannot run."""
    short = _searched(costs)
    if short is costs:
        return timed.score
    longer = replace(short, microbatches=short.microbatches + _MORE)
    rows = repeated(timed.rows, _MORE)
    whole = None if rows is None else time_rows(longer, rows)
    return inf if whole is None else whole.score


def _searched(costs: OrderCosts) -> OrderCosts:
    """`costs` with the microbatches that an order is found for."""
    if costs.microbatches <= max(_LONG[0] * costs.length, _LONG[1]):
        return costs
    return replace(costs, microbatches=max(_SHORT[0] * costs.length, _SHORT[1]))


def _weight_bytes(costs: Costs, ranks: Sequence[int]) -> list[float]:
    """By rank: the bytes of weights, optimizer and libraries. `ranks`: of each stage."""
    options, found = costs.assumptions, [costs.library_bytes] * (max(ranks) + 1)
    for rank, size, frozen in zip(ranks, costs.parameter_bytes, costs.frozen_bytes, strict=True):
        found[rank] += (options.version_copies + options.optimizer_copies + options.master_copies) * size + frozen
    return found


def _occupied(route: Route | None) -> float:
    """How long a message keeps the slowest of its links."""
    return 0.0 if route is None else max(seconds for _, seconds in route.legs)


def _seconds(route: Route | None) -> float:
    """From when a message is sent until it has arrived, alone on its links."""
    return 0.0 if route is None else _occupied(route) + route.latency_seconds + route.handling_seconds


def _explain(best: _Judged, judged: Sequence[_Judged], bound: Bound, fits: Callable[[_Judged], bool]) -> str:
    rows = [["order", "step", "peak", ""]]
    for each in sorted({id(each): each for each in [*judged, best]}.values(), key=lambda each: each.seconds):
        note = "taken" if each is best else "" if fits(each) else "too much memory"
        name = str(each.plan.schedule)
        rows.append([name, seconds_text(each.seconds), bytes_text(max(each.peaks)), note])
    gap = bound.gap(best.seconds)
    at_most = f"at most {gap:.1%} from optimal for these stages; bound: {bound.reason}, {seconds_text(bound.seconds)}"
    return "\n".join([*table_lines(rows, left={0, 3}), at_most])
