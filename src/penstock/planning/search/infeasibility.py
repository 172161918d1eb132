"""Explains a search without a plan: which memory, devices, recomputation or microbatches would be enough."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, floor, log10

from penstock.errors import PlanError
from penstock.planning.infeasibility import halves, nothing_fits, wider_clusters
from penstock.planning.memory import peak_bytes
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.explanations import shape_text
from penstock.planning.search.plan_search import SearchResult
from penstock.planning.search.tensor_groups import compare_plans, profile_of_plan
from penstock.planning.stage_costs import chain_costs
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

__all__ = ["explain_infeasibility"]


def explain_infeasibility(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints, found: SearchResult
) -> PlanError:
    """The error of a search that `found` no plan."""
    free = cluster.with_memory(None)
    either = replace(constraints, recompute=True) if constraints.recompute is None else constraints
    unlimited = compare_plans(profiles, free, either, refine=False).ranked
    if cluster.least_memory_bytes is None or not unlimited:
        reasons = "; ".join(dict.fromkeys(rejection.reason for rejection in found.rejections))
        return PlanError(f"no plan: {reasons}")
    needed = {plan: _needed_bytes(plan, profiles, constraints) for plan in unlimited}
    least = min(unlimited, key=needed.__getitem__)
    enough, plan = _least_memory(profiles, cluster, constraints, needed[least], least)
    memory = f"{bytes_text(enough)} on each device (for {_name(plan)})"
    changes = _changes(profiles, cluster, constraints)
    return nothing_fits("a plan", cluster, profiles[0].parameter_bytes, [[memory], *changes])


def _least_memory(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints, enough: float, plan: Plan
) -> tuple[float, Plan]:
    """The least memory with which the search finds a plan, up to 1 % and rounded up to three digits, and that plan.

    `enough`: memory that is enough for `plan`.
    """
    too_little = cluster.least_memory_bytes or 0.0
    high = _three_digits_up(enough)
    while high > 1.01 * too_little and (middle := _three_digits_up((too_little + high) / 2)) < high:
        found = compare_plans(profiles, cluster.with_memory(middle), constraints, refine=False).ranked
        if found:
            high, plan = middle, found[0]
        else:
            too_little = middle
    return high, plan


def _three_digits_up(number: float) -> float:
    """`number` rounded up to three digits."""
    unit = 10.0 ** (floor(log10(number)) - 2) if number > 0 else 1.0
    return ceil(number / unit * (1 - 1e-12)) * unit


def _changes(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints
) -> Iterator[Iterator[str | None]]:
    """The attempts of `nothing_fits`: single changes of the search."""

    def attempt(words: str, profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> str | None:
        ranked = compare_plans(profiles, cluster, constraints, refine=False).ranked
        return f"{words} (for {_name(ranked[0])})" if ranked else None

    if constraints.stages is None:
        yield (attempt(f"{wide.devices} devices", profiles, wide, constraints) for wide in wider_clusters(cluster))
    if constraints.recompute is False:
        yield (attempt("recompute=True", profiles, cluster, replace(constraints, recompute=True)) for _ in range(1))
    smallest = min(profiles, key=lambda profile: profile.microbatch_size)
    yield (
        attempt(f"microbatches of {size} samples", (smallest.scaled(size),), cluster, constraints)
        for size in halves(smallest.microbatch_size)
    )


def _needed_bytes(plan: Plan, profiles: Sequence[Profile], constraints: PlanConstraints) -> float:
    """The memory with which the search accepts `plan`: planners count the gradients as if they were permanent."""
    profile = profile_of_plan(plan, profiles)
    counted = peak_bytes(plan, chain_costs(profile, recompute=plan.recompute), constraints.optimizer_copies)
    return max(*counted, *(plan.predicted.peak_bytes if plan.predicted else ()))


def _name(plan: Plan) -> str:
    return f"{plan.schedule} on {shape_text(plan)}" + (" with recomputation" if plan.recompute else "")
