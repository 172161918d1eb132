"""The search: every planner proposes plans, the simulator predicts them, and the fastest that fits is taken.

Each planner compares by its own closed form, which ignores what only the whole schedule shows: messages that wait for
each other, fill and drain of unequal stages, the peak memory of a rank. So planners only propose.

Rules of the search:
  1. Only plans that were simulated are ranked.
  2. Plans within a thousandth of the fastest count as equally fast. Of these the first in this order is taken: one that
     trains as one device does, one whose replicas take whole microbatches (a part of a microbatch takes longer than its
     share, which a profile of one size does not show), one that needs the least memory, one with the fewest stages.
  3. Constraints choose among the proposals, and do not change them (`PlanConstraints.opened`): each that is made with a
     schedule, without replicas or with recomputation where memory is limited is made without the wish, too. The local
     search treats every family of proposals alike. So no wish should lead to a faster plan than none. A number of
     stages and less memory have proposals of their own, and the local search ends where nothing near is faster: for
     these the rule is a matter of tests.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.errors import PlanError, ScheduleError
from penstock.planning.memory import overfull_rank
from penstock.planning.predictions import prediction_of, speed_of
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.proposals import arrange_cluster, without_kinds
from penstock.planning.search.refinements import Refiner
from penstock.progress import progress_line
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.verification.verifier import verify
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, schedule
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

_SHORTLIST = 12
"""How many plans are simulated, the fastest by closed form; the fastest of each planner and schedule is, too."""

_COMPARED = 4
"""How many plans of a family are simulated where the local search does not know the times or the memory exactly."""

EQUAL = 1e-3
"""A relative difference; predictions are not more accurate than that."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A query without a plan, and the reason."""

    planner: str
    schedule: str
    reason: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    ranked: tuple[Plan, ...]
    """Best first, each with its simulated prediction and its planner."""
    not_simulated: int
    """How many more plans were not simulated, since they are slower by their closed forms."""
    rejections: tuple[Rejection, ...]


def search_plans(
    profiles: Sequence[Profile],
    cluster: Cluster,
    constraints: PlanConstraints,
    *,
    progress: bool | None = False,
    refine: bool = True,
) -> SearchResult:
    """Plans for `cluster` and a model that was measured at one or several microbatch sizes, without tensor parallelism.

    `ranked` is empty if nothing fits. `progress` shows a line on stderr; None shows it on a terminal only. Without
    `refine` the planners' proposals are ranked as they are; so are those of a planner that is named.
    """
    rejections: list[Rejection] = []
    profiles, cluster = without_kinds(profiles, cluster)
    constraints.trials(profiles, cluster)  # raises an error for numbers that leave nothing to try
    opened = constraints.opened() if refine else constraints
    proposals = _propose(profiles, cluster, (constraints, opened), rejections, progress)
    if constraints.planner is None and refine:
        return _refine(proposals, profiles, cluster, constraints, rejections=rejections, progress=progress)
    chosen = _shorten([plan for plan in proposals if constraints.accepts(plan)], cluster.least_memory_bytes is not None)
    sizes = {profile.microbatch_size: profile for profile in profiles}
    simulated: list[Plan] = []
    for plan in progress_line(chosen, lambda plan: str(plan.schedule), "simulating", progress):
        if len(simulated) >= _SHORTLIST and plan.schedule in {other.schedule for other in simulated}:
            continue
        try:
            simulated.append(_simulate_sparingly(plan, sizes[plan.microbatch_size or 0], cluster, constraints))
        except (PlanError, ScheduleError) as error:
            rejections.append(Rejection(plan.planner, str(plan.schedule), str(error)))
    return SearchResult(rank_plans(simulated), len(proposals) - len(chosen), tuple(rejections))


def _propose(
    profiles: Sequence[Profile],
    cluster: Cluster,
    both: tuple[PlanConstraints, PlanConstraints],
    rejections: list[Rejection],
    progress: bool | None,
) -> list[Plan]:
    """The proposals of all planners, each once; `both`: the constraints, and those under which planners propose."""
    constraints, opened = both
    proposals: dict[Plan, Plan] = {}
    allowed = set(constraints.schedules)
    arranged = arrange_cluster(cluster, profiles[0])
    asked = [(each, query) for each in arranged for query in each.queries(profiles, opened)]
    for arrangement, query in progress_line(
        asked, lambda ask: f"{ask[1].planner}, {ask[1].request.schedule}", "planning", progress
    ):
        wished = query.request.schedule in allowed and arrangement.is_whole
        try:
            for proposed in arrangement.propose(query):
                if _is_pointless(proposed) and DEFAULT_SCHEDULE in constraints.schedules:
                    continue
                if constraints.every_device and proposed.ranks != cluster.devices:
                    continue
                if constraints.microbatches not in (None, proposed.microbatches):
                    reason = f"it has {proposed.microbatches} microbatches, and {constraints.microbatches} are required"
                    rejections += [Rejection(query.planner, str(query.request.schedule), reason)] if wished else []
                    continue
                bare = replace(proposed, predicted=None)
                proposals.setdefault(bare, replace(proposed, planner=query.planner))
        except (PlanError, ScheduleError) as error:
            rejections += [Rejection(query.planner, str(query.request.schedule), str(error))] if wished else []
    return list(proposals.values())


