"""The search for an order: the fastest that keeps within a limit in bytes, and a bound of what any order can reach.

A plan says which layers each stage has and where it lies. The order is sought for its measured stages, links and
limits: seeds first, then local moves on the best of them. The simulator judges the best found and every named schedule,
in seconds and bytes; the fastest that fits is the answer, so it is never slower than a named schedule that fits. If
that is asked for, stages change as well: from the best seed on, a cut moves by a layer or a stage begins or ends to
recompute, as long as an order that is adapted to it makes the step shorter; or, if nothing fits, until something does.

More memory should not give a slower order: stages and orders are also sought under lower limits, those of a ladder that
depends on the stages alone; what is found there counts, and the best goes on under the limit itself. A lower limit
whose bound is above what is known is left out. So are some of large orders, for lack of time; and the last moves, under
the limit itself, are of that limit only: what they find under a lower limit by luck a search under a higher one may
miss.
The search draws from a fixed seed: the same question has the same answer. For many microbatches an order of fewer is
found, and a part in its middle repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from math import ceil, inf
from operator import add, sub
from typing import Unpack

from penstock.arguments import FLAG, check_arguments, instance, number
from penstock.errors import PlanError
from penstock.planning.orders.bounds import Bound, bound_of
from penstock.planning.orders.judged_stages import Judged, JudgedStages, named_plans
from penstock.planning.orders.local_moves import StageMoves, improve
from penstock.planning.orders.offloads import offload_order
from penstock.planning.orders.rows import ROUNDING, OrderCosts, Rows, TimedRows, repeated, rows_of, time_rows
from penstock.planning.orders.seeds import adapted_seeds, delay_rows, find_seeds, quick_seeds, spread_weights
from penstock.planning.orders.window_moves import rearrange
from penstock.simulating.assumptions import Options
from penstock.values.clusters import CLUSTER, Cluster
from penstock.values.plans import Plan, schedule
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text, seconds_text, table_lines

_THOROUGH, _QUICK = (1_000, 200_000, 12_000), (200, 40_000, 0)
"""(The most local moves on a seed, the most operations that they time, and those that are then put in windows), under
the limit that was given and under lower ones.
"""
_IMPROVED = 2
"""The seeds that are improved, each of another step and another choice of split backwards or limits."""
_SEARCHED_OPERATIONS = 1_000
"""Orders are sought under one lower limit after another until they have had this number of operations."""
_JUDGED, _JUDGED_OPERATIONS = 4, 600
"""The most seeds of each kind that the simulator judges, and of how many operations together."""
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
_MOVED_STAGES, _LEAST_MOVES = (2_000, 20_000), 3
"""Moves of stages end when seeds for them have this number of operations, but not before there are 3; under a lower
limit, and under the one that was given.
"""
_SELDOM, _DENSE, _SMALL = 3, 150, 200
"""Under every third limit moves begin anew. Limits are left out where orders have more than 150 operations, and slow
starts where they have more than 200.
"""
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
    stages = replace(search.stages, whole_backwards=whole_backwards)
    return replace(search, stages=stages).run(StageMoves(move_cuts, choose_recompute))


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
    stages = replace(search.stages, name=f"{plan.schedule}-limited")
    return replace(replace(search, stages=stages).limited(), planner=plan.planner)


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
    return _Search(JudgedStages(plain, profile, cluster, options), _limits(plan, cluster, memory_bytes))


def _limits(plan: Plan, cluster: Cluster, memory_bytes: float | None) -> tuple[float, ...]:
    """By rank of the schedule: the least memory of its devices."""
    used, width = plan.used(cluster), plan.tensor_parallel
    memories = [used.memory_of(rank) for rank in range(plan.ranks)] if memory_bytes is None else []
    known = [inf if memory is None else memory for memory in memories] or [memory_bytes or inf] * plan.ranks
    return tuple(min(known[first : first + width]) for first in range(0, plan.ranks, width))


@dataclass(frozen=True, slots=True)
class _Start:
    """The best seed under `costs`, and what the simulator says of it; it fits."""

    search: "_Search"
    """That for its stages."""
    costs: OrderCosts
    seed: TimedRows
    judged: Judged

    def under(self, limits: tuple[float, ...]) -> "_Start":
        """This start under higher limits."""
        more = map(sub, limits, self.search.limits)
        costs = replace(self.costs, limits=tuple(map(add, self.costs.limits, more)))
        return replace(self, search=replace(self.search, limits=limits), costs=costs)


@dataclass(frozen=True, slots=True)
class _Search:
    stages: JudgedStages
    limits: tuple[float, ...]
    """By rank of the schedule."""

    def run(self, moves: StageMoves) -> FoundOrder:
        """The best of all orders, and of the stages that `moves` lead to."""
        starts = [start for costs in self._all_costs(self._room) for start in self._starts(costs, _all_seeds)]
        # Those that take equally long are mostly the same; the first has the most memory.
        starts = sorted({start.judged.seconds: start for start in starts[::-1]}.values(), key=_seconds)
        moved = self._moved(starts[:1], moves) if moves.cuts or moves.recomputation else []
        found = [*starts, *moved]
        for start in (*starts[:_IMPROVED], *moved[-1:]):
            found += start.search._improved(start)
        judged = [each for each in self.stages.named if self._fits(each)]
        for search in (self, *(start.search for start in moved[-1:])):
            judged += search._offloaded()
        judged += [start.judged for start in found if self._fits(start.judged)]
        searched = {each.stages.plan: each.stages for each in (self, *(start.search for start in moved))}
        lower = self._below(list(searched.values()), min((each.seconds for each in judged), default=inf))
        if lower:
            best_below = lower[-1].under(self.limits)
            lower += best_below.search._improved(best_below)
        judged += [start.judged for start in lower if self._fits(start.judged)]
        if not judged:
            named = self.stages.named
            least = [bytes_text(min(max(each.peaks) for each in named))] if named else []
            raise PlanError(
                f"find_order: expected an order that takes at most {bytes_text(min(self.limits))} on every rank, found "
                f"none{''.join(f'; the named schedules take {size} or more' for size in least)}. Give more memory or "
                "ranks, smaller microbatches, or recompute=True"
            )
        best = min(judged, key=lambda each: each.seconds)
        bound = replace(self.stages, plan=best.plan).bound(self.limits)
        explained = replace(best.plan, explanation=_explain(best, self.stages.named, bound, self._fits))
        return FoundOrder(explained, bound)

    def _rungs(self, stages: JudgedStages) -> "list[_Search]":
        """The searches for `stages` under each limit of their ladder below this one, and under this one, ascending."""
        least = min(self.limits)
        rungs = [rung for rung in stages.ladder if rung * ROUNDING < least] if len({*self.limits}) == 1 else []
        return [_Search(stages, limits) for limits in (*((rung,) * len(self.limits) for rung in rungs), self.limits)]

    def _below(self, every: Sequence[JudgedStages], known: float) -> list[_Start]:
        """The orders of all these stages that a quick search finds under lower limits, each faster than those before
        and than what is `known`, the least bound first. It ends when no bound is below these seconds.
        """
        rungs = [self._rungs(stages)[:-1] for stages in every]
        waiting: list[tuple[float, int, int]] = []
        found: list[_Start] = []
        left = _SEARCHED_OPERATIONS // self._operations

        def wait(place: int, depth: int) -> None:
            if rungs[place]:
                heappush(waiting, (every[place].bound(rungs[place][-1].limits).seconds, depth, place))

        for place in range(len(every)):
            wait(place, 0)
        while waiting and left and waiting[0][0] < known:
            _, depth, place = heappop(waiting)
            search = rungs[place].pop()
            for start in search._quick_start():
                for each in (start, *search._improved(start, _QUICK)):
                    # What is above its limit may be below that which was given.
                    if each.judged.seconds < known and self._fits(each.judged):
                        known = each.judged.seconds
                        found.append(each)
            left -= 1
            wait(place, depth + 1)
        return found

    @property
    def _room(self) -> tuple[float, ...]:
        """By rank: the bytes for microbatches in flight."""
        return tuple(map(sub, self.limits, self.stages.fixed_bytes))

    def limited(self) -> Plan:
        """The plan with its order delayed where its bytes are above a limit."""
        stages = self.stages
        named = stages.judge(stages.plan)
        if self._fits(named):
            return named.plan
        made = schedule(stages.plan)
        whole = frozenset(stage for stage, late in enumerate(made.guarantees.pending_weight_backwards) if not late)
        rows = rows_of(made, whole)
        assert rows is not None, "backwards of these stages are whole"
        costs = stages.costs(whole, self.limits)
        room = zip(self.limits, named.peaks, rows, strict=True)
        own = replace(costs, limits=tuple(limit - peak + costs.peak(row) for limit, peak, row in room))
        joined = replace(own, whole=frozenset(range(costs.stages)))
        # One microbatch in flight: no rank runs ahead of another, so that no message waits.
        alone = replace(joined, saved=(1.0,) * costs.stages, freed=(), limits=tuple(map(len, costs.held)))
        for tried in (own, joined, alone):
            starts = [each for overtakes in (False, True) for each in self._delayed(tried, rows, overtakes=overtakes)]
            if starts:
                start = min(starts, key=_seconds)
                improved = self._improved(start) if _searched(start.costs) is start.costs else iter(())
                return min((start, *(each for each in improved if self._fits(each.judged))), key=_seconds).judged.plan
        rank = max(range(len(self.limits)), key=lambda rank: named.peaks[rank] / self.limits[rank])
        raise PlanError(
            f"limit_order: expected an order of {made.name} that takes at most {bytes_text(self.limits[rank])} on rank "
            f"{rank}, found none; as it is it takes {bytes_text(named.peaks[rank])}, and one microbatch at a time "
            "takes more than there is, too. Give more memory, smaller microbatches, other stages, or recompute=True"
        )

    def _delayed(self, costs: OrderCosts, rows: Rows, *, overtakes: bool) -> Iterator[_Start]:
        """The plan with `rows` delayed until it fits, under lower limits where that takes more than was known."""
        before: tuple[float, ...] = ()
        for _ in range(_ROUNDS):
            limits = tuple(map(max, costs.limits, costs.least))
            if limits == before:
                return
            costs, before = replace(costs, limits=limits), limits
            timed = min(delay_rows(costs, rows, overtakes=overtakes), key=lambda each: each.score, default=None)
            if timed is None:
                return
            judged = self.stages.judge(self.stages.plan_of(costs, timed))
            if self._fits(judged):
                yield _Start(self, costs, timed, judged)
                return
            costs = replace(costs, limits=tuple(self._lowered(costs, judged, timed)))

    def _offloaded(self) -> Iterator[Judged]:
        """Orders that take too much memory, with what they have too much of offloaded; they fit."""
        stages, plan = self.stages, self.stages.plan
        if stages.cluster.host_bandwidth is None or len(plan.recomputed) == len(plan.stages):
            return
        over = [each.plan for each in stages.named if not self._fits(each)]
        for factor in _RELAXED if max(self.limits) < inf else ():
            relaxed = replace(self, limits=tuple(factor * limit for limit in self.limits))
            starts = (
                start for costs in relaxed._all_costs(relaxed._room) for start in relaxed._starts(costs, _all_seeds)
            )
            over += [start.judged.plan for start in starts]
        for plan in over:
            made = offload_order(stages.name, plan, stages.profile, stages.cluster, self.limits, **stages.options)
            if made is not None:
                yield from filter(self._fits, [stages.judge(made)])

    def _fits(self, judged: Judged) -> bool:
        return all(peak <= limit * ROUNDING for peak, limit in zip(judged.peaks, self.limits, strict=True))

    def _all_costs(self, limits: tuple[float, ...]) -> Iterator[OrderCosts]:
        """One for each choice of the stages whose backwards are split: none, all, and all that have room for it.

        Where a rank has several stages, lower limits are tried, too.

        The backward of the input stage is whole: it sends no gradient, so nothing waits for its first half.
        """
        stages = range(len(self.stages.ranks))
        if min(limits) <= 0:
            return
        yield (every := self.stages.costs(frozenset(stages), limits))
        if not self.stages.whole_backwards:
            # A split backward is followed by a forward only where two microbatches fit.
            full = {stage for stage in stages if limits[every.ranks[stage]] < 2.5 * every.saved[stage]}
            for whole in dict.fromkeys((frozenset({0}), frozenset({0, *full}))):
                if len(whole) < len(stages):
                    yield (split := self.stages.costs(whole, limits))
                    if len(stages) > len(limits) and max(limits) < inf:
                        # Greedy forwards in a V delay what returns: less in flight may be faster.
                        yield replace(split, limits=tuple(_FEWER * limit for limit in limits))

    def _starts(
        self, costs: OrderCosts, seeds_of: Callable[[JudgedStages, OrderCosts], list[TimedRows]]
    ) -> Iterator[_Start]:
        """The best seed that fits. Where messages and workspace take more than was known, under lower limits."""
        for _ in range(_ROUNDS):
            score = partial(_whole_score, costs)
            seeds = sorted(seeds_of(self.stages, _searched(costs))[:_LOOKED_AT], key=score)
            made = [
                _Start(self, costs, seed, self.stages.judge(self.stages.plan_of(costs, seed)))
                for seed in seeds[: self._judged]
                if score(seed) < inf
            ]
            fitting = [start for start in made if self._fits(start.judged)]
            if fitting or not made:
                yield from sorted(fitting, key=_seconds)[:1]
                return
            costs = replace(costs, limits=tuple(self._lowered(costs, made[0].judged, made[0].seed)))
            if min(costs.limits) <= 0:
                return

    def _lowered(self, costs: OrderCosts, judged: Judged, seed: TimedRows) -> Iterator[float]:
        """The limits by which `seed` would have fewer microbatches in flight on the ranks where it does not fit."""
        for rank, row in enumerate(seed.rows):
            excess = judged.peaks[rank] - self.limits[rank]
            yield costs.peak(row) - excess if excess > 0 else costs.limits[rank]

    def _moved(self, given: Sequence[_Start], moves: StageMoves) -> list[_Start]:
        """The best seeds of the stages that `moves` lead to under each limit up to this one. `given`: starts under it.

        Under each limit moves go on from the best of the limit before; under every third also from the stages that were
        given, and from these with all of them recomputing: one stage that does so may gain nothing.
        """
        found: list[_Start] = []
        *lower, last = self._rungs(self.stages)
        apart = ceil(self._operations / _DENSE)
        for turn, search in enumerate([*lower[apart - 1 :: apart], last]):
            is_last, tried = search is last, list[_Start]()
            if found:
                again = replace(search, stages=found[-1].search.stages)._quick_start()
                tried.append(min((found[-1].under(search.limits), *again), key=_seconds))
            if is_last and given:
                tried += [*given, *self._recomputed(given[0], moves)]
            elif is_last or turn % _SELDOM == 0 or not found:
                tried += search._anew(moves)
            descended = [search._descended(start, moves, _MOVED_STAGES[is_last]) for start in tried]
            found += [min(descended, key=_seconds)] if descended else []
        return found

    @property
    def _judged(self) -> int:
        """How many seeds of a kind the simulator judges."""
        return max(1, min(_JUDGED, _JUDGED_OPERATIONS // self._operations))

    @property
    def _operations(self) -> int:
        """The most operations that an order of the stages has."""
        return 3 * len(self.stages.ranks) * self.stages.plan.microbatches

    def _recomputed(self, best: _Start, moves: StageMoves) -> list[_Start]:
        """The starts where all stages recompute, with whole backwards and with split ones; of large orders, if faster.

        A weight part keeps all that was recomputed.
        """
        if not moves.recomputation or self.stages.plan.recompute is True or max(self.limits) == inf:
            return []
        again = self._with(replace(self.stages.plan, recompute=True))
        costs, whole = again._costs_like(best), frozenset(range(best.costs.stages))
        every = dict.fromkeys((whole, costs.whole))
        most = best.judged.seconds if self._operations > _SMALL else inf
        found = [start for each in every for start in again._starts(replace(costs, whole=each), _all_seeds)]
        return [start for start in found if start.judged.seconds < most]

    def _anew(self, moves: StageMoves) -> list[_Start]:
        """Starts for these stages, and for the same with all of them recomputing; for roomier ones if nothing fits."""
        plan, asked = self.stages.plan, [self]
        if moves.recomputation and plan.recompute is not True:
            asked.append(self._with(replace(plan, recompute=True)))
        starts = [start for search in asked for start in search._quick_start()]
        other = None if starts else self._roomier(moves)
        return starts if other is None else other._anew(moves)

    def _quick_start(self) -> list[_Start]:
        """The best of a few seeds, if one fits."""
        every = self._all_costs(tuple(map(sub, self.limits, self.stages.other_bytes)))
        scored = [(min((each.score for each in quick_seeds(_searched(costs))), default=inf), costs) for costs in every]
        starts = list[_Start]()
        for _, costs in sorted(scored, key=lambda each: each[0]):
            starts += self._starts(costs, lambda _, short: quick_seeds(short))
            if len(starts) >= self._judged:
                break
        return sorted(starts, key=_seconds)[:1]

    def _descended(self, best: _Start, moves: StageMoves, operations: int) -> _Start:
        """The start that moves lead to from `best`, as long as they shorten the step."""
        left = max(_LEAST_MOVES, operations // _searched(best.costs).operations)
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
            near = min(map(best._with, moves.of(best.stages.plan)), key=_Search._fullest, default=best)
            if near._fullest() >= share:
                break
            best, share = near, near._fullest()
        return None if best is self else best

    def _with(self, plan: Plan) -> "_Search":
        """This search for the stages of `plan`."""
        return replace(self, stages=replace(self.stages, plan=plan))

    def _fullest(self) -> float:
        """The largest share of its limit that a rank takes with one microbatch in flight."""
        costs = self.stages.costs(frozenset(), self.limits)
        every = zip(costs.least, self.stages.other_bytes, self.limits, strict=True)
        return max((own + other) / most for own, other, most in every)

    def _promising(self, best: _Start, moves: StageMoves) -> list[tuple["_Search", OrderCosts]]:
        """The searches one move away whose bound is below the step of `best`, the least bound first."""
        made: list[tuple[float, int, _Search, OrderCosts]] = []
        for search in map(self._with, moves.of(self.stages.plan)):
            costs = search._costs_like(best)
            if (least := bound_of(costs).seconds) < best.judged.seconds:
                made.append((least, len(made), search, costs))
        return [(search, costs) for *_, search, costs in sorted(made)]

    def _costs_like(self, best: _Start) -> OrderCosts:
        """The costs with the split backwards and in the memory of `best`, and in that of one microbatch at least."""
        room = map(add, best.costs.limits, best.search.stages.other_bytes)
        costs = self.stages.costs(best.costs.whole, tuple(map(sub, room, self.stages.other_bytes)))
        return replace(costs, limits=tuple(map(max, costs.limits, costs.least)))

    def _start_near(self, best: _Start, costs: OrderCosts) -> _Start | None:
        """The start from a seed like that of `best`; None if it does not fit or is not faster."""
        score = partial(_whole_score, costs)
        seed = min(adapted_seeds(_searched(costs), best.seed.rows), key=score, default=None)
        # Rows do not know when the last stage has to recompute.
        late = max(0.0, best.judged.seconds - best.seed.seconds) if _searched(costs) is costs else 0.0
        if seed is None or score(seed) >= _whole_score(best.costs, best.seed) + late:
            return None
        judged = self.stages.judge(self.stages.plan_of(costs, seed))
        faster = self._fits(judged) and judged.seconds < best.judged.seconds
        return _Start(self, costs, seed, judged) if faster else None

    def _improved(self, start: _Start, most: tuple[int, int, int] = _THOROUGH) -> Iterator[_Start]:
        """The best order that leads on from `start`, if it can be repeated; it may not fit."""
        short = _searched(start.costs)
        tries = min(most[0], most[1] // short.operations)
        # Nothing is to be gained where the seed is as fast as any order can be.
        moved = improve(short, start.seed, tries if start.seed.seconds > bound_of(short).seconds * ROUNDING else 0)
        improved = rearrange(short, moved, most[2]) if most[2] else moved
        score = partial(_whole_score, start.costs)
        best = min((improved, *spread_weights(short, improved)), key=score)
        if score(best) < inf:
            yield replace(start, seed=best, judged=self.stages.judge(self.stages.plan_of(start.costs, best)))


def _seconds(start: _Start) -> float:
    return start.judged.seconds


def _all_seeds(stages: JudgedStages, short: OrderCosts) -> list[TimedRows]:
    named = named_plans(replace(stages.plan, microbatches=short.microbatches), whole_backwards=stages.whole_backwards)
    return find_seeds(short, list(map(schedule, named)))


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


def _explain(best: Judged, judged: Sequence[Judged], bound: Bound, fits: Callable[[Judged], bool]) -> str:
    rows = [["order", "step", "peak", ""]]
    for each in sorted({id(each): each for each in [*judged, best]}.values(), key=lambda each: each.seconds):
        note = "taken" if each is best else "" if fits(each) else "too much memory"
        name = str(each.plan.schedule)
        rows.append([name, seconds_text(each.seconds), bytes_text(max(each.peaks)), note])
    gap = bound.gap(best.seconds)
    at_most = f"at most {gap:.1%} from optimal for these stages; bound: {bound.reason}, {seconds_text(bound.seconds)}"
    return "\n".join([*table_lines(rows, left={0, 3}), at_most])
