"""The search: every planner is asked, the simulator judges what they propose, and the fastest that fits is the plan.

Planners compare by closed forms, each by its own; those leave out what only the whole schedule shows (messages that
wait for each other, fill and drain of unequal stages, what a rank holds at its worst moment). So they only propose.

Laws of this file:
  1. What was judged by the simulator is ranked; nothing else is.
  2. Plans within a thousandth of the fastest count as equally fast. Of these the first in this order is taken: one that
     trains as one device does, one that needs the least memory, one with the fewest stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import PlanError, ScheduleError
from penstock.planning.costs import simulator_options
from penstock.planning.search.constraints import PlanConstraints, PlannerQuery
from penstock.planning.search.proposals import Proposer
from penstock.progress import progress_line
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.verification.verifier import verify
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, schedule
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

__all__ = ["EQUAL", "Rejection", "Search", "compare_plans"]

_SHORTLIST = 12
"""So many plans are simulated, the fastest by closed form, and the fastest of each planner for each schedule."""

EQUAL = 1e-3
"""Relative; predictions are not better than that."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A trial that came to no plan, and why."""

    planner: str
    schedule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Search:
    """What came of a search."""

    ranked: tuple[Plan, ...]
    """Best first, each with its simulated prediction and its planner."""
    unjudged: int
    """How many more plans were left out because closed forms said that they are slower."""
    refusals: tuple[Rejection, ...]


def compare_plans(
    profiles: Sequence[Profile], cluster: Cluster, wishes: PlanConstraints, *, progress: bool | None = False
) -> Search:
    """Plans for `cluster`, of a model that was measured once or at several microbatch sizes.

    `ranked` is empty if nothing fits. `progress` shows a line on stderr, None on a terminal only.
    """
    refusals: list[Rejection] = []
    proposals: dict[Plan, Plan] = {}
    proposer = Proposer(cluster)
    for trial in progress_line(wishes.trials(profiles, cluster), _title, "planning", progress):
        try:
            for proposed in proposer.propose(trial):
                if _is_pointless(proposed) and DEFAULT_SCHEDULE in wishes.schedules:
                    continue
                if wishes.microbatches not in (None, proposed.microbatches):
                    reason = f"it takes {proposed.microbatches} microbatches, and {wishes.microbatches} are asked for"
                    refusals.append(Rejection(trial.planner, str(trial.request.schedule), reason))
                    continue
                bare = replace(proposed, predicted=None)
                proposals.setdefault(bare, replace(proposed, planner=trial.planner))
        except (PlanError, ScheduleError) as error:
            refusals.append(Rejection(trial.planner, str(trial.request.schedule), str(error)))
    chosen = _shorten(list(proposals.values()))
    sizes = {profile.microbatch_size: profile for profile in profiles}
    judged = []
    for plan in progress_line(chosen, lambda plan: str(plan.schedule), "simulating", progress):
        try:
            judged.append(_judge(plan, sizes[plan.microbatch_size or 0], cluster, wishes))
        except (PlanError, ScheduleError) as error:
            refusals.append(Rejection(plan.planner, str(plan.schedule), str(error)))
    return Search(_rank(judged), len(proposals) - len(chosen), tuple(refusals))


def _title(trial: PlannerQuery) -> str:
    return f"{trial.planner}, {trial.request.schedule}"


def _is_pointless(plan: Plan) -> bool:
    """Whether it has nothing over the default schedule: on a single stage there is nothing to fill or drain."""
    same = plan.schedule != DEFAULT_SCHEDULE and not plan.definition.updates_per_microbatch
    return len(plan.stages) == 1 and same and plan.routing != "split"


def _shorten(plans: list[Plan]) -> list[Plan]:
    """Those that are worth a simulation, the fastest by closed form first."""
    plans.sort(key=_speed, reverse=True)
    kinds: set[tuple[str, str]] = set()
    chosen = []
    for place, plan in enumerate(plans):
        kind = plan.planner, str(plan.schedule)
        if place < _SHORTLIST or kind not in kinds:
            chosen.append(plan)
        kinds.add(kind)
    return chosen


def _judge(plan: Plan, profile: Profile, cluster: Cluster, wishes: PlanConstraints) -> Plan:
    """`plan` as the simulator predicts it; `PlanError` if it does not fit after all."""
    if not isinstance(plan.schedule, str):
        # A schedule of the user's own may be wrong, or wrong for the replicas that a planner gives it.
        verify(schedule(plan))
    options = simulator_options(wishes.allreduce, wishes.optimizer_copies)
    options["shared_nic"] = wishes.shared_nic
    outcome = evaluate(plan, profile, cluster, **options)
    if cluster.memory_bytes is not None and max(outcome.peak_bytes) > cluster.memory_bytes:
        worst = max(range(plan.ranks), key=outcome.peak_bytes.__getitem__)
        raise PlanError(
            f"rank {worst} needs {bytes_text(outcome.peak_bytes[worst])} with its message buffers: expected at most "
            f"{bytes_text(cluster.memory_bytes)}"
        )
    return replace(plan, predicted=outcome.prediction())


def _rank(judged: list[Plan]) -> tuple[Plan, ...]:
    """Fastest first, but for the one that law 2 takes out of those that are equally fast."""
    judged.sort(key=_speed, reverse=True)
    if not judged:
        return ()
    equal = [plan for plan in judged if _speed(plan) >= (1 - EQUAL) * _speed(judged[0])]
    best = min(equal, key=_modesty)
    return (best, *(plan for plan in judged if plan is not best))


def _speed(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.samples_per_second


def _modesty(plan: Plan) -> tuple[bool, float, int]:
    assert plan.predicted is not None
    return not plan.definition.flushes, max(plan.predicted.peak_bytes), len(plan.stages)
