"""The entry point of planning: one function, from a profile and a cluster to the best plan."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import cast

from penstock.arguments import FLAG, check_arguments, instance
from penstock.errors import PlanError
from penstock.planning.costs import require_allreduce
from penstock.planning.memory import OPTIMIZER_COPIES
from penstock.planning.ptd_p.three_d import plan_three_d
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.explanations import explain_search, wire_note
from penstock.planning.search.infeasibility import explain_infeasibility
from penstock.planning.search.searches import compare_plans, simulated_with
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.simulating.losses import find_losses
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.transformers import Transformer

__all__ = ["plan"]


_RULES = {
    "cluster": instance(
        Cluster, "a penstock.Cluster", "describe it with Cluster.uniform, or read a file with Cluster.load"
    ),
    "progress": FLAG.optional,
}


def plan(
    profile: Profile | Sequence[Profile] | Transformer,
    cluster: Cluster,
    *,
    planner: str | None = None,
    schedule: ScheduleDefinition | str | None = None,
    microbatches: int | None = None,
    batch_size: int | None = None,
    stages: int | None = None,
    stages_per_rank: int | None = None,
    straight: bool = False,
    synchronous: bool = False,
    vertical_sync: bool = False,
    recompute: bool | None = None,
    allreduce: str = "ring",
    optimizer_copies: float = OPTIMIZER_COPIES,
    shared_nic: bool = False,
    whole_backwards: bool = False,
    progress: bool | None = None,
) -> Plan:
    """The fastest plan of `profile` on `cluster` that fits in its memory, as the simulator predicts it.

    `Plan.explain` shows the ranked table of candidates. Options that are not given are searched:

    `planner`: `pipedream` (fastest slowest stage, replicas in turn), `spp` (microbatches split over replicas), `2bw`
    (equal parallel pipelines of repeated blocks), `interleaved` (parallel pipelines with several stages per rank, also
    for `zb-v`), `uniform` (equally many layers per stage; used by name only). `schedule`: one of
    `penstock.values.SCHEDULES`; `synchronous` restricts it to those that train as one device does. `microbatches` is
    their number in a minibatch, over all replicas; alternatively, `batch_size` is its number of samples. The default is
    four microbatches for every device (one under `pipedream`, where each microbatch has its own update). With several
    profiles of one model, measured at different microbatch sizes, the search also chooses the size. `stages`:
    exactly this number, on all ranks together; they may have replicas. `straight`: no replicas. `recompute`: both
    are tried where memory is limited. `optimizer_copies`: the optimizer's state in units of the weights (2: Adam).
    `shared_nic`: the ranks of a server (the innermost level of the cluster) share one link to each other server; by
    default every two ranks have their own. `whole_backwards` excludes `zb-h1` and `zb-v`. `progress` shows a line on
    stderr; None shows it on a terminal.

    A `Transformer` instead of a profile is planned by PTD-P (`penstock.planning.plan_three_d`), which also chooses
    tensor parallelism; it needs a `batch_size`.

    Raises `PlanError` for options that contradict each other, and if nothing fits in memory: then the error says what
    would be enough.
    """
    check_arguments("plan", {"cluster": cluster, "progress": progress}, _RULES, PlanError)
    constraints = PlanConstraints(
        planner=planner,
        schedule=schedule,
        microbatches=microbatches,
        batch_size=batch_size,
        stages=stages,
        stages_per_rank=stages_per_rank,
        straight=straight,
        synchronous=synchronous,
        vertical_sync=vertical_sync,
        recompute=recompute,
        allreduce=require_allreduce(allreduce),
        optimizer_copies=optimizer_copies,
        shared_nic=shared_nic,
        whole_backwards=whole_backwards,
    )
    if isinstance(profile, Transformer):
        return _plan_transformer(profile, cluster, constraints)
    profiles = _check_profiles(profile)
    found = compare_plans(profiles, cluster, constraints, progress=progress)
    if not found.ranked:
        raise explain_infeasibility(profiles, cluster, constraints, found)
    best = found.ranked[0]
    measured = next(one for one in profiles if one.microbatch_size == best.microbatch_size)
    losses = find_losses(best, measured, cluster, **simulated_with(constraints))
    explanation = explain_search(found, losses, cluster.memory_bytes) + wire_note(profiles[0])
    return replace(best, explanation=explanation, layer_names=tuple(layer.name for layer in measured.layers))


def _plan_transformer(transformer: Transformer, cluster: Cluster, constraints: PlanConstraints) -> Plan:
    understood = PlanConstraints(
        batch_size=constraints.batch_size, stages_per_rank=constraints.stages_per_rank, recompute=constraints.recompute
    )
    if constraints != understood:
        different = [
            field.name
            for field in fields(PlanConstraints)
            if getattr(constraints, field.name) != getattr(understood, field.name)
        ]
        raise PlanError(
            f"{', '.join(different)}: expected batch_size, stages_per_rank or recompute for a transformer, found other "
            "options: use penstock.planning.plan_three_d, which fixes each dimension by name, or plan a profile"
        )
    if constraints.batch_size is None:
        raise PlanError("batch_size: expected the samples of a minibatch for a transformer, found nothing: give it")
    return plan_three_d(
        transformer,
        cluster,
        batch_size=constraints.batch_size,
        stages_per_rank=constraints.stages_per_rank,
        recompute=constraints.recompute,
    )


def _check_profiles(given: Profile | Sequence[Profile]) -> tuple[Profile, ...]:
    """The profiles as a tuple; raises `PlanError` unless they are of one model, at different microbatch sizes."""
    profiles = tuple(given) if isinstance(given, list | tuple) else (cast(Profile, given),)
    if not profiles:
        raise PlanError("profile: expected one profile or more, found none: measure the model with penstock.profile")
    measured = instance(
        Profile,
        "a Profile, several, or a Transformer",
        "measure the model with penstock.profile, or load a file with Profile.load",
    )
    for index, profile in enumerate(profiles):
        measured.check("plan(profile=)", profile, PlanError)
        if [layer.name for layer in profile.layers] != [layer.name for layer in profiles[0].layers]:
            raise PlanError(
                f"profile[{index}]: expected the layers of profile[0], found others: give profiles of one model"
            )
        if profile.microbatch_size in [other.microbatch_size for other in profiles[:index]]:
            raise PlanError(
                f"profile[{index}]: expected a microbatch size of its own, found {profile.microbatch_size} again: give "
                "one profile for each size"
            )
    return profiles