def _refine(
    proposals: list[Plan],
    profiles: Sequence[Profile],
    cluster: Cluster,
    constraints: PlanConstraints,
    *,
    rejections: list[Rejection],
    progress: bool | None,
) -> SearchResult:
    """The best plan of every family, after a local search."""
    sizes = {profile.microbatch_size: profile for profile in profiles}
    refiner = Refiner(profiles, cluster, constraints)
    families = refiner.families(proposals)
    finalists = refiner.search(families, progress)
    simulated = []
    for family in progress_line(finalists, lambda family: str(family[0].schedule), "simulating", progress):
        found = []
        for plan in family:
            try:
                found.append(_simulate_sparingly(plan, sizes[plan.microbatch_size or 0], cluster, constraints))
            except (PlanError, ScheduleError) as error:
                rejections.append(Rejection(plan.planner, str(plan.schedule), str(error)))
            if found and (refiner.exact or len(found) == _COMPARED):
                break
        simulated += [max(found, key=speed_of)] if found else []
    others = sum(map(len, families.values())) - len(simulated)
    kept = [each for each in rejections if each.schedule not in {str(plan.schedule) for plan in simulated}]
    return SearchResult(rank_plans(simulated), others, tuple(kept))


def _is_pointless(plan: Plan) -> bool:
    """Whether `plan` is no better than the same under the default schedule: a single stage has no fill and no drain."""
    same = plan.schedule != DEFAULT_SCHEDULE and not plan.definition.updates_per_microbatch
    return len(plan.stages) == 1 and same and plan.routing != "split"


def _shorten(plans: list[Plan], limited: bool) -> list[Plan]:
    """The plans that are worth a simulation, the fastest by closed form first; more of them where memory is `limited`,
    since the first ones may not fit with their messages.
    """
    plans.sort(key=speed_of, reverse=True)
    kinds: set[tuple[str, str]] = set()
    chosen = []
    for position, plan in enumerate(plans):
        kind = plan.planner, str(plan.schedule)
        if position < (2 if limited else 1) * _SHORTLIST or kind not in kinds:
            chosen.append(plan)
        kinds.add(kind)
    return chosen


def _simulate_sparingly(plan: Plan, profile: Profile, cluster: Cluster, constraints: PlanConstraints) -> Plan:
    """`plan` with its simulated prediction, without recomputation if it fits without, unless the user asks for it.

    Recomputation makes no plan faster, and on a stage that has one microbatch in flight it saves no memory.
    """
    if plan.recompute and constraints.recompute is None:
        with suppress(PlanError):
            return simulate_plan(replace(plan, recompute=False), profile, cluster, constraints)
    return simulate_plan(plan, profile, cluster, constraints)


def simulate_plan(plan: Plan, profile: Profile, cluster: Cluster, constraints: PlanConstraints) -> Plan:
    """`plan` with the simulator's prediction; raises `PlanError` if it does not fit with its message buffers."""
    if not isinstance(plan.schedule, str):
        # A schedule of the user's own may be wrong, or wrong for the replicas that a planner gives it.
        verify(schedule(plan))
    return judge_plan(plan, profile, cluster, constraints)


def judge_plan(plan: Plan, profile: Profile, cluster: Cluster, constraints: PlanConstraints) -> Plan:
    """As `simulate_plan`, for a plan whose schedule is proved, or is proved later."""
    outcome = evaluate(plan, profile, cluster, **constraints.simulator_options)
    used = plan.used(cluster)
    worst = overfull_rank(outcome.peak_bytes, used)
    if worst is not None:
        raise PlanError(
            f"rank {worst} needs {bytes_text(outcome.peak_bytes[worst])} with its message buffers: expected at most "
            f"{bytes_text(used.memory_of(worst) or 0)}"
        )
    return replace(plan, predicted=outcome)


def rank_plans(simulated: list[Plan]) -> tuple[Plan, ...]:
    """Fastest first and each once, after the one that rule 2 chooses among those that are equally fast."""
    simulated = sorted(dict.fromkeys(simulated), key=speed_of, reverse=True)
    if not simulated:
        return ()
    equal = [plan for plan in simulated if speed_of(plan) >= (1 - EQUAL) * speed_of(simulated[0])]
    best = min(equal, key=_tie_break)
    return (best, *(plan for plan in simulated if plan is not best))


def _tie_break(plan: Plan) -> tuple[bool, bool, float, int]:
    split = plan.routing == "split" and max(plan.replicas) > 1
    return not plan.definition.flushes, split, max(prediction_of(plan).peak_bytes), len(plan.stages)
