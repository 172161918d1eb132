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
miss (1 of 27 random problems without moves of cuts: 1 % longer). A frontier keeps what is faster than all with as
little memory. The search draws from fixed seeds: the same question has the same answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Unpack

from penstock.arguments import FLAG, check_arguments, instance, number
from penstock.errors import PlanError
from penstock.planning.orders.bounds import Bound
from penstock.planning.orders.judged_stages import Judged, JudgedStages
from penstock.planning.orders.ladder import moved_starts, starts_below
from penstock.planning.orders.limited_search import LimitedSearch, all_seeds, seconds_of, shortened
from penstock.planning.orders.local_moves import StageMoves
from penstock.simulating.assumptions import Options
from penstock.values.clusters import CLUSTER, Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text, seconds_text, table_lines

_IMPROVED = 2
"""The seeds that are improved, each of another step and another choice of split backwards or limits."""
_NEAR = 1.02
"""A seed whose step takes longer than the best that was found by this factor is left: moves on the best gain more."""

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
    return _find(replace(search, stages=stages), StageMoves(move_cuts, choose_recompute))


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
    return replace(_limited(replace(search, stages=stages)), planner=plan.planner)


def _search(
    name: str, plan: Plan, profile: Profile, cluster: Cluster, *, memory_bytes: float | None, options: Options
) -> LimitedSearch:
    given = {"plan": plan, "profile": profile, "cluster": cluster, "memory_bytes": memory_bytes}
    check_arguments(name, _RULES, PlanError, **given)
    if max(plan.replicas) > 1:
        raise PlanError(
            f"{name}: expected stages without replicas, found {plan.replicas} replicas: plan with straight=True"
        )
    plain = replace(plan, vertical_sync=False, predicted=None)
    return LimitedSearch(JudgedStages(plain, profile, cluster, options), _limits(plan, cluster, memory_bytes))


def _limits(plan: Plan, cluster: Cluster, memory_bytes: float | None) -> tuple[float, ...]:
    """By rank of the schedule: the least memory of its devices."""
    used, width = plan.used(cluster), plan.tensor_parallel
    memories = [used.memory_of(rank) for rank in range(plan.ranks)] if memory_bytes is None else []
    known = [inf if memory is None else memory for memory in memories] or [memory_bytes or inf] * plan.ranks
    return tuple(min(known[first : first + width]) for first in range(0, plan.ranks, width))


def _find(search: LimitedSearch, moves: StageMoves) -> FoundOrder:
    """The best of all orders, and of the stages that `moves` lead to."""
    starts = [start for costs in search.all_costs(search.room) for start in search.starts(costs, all_seeds)]
    starts += search.least_delayed()
    # Those that take equally long are mostly the same; the first has the most memory.
    starts = sorted({start.judged.seconds: start for start in starts[::-1]}.values(), key=seconds_of)
    moved = moved_starts(search, starts[:1], moves) if moves.cuts or moves.recomputation else []
    found = [*starts, *moved]
    for start in (*starts[:_IMPROVED], *moved[-1:]):
        if seconds_of(start) <= _NEAR * min(map(seconds_of, found)):
            found += start.search.improved(start)
    judged = [each for each in search.stages.named if search.fits(each)]
    for each in (search, *(start.search for start in moved[-1:])):
        judged += each.offloaded()
    judged += [start.judged for start in found if search.fits(start.judged)]
    searched = {each.stages.plan: each.stages for each in (search, *(start.search for start in moved))}
    lower = starts_below(search, list(searched.values()), min((each.seconds for each in judged), default=inf))
    if lower:
        best_below = lower[-1].under(search.limits)
        lower += best_below.search.improved(best_below)
    judged += [start.judged for start in lower if search.fits(start.judged)]
    if not judged:
        named = search.stages.named
        least = [bytes_text(min(max(each.peaks) for each in named))] if named else []
        raise PlanError(
            f"find_order: expected an order that takes at most {bytes_text(min(search.limits))} on every rank, found "
            f"none{''.join(f'; the named schedules take {size} or more' for size in least)}. Give more memory or "
            "ranks, smaller microbatches, or recompute=True"
        )
    best = min(judged, key=lambda each: each.seconds)
    bound = replace(search.stages, plan=best.plan).bound(search.limits)
    explained = replace(best.plan, explanation=_explain(best, search.stages.named, bound, search.fits))
    return FoundOrder(explained, bound)


def _limited(search: LimitedSearch) -> Plan:
    """The plan with its order delayed where its bytes are above a limit."""
    stages = search.stages
    named = stages.judge(stages.plan)
    if search.fits(named):
        return named.plan
    starts = search.delayed(named)
    if starts:
        start = min(starts, key=seconds_of)
        improved = search.improved(start) if shortened(start.costs) is start.costs else iter(())
        return min((start, *(each for each in improved if search.fits(each.judged))), key=seconds_of).judged.plan
    rank = max(range(len(search.limits)), key=lambda rank: named.peaks[rank] / search.limits[rank])
    raise PlanError(
        f"limit_order: expected an order of {stages.plan.schedule} that takes at most "
        f"{bytes_text(search.limits[rank])} on rank {rank}, found none; as it is it takes "
        f"{bytes_text(named.peaks[rank])}, and one microbatch at a time takes more than there is, too. Give more "
        "memory, smaller microbatches, other stages, or recompute=True"
    )


def _explain(best: Judged, judged: Sequence[Judged], bound: Bound, fits: Callable[[Judged], bool]) -> str:
    rows = [["order", "step", "peak", ""]]
    for each in sorted({id(each): each for each in [*judged, best]}.values(), key=lambda each: each.seconds):
        note = "taken" if each is best else "" if fits(each) else "too much memory"
        name = str(each.plan.schedule)
        rows.append([name, seconds_text(each.seconds), bytes_text(max(each.peaks)), note])
    gap = bound.gap(best.seconds)
    at_most = f"at most {gap:.1%} from optimal for these stages; bound: {bound.reason}, {seconds_text(bound.seconds)}"
    return "\n".join([*table_lines(rows, left={0, 3}), at_most])
