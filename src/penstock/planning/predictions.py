"""The predicted time of a plan, by the closed form of its schedule.

Let t be the time per microbatch of the slowest stage or link, with p stages, m microbatches and v stages per rank. A
minibatch takes [Narayanan 2021, table 1.1; section 4.2 for interleaving]

    with a flush                        (m + (p' - 1) / v) t      p' = p / v ranks, t of a whole rank
    with a flush and split backwards    (m + (p' - 1) / 3v) t     if F, I and W take equally long
    without a flush                     m t                       in the steady state, without fill and drain

Replicas that take microbatches in turn need r t for each one. The pipeline then fills with ``sum of r`` microbatches
instead of p, and the last round of a stage may not be full: ``(r ceil(m / r) + sum of the other r) t`` for the worst
such stage; for d equal pipelines that is ``(m / d + p - 1) d t``. Replicas that split every microbatch are as fast as
one rank that takes t. All stages are assumed to be as slow as the slowest, so the prediction is pessimistic, except
that it ignores the transfers of the first microbatch. `penstock.simulate` is more exact.

Where the prices of devices are known, a prediction also says what samples cost.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf

from penstock.errors import PlanError
from penstock.planning.memory import peak_bytes
from penstock.planning.requests import Request
from penstock.planning.stage_costs import AllReduce, ChainCosts, replicated_seconds
from penstock.simulating.transfer_times import slowest_link
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction, Stage
from penstock.values.profiles import Profile


def predict(
    plan: Plan,
    profile: Profile,
    costs: ChainCosts,
    bottleneck_seconds: float,
    request: Request | None = None,
    *,
    limit: str = "",
) -> Prediction:
    """The prediction for `plan`, given its slowest stage or link in seconds per microbatch, and in words (`limit`).

    The bubble is the idle share of the wall time of all ranks, ``1 - m * work / (ranks * minibatch_seconds)``. For
    equal stages under a flush it is ``(p - 1) / (m + p - 1)``. Unequal stages and slow links add to it.
    """
    seconds = count_rounds(plan) * bottleneck_seconds
    samples = plan.microbatches * profile.microbatch_size
    work = plan.microbatches * float(costs.seconds[0, -1])
    return Prediction(
        minibatch_seconds=seconds,
        samples_per_second=samples / seconds if seconds else inf,
        bottleneck_seconds=bottleneck_seconds,
        peak_bytes=peak_bytes(plan, costs) if request is None else request.peaks(plan, costs),
        bubble=max(0.0, 1 - work / (plan.ranks * seconds)) if seconds else 0.0,
        limit=limit,
    )


def foresee(stages: tuple[Stage, ...], profile: Profile, costs: ChainCosts, cluster: Cluster, request: Request) -> Plan:
    """The plan of `request` with these stages, and its prediction."""
    plan = request.arrange(stages, profile)
    slowest = slowest_seconds(stages, costs, cluster, request.allreduce)
    return replace(plan, predicted=predict(plan, profile, costs, slowest, request))


def prediction_of(plan: Plan) -> Prediction:
    """The prediction of a plan that a planner made. Raises `PlanError` if it has none."""
    if plan.predicted is None:
        raise PlanError("expected a plan with its prediction, found one without: take it from penstock.plan")
    return plan.predicted


def speed_of(plan: Plan) -> float:
    """The predicted samples per second of a plan that a planner made."""
    return prediction_of(plan).samples_per_second


def count_rounds(plan: Plan) -> float:
    """The seconds of a minibatch in units of t."""
    count = plan.microbatches
    definition = plan.definition
    if not definition.flushes:
        return count
    filling = (1 / 3 if definition.splits_backward else 1) / plan.stages_per_rank
    replicas = plan.replicas[: len(plan.stages) // plan.stages_per_rank]
    if plan.routing == "split":
        replicas = (1,) * len(replicas)
    fullest = max(ceil(count / each) * each - each * filling for each in replicas)
    return fullest + sum(replicas) * filling


def slowest_seconds(stages: Sequence[Stage], costs: ChainCosts, cluster: Cluster, allreduce: AllReduce) -> float:
    """Seconds per microbatch of the slowest rank or link of any plan."""
    return slowest_part(stages, costs, cluster, allreduce)[0]


def slowest_part(
    stages: Sequence[Stage], costs: ChainCosts, cluster: Cluster, allreduce: AllReduce
) -> tuple[float, str]:
    """Seconds per microbatch of the slowest rank or link of any plan, and which it is ("stage 2").

    The replicas of a stage all-reduce over the slowest link among them, and a cut uses the slowest link between its two
    stages. If a rank holds several stages, the times of all its stages, and of all cuts of a link, are summed.
    """
    parts: dict[tuple[object, ...], tuple[float, list[int]]] = {}
    folded = [stage.ranks for stage in stages] == [stage.ranks for stage in reversed(stages)]

    def add(place: tuple[object, ...], seconds: float, stage: int) -> None:
        before, held = parts.get(place, (0.0, []))
        parts[place] = before + seconds, [*held, stage]

    reduced = []
    for index, stage in enumerate(stages):
        interval = slice(stage.start, stage.start + 1), slice(stage.stop, stage.stop + 1)
        work = costs.seconds_on(stage.ranks)[interval]
        replicas = len(stage.ranks)
        weights = costs.parameter_bytes[interval]
        bandwidth = _slowest_link(cluster, stage, stage)
        seconds = float(replicated_seconds(work, weights, replicas, bandwidth, allreduce)[0, 0])
        reduced.append(seconds > 1.5 * float(work[0, 0]) / replicas)
        add((stage.ranks,), seconds, index)
        before = stages[index - 1]
        if index and before.ranks != stage.ranks:
            # In a V shape a link carries one cut of each direction.
            ends = sorted((before.ranks, stage.ranks)) if folded else (before.ranks, stage.ranks)
            sent = float(costs.exchange_seconds(_slowest_link(cluster, before, stage))[stage.start])
            add(tuple(ends), sent, index)
    place, (slowest, held) = max(parts.items(), key=lambda part: part[1][0])
    numbers = " and ".join(map(str, held))
    if len(place) == 2:
        return slowest, f"link before stage {numbers}" if len(held) == 1 else f"link before stages {numbers}"
    own = f"stage {numbers}" if len(held) == 1 else f"stages {numbers}"
    return slowest, f"all-reduce of {own}" if any(reduced[stage] for stage in held) else own


def _slowest_link(cluster: Cluster, one: Stage, other: Stage) -> float:
    """The least bandwidth between two different ranks of the two stages; infinite if there are none."""
    return min(slowest_link(cluster, *ends)[0] for ends in ((one.ranks, other.ranks), (other.ranks, one.ranks)))


def cost_per_million(plan: Plan, cluster: Cluster) -> float | None:
    """What a million samples cost under `plan`: the price of its devices for the time; None if no price is known."""
    if plan.predicted is None or not plan.predicted.samples_per_second:
        return None
    price = cluster.price_per_hour(plan.devices or range(plan.ranks))
    return price / 3600 / plan.predicted.samples_per_second * 1e6 if price else None


def cost_of(samples: float, plan: Plan, cluster: Cluster) -> float | None:
    """What this number of samples costs under `plan`; None if no price is known."""
    million = cost_per_million(plan, cluster)
    return None if million is None else million * samples / 1e6
