"""What would be needed where a search found nothing: memory, devices, recomputation. Each was tried, none guessed."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.planning.costs import chain_costs
from penstock.planning.memory import peak_bytes
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.explanations import shape_text
from penstock.planning.search.searches import Search, compare_plans
from penstock.values.clusters import Cluster, LinkLevels
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

__all__ = ["describe_needs"]

_DOUBLINGS = 4
"""How often more devices are tried."""

_MOST_DEVICES = 128
"""Beyond so many a search takes too long for an error message."""


def describe_needs(profiles: Sequence[Profile], cluster: Cluster, wishes: PlanConstraints, found: Search) -> str:
    """The text of the error of a search that `found` no plan."""
    free = replace(cluster, memory_bytes=None)
    least = _least(profiles, free, replace(wishes, recompute=True) if wishes.recompute is None else wishes)
    if cluster.memory_bytes is None or least is None:
        reasons = "; ".join(dict.fromkeys(refusal.reason for refusal in found.refusals))
        return f"no plan: {reasons}"
    enough = [f"{bytes_text(_needed(least, profiles, wishes))} on each device (for {_name(least)})"]
    enough += _try_devices(profiles, cluster, wishes)
    if wishes.recompute is False:
        again = compare_plans(profiles, cluster, replace(wishes, recompute=True)).ranked
        enough += [f"recompute=True (for {_name(again[0])})"] if again else []
    enough += _try_smaller(profiles, cluster, wishes)
    return (
        f"nothing fits: expected a plan with at most {bytes_text(cluster.memory_bytes)} on each of {cluster.devices} "
        f"devices, found none for {bytes_text(profiles[0].parameter_bytes)} of weights. Each of these would be enough: "
        + "; ".join(enough)
    )


def _least(profiles: Sequence[Profile], cluster: Cluster, wishes: PlanConstraints) -> Plan | None:
    """Of the plans without a limit, the one whose fullest device needs the least."""
    found = compare_plans(profiles, cluster, wishes).ranked
    return min(found, key=lambda plan: _needed(plan, profiles, wishes), default=None)


def _try_devices(profiles: Sequence[Profile], cluster: Cluster, wishes: PlanConstraints) -> list[str]:
    """The first doubling of the devices with which something fits."""
    wider = cluster
    for _ in range(_DOUBLINGS):
        wider = _double(wider)
        if wider.devices > _MOST_DEVICES or wishes.stages is not None:
            break
        ranked = compare_plans(profiles, wider, wishes).ranked
        if ranked:
            return [f"{wider.devices} devices of this size (for {_name(ranked[0])})"]
    return []


def _double(cluster: Cluster) -> Cluster:
    """Twice the devices, joined as the outermost level joins them, or by the slowest link of a matrix."""
    if isinstance(cluster.links, LinkLevels):
        *inner, (count, bandwidth) = cluster.links.levels
        return replace(cluster, links=replace(cluster.links, levels=(*inner, (2 * count, bandwidth))))
    return Cluster.uniform(2 * cluster.devices, cluster.slowest, cluster.memory_bytes)


def _try_smaller(profiles: Sequence[Profile], cluster: Cluster, wishes: PlanConstraints) -> list[str]:
    """Half the smallest microbatch, then half of that, until something fits."""
    profile = min(profiles, key=lambda profile: profile.microbatch_size)
    size = profile.microbatch_size
    while size > 1:
        size = -(-size // 2)
        ranked = compare_plans((profile.scaled(size),), cluster, wishes).ranked
        if ranked:
            return [f"microbatches of {size} samples, measured in a profile of their own (for {_name(ranked[0])})"]
    return []


def _needed(plan: Plan, profiles: Sequence[Profile], wishes: PlanConstraints) -> float:
    """What makes the search accept `plan`: planners count the gradients as if they were always there."""
    profile = next(profile for profile in profiles if profile.microbatch_size == plan.microbatch_size)
    counted = peak_bytes(plan, chain_costs(profile, recompute=plan.recompute), wishes.optimizer_copies)
    return max(*counted, *(plan.predicted.peak_bytes if plan.predicted else ()))


def _name(plan: Plan) -> str:
    return f"{plan.schedule} on {shape_text(plan)}" + (" with recomputation" if plan.recompute else "")
