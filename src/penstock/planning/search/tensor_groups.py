"""Tensor parallelism: profiles whose layers are on several devices are planned for groups of devices.

A profile that was measured with t tensor-parallel devices has the seconds of the group and the bytes of one of its
devices. So the planners see a cluster whose devices are groups of t neighbours, and the simulator judges every plan of
groups on the devices themselves, as a plan with `tensor_parallel`. Plans with and without groups are ranked together.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import PlanError, ScheduleError
from penstock.planning.search.constraints import MICROBATCHES_PER_DEVICE, PlanConstraints
from penstock.planning.search.plan_search import Rejection, SearchResult, rank_plans, search_plans, simulate_plan
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels
from penstock.values.plan_stages import members_of
from penstock.values.plans import Plan
from penstock.values.profiles import Profile


def compare_plans(
    profiles: Sequence[Profile],
    cluster: Cluster,
    constraints: PlanConstraints,
    *,
    progress: bool | None = False,
    refine: bool = True,
) -> SearchResult:
    """`search_plans` for every number of tensor-parallel devices that `profiles` were measured with.

    All plans are for the same minibatch: by default four microbatches of the first profile for every device.
    """
    degrees = {profile.tensor_parallel: None for profile in profiles}
    if tuple(degrees) == (1,):
        return search_plans(profiles, cluster, constraints, progress=progress, refine=refine)
    ranked: list[Plan] = []
    rejections: list[Rejection] = []
    not_simulated = 0
    for degree in degrees:
        # The planners take a group for one device.
        own = [replace(profile, tensor_parallel=1) for profile in profiles if profile.tensor_parallel == degree]
        asked = constraints
        if degree > 1 and constraints.microbatches is None and constraints.batch_size is None:
            asked = replace(
                constraints, batch_size=MICROBATCHES_PER_DEVICE * cluster.devices * profiles[0].microbatch_size
            )
        try:
            groups = group_devices(cluster, degree, every_device=constraints.every_device)
            found = search_plans(own, groups, asked, progress=progress, refine=refine)
        except PlanError as error:
            if len(degrees) == 1:
                raise
            rejections.append(Rejection(f"tensor_parallel={degree}", "any schedule", str(error)))
            continue
        not_simulated += found.not_simulated
        rejections += found.rejections
        for plan in found.ranked:
            try:
                ranked.append(_on_cluster(plan, degree, profiles, cluster, constraints))
            except (PlanError, ScheduleError) as error:
                rejections.append(Rejection(plan.planner, str(plan.schedule), str(error)))
    return SearchResult(rank_plans(ranked), not_simulated, tuple(rejections))


def profile_of_plan(plan: Plan, profiles: Sequence[Profile]) -> Profile:
    """The profile that `plan` was made from: that of its microbatch size and its tensor-parallel devices."""
    wanted = (plan.microbatch_size, plan.tensor_parallel)
    return next(each for each in profiles if (each.microbatch_size, each.tensor_parallel) == wanted)


def group_devices(cluster: Cluster, degree: int, *, every_device: bool = False) -> Cluster:
    """The cluster whose devices are groups of `degree` neighbours of `cluster`, each with the memory of one of them.

    Devices that are left over are not used. Raises `PlanError` if a group would span two servers (the innermost level)
    or hold devices of different kinds, if there is no group, or, with `every_device`, if some are left over.
    """
    if degree == 1:
        return cluster
    count, rest = divmod(cluster.devices, degree)
    if not count or (rest and every_device):
        raise PlanError(
            f"tensor_parallel: expected a cluster with {'a multiple of ' if every_device else ''}{degree} devices for "
            f"the profile, found {cluster.devices}: use a profile of layers on fewer devices"
        )
    used = cluster.pick(range(count * degree)) if rest else cluster
    kinds = used.kinds[::degree]
    if used.kinds != tuple(kind for kind in kinds for _ in range(degree)):
        raise PlanError(
            f"tensor_parallel: expected groups of {degree} devices of one kind, found different kinds in a group: "
            "number devices of one kind together in the cluster"
        )
    links = used.links
    if isinstance(links, LinkLevels):
        (innermost, bandwidth), *outer = links.levels
        if innermost % degree:
            raise PlanError(
                f"tensor_parallel: expected servers (the innermost level of the cluster) with a multiple of {degree} "
                f"devices for the profile, found {innermost}: a group of devices is on one server"
            )
        grouped = replace(used, links=replace(links, levels=((innermost // degree, bandwidth), *outer)), kinds=())
    else:
        grouped = replace(used.pick(range(0, count * degree, degree)), kinds=())
    return replace(grouped, kinds=tuple(replace(kind, price_per_hour=degree * kind.price_per_hour) for kind in kinds))


def on_devices(plan: Plan, degree: int) -> Plan:
    """A plan for groups of `degree` devices as a plan for the devices, without its prediction."""
    stages = tuple(replace(stage, ranks=members_of(stage.ranks, degree)) for stage in plan.stages)
    devices = members_of(plan.devices, degree)
    return replace(plan, stages=stages, devices=devices, tensor_parallel=degree, predicted=None)


def _on_cluster(
    plan: Plan, degree: int, profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints
) -> Plan:
    if degree == 1:
        return plan
    whole = on_devices(plan, degree)
    return simulate_plan(whole, profile_of_plan(whole, profiles), cluster, constraints)
