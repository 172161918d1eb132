"""The search: every planner is asked, the simulator judges what they propose, and the fastest that fits is the plan.

Planners compare by closed forms, each by its own; those leave out what only the whole schedule shows (messages that
wait for each other, fill and drain of unequal stages, what a rank holds at its worst moment). So they only propose.

Laws of this file:
  1. What was judged by the simulator is ranked; nothing else is.
  2. Plans within a thousandth of the fastest count as equally fast. Of these the first in this order is taken: one that
     trains as one device does, one that needs the least memory, one with the fewest stages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from penstock.errors import PlanError, ScheduleError
from penstock.planning.costs import chain_costs
from penstock.planning.memory import peak_bytes
from penstock.planning.pipedream import find_pipedream, plan_pipedream
from penstock.planning.predictions import predict, slowest_seconds
from penstock.planning.requests import Request
from penstock.planning.spp import find_spp
from penstock.planning.two_bw_searches import rank_pipelines
from penstock.planning.uniform import plan_uniform
from penstock.planning.widening import widen
from penstock.planning.wishes import SYNCHRONOUS, Trial, Wishes
from penstock.progress import progress_line
from penstock.simulating.assumptions import Options
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

__all__ = ["PLANNERS", "Planner", "Refusal", "Search", "search"]

_SHORTLIST = 12
"""So many plans are simulated, the fastest by closed form, and the fastest of each planner for each schedule."""

_PROPOSED = 3
"""Parallel pipelines that one trial proposes."""

_BUFFERS = 2
"""Messages on either side of a stage that memory is set aside for, where it is."""

_EQUAL = 1e-3
"""Relative; predictions are not better than that."""

Planner = Callable[[Profile, Cluster, Request], Plan]


@dataclass(frozen=True, slots=True)
class Refusal:
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
    refusals: tuple[Refusal, ...]


def search(profiles: Sequence[Profile], cluster: Cluster, wishes: Wishes, *, progress: bool | None = False) -> Search:
    """Plans for `cluster`, of a model that was measured once or at several microbatch sizes.

    `ranked` is empty if nothing fits. `progress` shows a line on stderr, None on a terminal only.
    """
    refusals: list[Refusal] = []
    proposals: dict[Plan, Plan] = {}
    memo: _Memo = {}
    for trial in progress_line(wishes.trials(profiles, cluster), _title, "planning", progress):
        try:
            for proposed in _propose(trial, cluster, memo):
                if _is_pointless(proposed) and "1f1b-flush" in wishes.schedules:
                    continue
                bare = replace(proposed, predicted=None)
                proposals.setdefault(bare, replace(proposed, planner=trial.planner))
        except (PlanError, ScheduleError) as error:
            refusals.append(Refusal(trial.planner, trial.request.schedule, str(error)))
    chosen = _shorten(list(proposals.values()))
    sizes = {profile.microbatch_size: profile for profile in profiles}
    judged = []
    for plan in progress_line(chosen, lambda plan: plan.schedule, "simulating", progress):
        try:
            judged.append(_judge(plan, sizes[plan.microbatch_size or 0], cluster, wishes))
        except (PlanError, ScheduleError) as error:
            refusals.append(Refusal(plan.planner, plan.schedule, str(error)))
    return Search(_rank(judged), len(proposals) - len(chosen), tuple(refusals))


def _title(trial: Trial) -> str:
    return f"{trial.planner}, {trial.request.schedule}"


_Memo = dict[tuple[int, Request], Plan]


def _propose(trial: Trial, cluster: Cluster, memo: _Memo) -> Iterator[Plan]:
    """The plans of one trial, as their planner predicts them."""
    profile, request = trial.profile, trial.request
    match trial.planner:
        case "pipedream":
            # As the simulator has it: links carry both directions at once.
            at_once = replace(request, full_duplex=True)
            plans = list(_with_room(partial(_plan_once, profile, cluster, memo), profile, cluster, at_once))
            yield from plans or [_demand(None)]
        case "2bw":
            for buffers in (0,) if cluster.memory_bytes is None else (0, _BUFFERS):
                ranked = rank_pipelines(profile, cluster, replace(request, buffers=buffers))
                allowed = [candidate for candidate in ranked if trial.may_recompute or not candidate.recompute]
                yield from (candidate.plan(cluster) for candidate in allowed[:_PROPOSED])
        case "spp":
            yield _demand(find_spp(profile, cluster, request, whole_samples=True))
        case "interleaved":
            yield from _parallel_interleaved(profile, cluster, request)
        case name:
            yield PLANNERS[name](profile, cluster, request)


def _with_room(
    find: Callable[[Request], Plan | None], profile: Profile, cluster: Cluster, request: Request
) -> Iterator[Plan]:
    """What `find` finds; and if that may be too much in memory with messages, also what it finds with room for some."""
    plan = find(request)
    if plan is None:
        return
    yield plan
    if cluster.memory_bytes is not None:
        roomy = chain_costs(profile, recompute=plan.recompute, buffers=_BUFFERS)
        if max(peak_bytes(plan, roomy, request.optimizer_copies)) > cluster.memory_bytes:
            other = find(replace(request, buffers=_BUFFERS))
            yield from () if other is None else (other,)


def _plan_once(profile: Profile, cluster: Cluster, memo: _Memo, request: Request) -> Plan | None:
    if request.schedule == "interleaved":
        return find_pipedream(profile, cluster, request)
    free = replace(request, schedule="1f1b-flush", microbatches=1, vertical_sync=False, buffers=0)
    key = profile.microbatch_size, free
    if key not in memo:
        memo[key] = _demand(find_pipedream(profile, replace(cluster, memory_bytes=None), free))
    costs = chain_costs(profile, recompute=request.recompute, full_duplex=request.full_duplex, buffers=request.buffers)
    plan = request.arrange(memo[key].stages, profile)
    limit = cluster.memory_bytes
    if limit is not None and max(peak_bytes(plan, costs, request.optimizer_copies)) > limit:
        return find_pipedream(profile, cluster, request)
    slowest = slowest_seconds(plan.stages, costs, cluster, request.allreduce)
    return replace(plan, predicted=predict(plan, profile, costs, slowest, request.optimizer_copies))


def _demand(found: Plan | None) -> Plan:
    if found is None:
        raise PlanError("no plan of this kind fits in memory")
    return found


def _parallel_interleaved(profile: Profile, cluster: Cluster, request: Request) -> Iterator[Plan]:
    """d equal interleaved pipelines on all devices, for every d of 2 or more that they and the microbatches allow."""
    for replicas in range(2, cluster.devices + 1):
        length = cluster.devices // replicas
        enough = length * request.stages_per_rank <= len(profile)
        if cluster.devices % replicas or length < 2 or request.microbatches % cluster.devices or not enough:
            continue
        alone = replace(request, microbatches=request.microbatches // replicas, stages=length * request.stages_per_rank)
        one = Cluster.uniform(length, cluster.slowest, cluster.memory_bytes)
        for narrow in _with_room(partial(find_pipedream, profile, one), profile, one, alone):
            yield widen(narrow, replicas, profile, cluster, request)


def _is_pointless(plan: Plan) -> bool:
    """Whether it has nothing over the same under 1f1b-flush: on a single stage there is nothing to fill or drain."""
    return len(plan.stages) == 1 and plan.schedule not in ("1f1b", "1f1b-flush") and plan.routing != "split"


def _shorten(plans: list[Plan]) -> list[Plan]:
    """Those that are worth a simulation, the fastest by closed form first."""
    plans.sort(key=_speed, reverse=True)
    kinds: set[tuple[str, str]] = set()
    chosen = []
    for place, plan in enumerate(plans):
        kind = plan.planner, plan.schedule
        if place < _SHORTLIST or kind not in kinds:
            chosen.append(plan)
        kinds.add(kind)
    return chosen


def _judge(plan: Plan, profile: Profile, cluster: Cluster, wishes: Wishes) -> Plan:
    """`plan` as the simulator predicts it; `PlanError` if it does not fit after all."""
    options: Options = {"optimizer_copies": wishes.optimizer_copies, "shared_nic": wishes.shared_nic}
    if wishes.allreduce != "released":
        options["allreduce"] = wishes.allreduce
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
    equal = [plan for plan in judged if _speed(plan) >= (1 - _EQUAL) * _speed(judged[0])]
    best = min(equal, key=_modesty)
    return (best, *(plan for plan in judged if plan is not best))


def _speed(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.samples_per_second


def _modesty(plan: Plan) -> tuple[bool, float, int]:
    assert plan.predicted is not None
    return plan.schedule not in SYNCHRONOUS, max(plan.predicted.peak_bytes), len(plan.stages)


PLANNERS: Mapping[str, Planner] = MappingProxyType({"pipedream": plan_pipedream, "uniform": plan_uniform})
"""The planners that answer one question with one plan, by name; a new one is its own file and one line here."""
