"""Explains a search without a plan: which memory, devices, recomputation or microbatches would be enough."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil, floor, inf, log10

from penstock.errors import PlanError
from penstock.planning.memory import peak_bytes
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.explanations import shape_text
from penstock.planning.search.plan_search import SearchResult
from penstock.planning.search.tensor_groups import compare_plans, profile_of_plan
from penstock.planning.stage_costs import chain_costs
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text

_DOUBLINGS = 4

_MOST_DEVICES = 128
"""With more devices a search takes too long for an error message."""


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
    return _nothing_fits(cluster, profiles[0].parameter_bytes, [[memory], *changes])


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
    """The attempts of `_nothing_fits`: single changes of the search."""

    def attempt(words: str, profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> str | None:
        ranked = compare_plans(profiles, cluster, constraints, refine=False).ranked
        return f"{words} (for {_name(ranked[0])})" if ranked else None

    if constraints.stages is None:
        yield (attempt(f"{wide.devices} devices", profiles, wide, constraints) for wide in _wider_clusters(cluster))
    if constraints.recompute is False:
        yield (attempt("recompute=True", profiles, cluster, replace(constraints, recompute=True)) for _ in range(1))
    smallest = min(profiles, key=lambda profile: profile.microbatch_size)
    yield (
        attempt(f"microbatches of {size} samples", (smallest.scaled(size),), cluster, constraints)
        for size in _halves(smallest.microbatch_size)
    )


def _needed_bytes(plan: Plan, profiles: Sequence[Profile], constraints: PlanConstraints) -> float:
    """The memory with which the search accepts `plan`: planners count the gradients as if they were permanent."""
    profile = profile_of_plan(plan, profiles)
    counted = peak_bytes(plan, chain_costs(profile, recompute=plan.recompute), constraints.optimizer_copies)
    return max(*counted, *(plan.predicted.peak_bytes if plan.predicted else ()))


def _name(plan: Plan) -> str:
    return f"{plan.schedule} on {shape_text(plan)}" + (" with recomputation" if plan.recompute else "")


def _nothing_fits(cluster: Cluster, parameter_bytes: float, attempts: Iterable[Iterable[str | None]]) -> PlanError:
    """The error where no plan fits on `cluster`.

    Each of `attempts` changes one thing, the least change first: it yields the words for a change that is enough, None
    for another. The first of each is named, and later ones are not tried.
    """
    enough = [words for attempt in attempts for words in islice(filter(None, attempt), 1)]
    least = cluster.least_memory_bytes
    memory = inf if least is None else least
    devices = "1 device" if cluster.devices == 1 else f"each of {cluster.devices} devices"
    advice = (
        f"Each of these would be enough: {'; '.join(enough)}"
        if enough
        else f"Use more devices, fewer or smaller microbatches, recompute=True, or the schedule {DEFAULT_SCHEDULE}"
    )
    return PlanError(
        f"nothing fits: expected a plan with at most {bytes_text(memory)} on {devices}, found none for "
        f"{bytes_text(parameter_bytes)} of weights. {advice}"
    )


def _wider_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """2, 4, 8, ... times the devices, connected by the outermost level, or by the slowest link of a matrix."""
    if not cluster.is_equal:
        # Which kind of device to add is not known.
        return
    for _ in range(_DOUBLINGS):
        if 2 * cluster.devices > _MOST_DEVICES:
            return
        if isinstance(cluster.links, LinkLevels):
            *inner, (count, bandwidth) = cluster.links.levels
            links = replace(cluster.links, levels=(*inner, (2 * count, bandwidth)))
            cluster = replace(cluster, links=links, kinds=cluster.kinds * 2)
        else:
            cluster = Cluster.uniform(2 * cluster.devices, cluster.slowest, cluster.least_memory_bytes)
        yield cluster


def _halves(number: int) -> Iterator[int]:
    """Half of `number`, half of that, down to 1."""
    while number > 1:
        number //= 2
        yield number
