"""Explains a search without a plan: which memory, devices, recomputation or microbatches would be enough."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.errors import PlanError
from penstock.planning.costs import chain_costs
from penstock.planning.infeasibility import halves, nothing_fits, wider_clusters
from penstock.planning.memory import peak_bytes
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.explanations import shape_text
from penstock.planning.search.searches import SearchResult, compare_plans
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
    unlimited = compare_plans(profiles, free, either).ranked
    if cluster.least_memory_bytes is None or not unlimited:
        reasons = "; ".join(dict.fromkeys(rejection.reason for rejection in found.rejections))
        return PlanError(f"no plan: {reasons}")
    needed = {plan: _needed_bytes(plan, profiles, constraints) for plan in unlimited}
    least = min(unlimited, key=needed.__getitem__)
    memory = f"{bytes_text(needed[least])} on each device (for {_name(least)})"
    changes = _changes(profiles, cluster, constraints)
    return nothing_fits("a plan", cluster, profiles[0].parameter_bytes, [[memory], *changes])


def _changes(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints
) -> Iterator[Iterator[str | None]]:
    """The attempts of `nothing_fits`: single changes of the search."""

    def attempt(words: str, profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> str | None:
        ranked = compare_plans(profiles, cluster, constraints).ranked
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
    profile = next(profile for profile in profiles if profile.microbatch_size == plan.microbatch_size)
    counted = peak_bytes(plan, chain_costs(profile, recompute=plan.recompute), constraints.optimizer_copies)
    return max(*counted, *(plan.predicted.peak_bytes if plan.predicted else ()))


def _name(plan: Plan) -> str:
    return f"{plan.schedule} on {shape_text(plan)}" + (" with recomputation" if plan.recompute else "")
