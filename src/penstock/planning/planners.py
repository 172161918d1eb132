"""The entry point of planning: one function, from a profile and a cluster to the best plan.

More devices are faster, and each of them does less for its price, since they wait for each other. So the cheapest plan
that ends an epoch in time has as few devices as the deadline allows, or slow ones that cost little: parts of the
cluster are planned one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from typing import cast

from penstock.arguments import FLAG, Entries, check_arguments, instance, integer, number
from penstock.errors import PlanError
from penstock.planning.memory import OPTIMIZER_COPIES
from penstock.planning.orders.order_plans import plan_limited, plan_order
from penstock.planning.predictions import cost_of, speed_of
from penstock.planning.ptd_p.three_d import plan_three_d
from penstock.planning.requests import PlannerName
from penstock.planning.search.constraints import MICROBATCHES_PER_DEVICE, PlanConstraints
from penstock.planning.search.explanations import explain_infeasibility, explain_search, wire_note
from penstock.planning.search.plan_search import SearchResult
from penstock.planning.search.streamed_plans import explain_streams, stream_plans
from penstock.planning.search.tensor_groups import compare_plans, profile_of_plan
from penstock.planning.stage_costs import AllReduce
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.simulating.lost_time import find_losses
from penstock.values.clusters import CLUSTER, Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import seconds_text, table_lines
from penstock.values.transformers import Transformer

_RULES = {
    "cluster": CLUSTER,
    **dict.fromkeys(("synchronous", "asynchronous"), FLAG),
    "progress": FLAG.optional,
    "epoch_samples": number(above=0, unit="samples").but("give the samples of an epoch, or leave it out").optional,
    "deadline_seconds": number(above=0, unit="seconds").but("give the time of an epoch, or leave it out").optional,
}


def plan(
    profile: Profile | Sequence[Profile] | Transformer,
    cluster: Cluster,
    *,
    planner: str | None = None,
    schedule: ScheduleDefinition | str | None = None,
    microbatches: int | None = None,
    batch_size: int | None = None,
    microbatch_sizes: Sequence[int] = (),
    stages: int | None = None,
    stages_per_rank: int | None = None,
    straight: bool = False,
    synchronous: bool = False,
    asynchronous: bool = False,
    vertical_sync: bool = False,
    recompute: bool | None = None,
    allreduce: str = "ring",
    optimizer_copies: float = OPTIMIZER_COPIES,
    shared_nic: bool = False,
    whole_backwards: bool = False,
    every_device: bool = False,
    state_on_host: bool = False,
    shard_optimizer: bool = False,
    streamed: bool | None = None,
    tied_layers: Sequence[Sequence[int]] = (),
    epoch_samples: float | None = None,
    deadline_seconds: float | None = None,
    progress: bool | None = None,
) -> Plan:
    """The fastest plan of `profile` on `cluster` that fits in its memory, as the simulator predicts it.

    It trains with the numbers of one device: schedules with stale weights are planned for only with `asynchronous`, or
    where a schedule or a planner is named (or `vertical_sync`, an option of theirs), and never with `synchronous`.
    `Plan.explain` shows the ranked table of candidates. Options that are not given are searched:

    `planner`: `pipedream` (fastest slowest stage, replicas in turn), `spp` (microbatches split over replicas), `2bw`
    (equal parallel pipelines; used by name, and on more than 128 devices), `interleaved` (parallel pipelines with
    several stages per rank, also in a V), `uniform` (equally many layers per stage; used by name only), `order` (an
    order of actions that is found for the stages of the others, without replicas, under the memory of the devices; used
    by name only, see `penstock.planning.find_order`). `schedule`: one of `penstock.values.SCHEDULES`, whose order is
    delayed (`limit_order`) if none of its plans fits. `microbatches` is their number in a minibatch, over all replicas;
    alternatively, `batch_size` is its number of samples. The default is four microbatches for every device (one under
    `pipedream`, where each microbatch has its own update). With several profiles of one model, measured at different
    microbatch sizes, the search also chooses the size; `microbatch_sizes` are further sizes to try, for which the
    nearest profile is scaled (`Profile.scaled`). `stages`: exactly this number, on all ranks together; they may have
    replicas. `straight`: no replicas. `recompute`: both are tried where memory is limited. `optimizer_copies`: the
    optimizer's state in units of the weights (2: Adam). `shared_nic`: the ranks of a server (the innermost level of the
    cluster) share one link to each other server; by default every two ranks have their own. `whole_backwards` excludes
    split backwards. `every_device`: only plans that use all devices, as under torchrun, where each process is a rank.
    `state_on_host`, `shard_optimizer`: as in `Pipeline`. `streamed`: whether weights live on the host between the
    visits of their stage, with the optimizer's state; if it is not given, where nothing fits otherwise and
    `host_bandwidth` of the cluster is known. `tied_layers`: groups of layers that share weights, which stay on the
    device where they are in several stages. `epoch_samples`: the table says what an epoch costs, where the cluster has
    prices. `deadline_seconds`: not the fastest plan, but the one whose epoch costs least of those that take no longer;
    it may leave devices out. `progress` shows a line on stderr; None shows it on a terminal.

    Profiles that were measured with several `tensor_parallel` devices are planned for groups of neighbours, and
    ranked with those of single devices.

    Where the devices of `cluster` differ (`DeviceKind`), every planner knows the seconds and the memory of each, and a
    plan may leave devices out (`Plan.devices`). Several profiles of one size, of different devices, are joined.

    A `Transformer` instead of a profile is planned by PTD-P (`penstock.planning.plan_three_d`), which also chooses
    tensor parallelism; it needs a `batch_size`.

    Raises `PlanError` for options that contradict each other, and if nothing fits in memory: then the error says what
    would be enough.
    """
    check_arguments(
        "plan",
        _RULES,
        PlanError,
        cluster=cluster,
        synchronous=synchronous,
        asynchronous=asynchronous,
        progress=progress,
        epoch_samples=epoch_samples,
        deadline_seconds=deadline_seconds,
    )
    if synchronous and asynchronous:
        raise PlanError("synchronous and asynchronous: expected one of them, found both: drop one of them")
    constraints = PlanConstraints(
        planner=planner,
        schedule=schedule,
        microbatches=microbatches,
        batch_size=batch_size,
        stages=stages,
        stages_per_rank=stages_per_rank,
        straight=straight,
        synchronous=synchronous or (False if asynchronous else None),
        vertical_sync=vertical_sync,
        recompute=recompute,
        allreduce=cast(AllReduce, allreduce),
        optimizer_copies=optimizer_copies,
        shared_nic=shared_nic,
        whole_backwards=whole_backwards,
        every_device=every_device,
        state_on_host=state_on_host,
        shard_optimizer=shard_optimizer,
        streamed=streamed,
        tied_layers=tuple(map(tuple, tied_layers)),
    )
    if isinstance(profile, Transformer):
        if epoch_samples is not None or deadline_seconds is not None:
            raise PlanError(
                "epoch_samples, deadline_seconds: expected a profile, found a transformer: profile a model of its shape"
            )
        return _plan_transformer(profile, cluster, constraints)
    profiles = add_sizes(_check_profiles(join_profiles(profile)), microbatch_sizes)

    def find(part: Cluster, asked: PlanConstraints = constraints) -> Plan:
        return _plan_fastest(profiles, part, asked, epoch_samples, progress)

    if deadline_seconds is None:
        return find(cluster)
    if epoch_samples is None:
        raise PlanError("deadline_seconds: expected epoch_samples beside it, found none: give the samples of an epoch")
    if every_device:
        raise PlanError("deadline_seconds: expected no every_device beside it: the cheapest plan may leave devices out")
    if microbatches is None and batch_size is None:
        # All parts do the work of the same minibatch.
        same = replace(constraints, microbatches=MICROBATCHES_PER_DEVICE * cluster.devices)
        return plan_in_time(lambda part: find(part, same), cluster, epoch_samples, deadline_seconds)
    return plan_in_time(find, cluster, epoch_samples, deadline_seconds)


def _plan_fastest(
    profiles: Sequence[Profile],
    cluster: Cluster,
    constraints: PlanConstraints,
    epoch_samples: float | None,
    progress: bool | None,
) -> Plan:
    if constraints.planner == PlannerName.ORDER:
        return plan_order(profiles, cluster, constraints, progress=progress)
    if constraints.streamed and cluster.host_bandwidth is None:
        raise PlanError(
            "streamed: expected host_bandwidth of the cluster, the bytes per second between a device and its host, "
            "found None: measure it with penstock probe, or set it as replace(cluster, host_bandwidth=25e9) does"
        )
    found = SearchResult((), 0, ())
    if not constraints.streamed:
        found = compare_plans(profiles, cluster, constraints, progress=progress)
        limited = None if found.ranked else plan_limited(profiles, cluster, constraints, progress=progress)
        if limited is not None:
            return limited
    if not found.ranked:
        rejected, found = found, stream_plans(profiles, cluster, constraints)
        if not found.ranked:
            raise explain_infeasibility(profiles, cluster, constraints, rejected)
    best = found.ranked[0]
    measured = profile_of_plan(best, profiles)
    options = constraints.simulator_options
    losses = find_losses(best, measured, cluster, **options)
    explanation = explain_search(
        found,
        losses,
        cluster,
        next((profile for profile in profiles if profile.tensor_parallel == 1), None),
        optimizer_copies=constraints.kept_copies,
        epoch_samples=epoch_samples,
    )
    if best.streamed:
        explanation = f"{explain_streams(best, measured, cluster, constraints)}\n\n{explanation}"
    explanation += wire_note(best, measured, cluster, losses, **options)
    return replace(best, explanation=explanation, layer_names=tuple(layer.name for layer in measured.layers))


def _plan_transformer(transformer: Transformer, cluster: Cluster, constraints: PlanConstraints) -> Plan:
    understood = PlanConstraints(
        batch_size=constraints.batch_size,
        stages_per_rank=constraints.stages_per_rank,
        recompute=constraints.recompute,
        synchronous=constraints.synchronous,
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


def add_sizes(profiles: tuple[Profile, ...], microbatch_sizes: Sequence[int]) -> tuple[Profile, ...]:
    """`profiles`, and for every other of `microbatch_sizes` the nearest of them, scaled."""
    wanted = Entries(integer(1)).check("microbatch_sizes", microbatch_sizes, PlanError)
    added = []
    for degree in dict.fromkeys(profile.tensor_parallel for profile in profiles):
        known = {profile.microbatch_size: profile for profile in profiles if profile.tensor_parallel == degree}
        for size in dict.fromkeys([*known, *wanted]):
            nearest = min(known, key=lambda other: (abs(log(other / size)), other))
            added.append(known[nearest].scaled(size) if size not in known else known[size])
    return tuple(added)


def join_profiles(given: Profile | Sequence[Profile]) -> tuple[Profile, ...]:
    """`given` as a tuple, with one profile for each microbatch size and number of tensor-parallel devices: those of
    other devices are joined to the first.
    """
    profiles = tuple(given) if isinstance(given, list | tuple) else (cast(Profile, given),)
    joined: dict[object, Profile] = {}
    for index, profile in enumerate(profiles):
        size: object = (profile.microbatch_size, profile.tensor_parallel) if isinstance(profile, Profile) else index
        first = joined.get(size)
        known = [] if first is None else [first.device, *(times.device for times in first.others)]
        if first is None:
            joined[size] = profile
        elif profile.device in known:
            joined[index, size] = profile
        else:
            joined[size] = first.joined(profile)
    return tuple(joined.values())


def _check_profiles(profiles: tuple[Profile, ...]) -> tuple[Profile, ...]:
    """The profiles; raises `PlanError` unless they are of one model, at different microbatch sizes."""
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
        own = profile.microbatch_size, profile.tensor_parallel
        if own in [(other.microbatch_size, other.tensor_parallel) for other in profiles[:index]]:
            raise PlanError(
                f"profile[{index}]: expected a microbatch size of its own, found {profile.microbatch_size} again: give "
                "one profile for each size (and each tensor_parallel)"
            )
    return profiles


_EVERY_COUNT = 16
"""Of a kind with more devices only 1, 2, 4 and so on are planned, since each part takes a plan."""


@dataclass(frozen=True, slots=True)
class _Option:
    """The fastest plan of a part of the cluster."""

    plan: Plan
    """Its devices are those of the whole cluster."""
    seconds: float
    """Of an epoch."""
    cost: float
    part: str


def plan_in_time(
    find: Callable[[Cluster], Plan], cluster: Cluster, epoch_samples: float, deadline_seconds: float
) -> Plan:
    """The plan whose epoch costs least, of those that end it before the deadline.

    `find` plans a part. Parts are every number of devices of each kind, and the whole cluster; of a kind with more
    than 16 devices they are 1, 2, 4 and so on, and all. Raises `PlanError` if no price is known or no plan is fast
    enough.
    """
    if not cluster.price_per_hour():
        raise PlanError(
            "deadline_seconds: expected a cluster with prices, found none: give price_per_hour of its kinds "
            "(Cluster.with_kinds), or leave the deadline out for the fastest plan"
        )
    options, refused = [], None
    for part, ranks in _parts(cluster):
        try:
            found = find(cluster.pick(ranks))
        except PlanError as error:
            refused = error
            continue
        used = tuple(ranks[device] for device in found.devices or range(found.ranks))
        whole = replace(found, devices=used)
        cost = cost_of(epoch_samples, whole, cluster)
        if cost is not None:
            options.append(_Option(whole, epoch_samples / speed_of(whole), cost, part))
    if not options:
        raise refused or PlanError("deadline_seconds: expected prices of the devices that a plan uses: give them")
    soon = [option for option in options if option.seconds <= deadline_seconds]
    if not soon:
        best = min(options, key=lambda option: option.seconds)
        raise PlanError(
            f"deadline_seconds: expected {best.seconds:.6g} or more, the time of an epoch of the fastest plan, on "
            f"{best.part}, found {deadline_seconds:.6g}: give more time, or more devices"
        )
    chosen = min(soon, key=lambda option: option.cost)
    lines = _lines(options, chosen, deadline_seconds)
    return replace(chosen.plan, explanation=chosen.plan.explanation + "\n\n" + "\n".join(lines))


def _parts(cluster: Cluster) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parts of the cluster with their names. Devices of a kind that follow each other are near each other."""
    kinds = {cluster.kind_of(rank): None for rank in range(cluster.devices)}
    for kind in kinds:
        ranks = tuple(rank for rank in range(cluster.devices) if cluster.kind_of(rank) == kind)
        few = len(ranks) <= _EVERY_COUNT
        for count in range(1, len(ranks) + 1):
            # A power of two has one bit.
            if few or count.bit_count() == 1 or count == len(ranks):
                yield f"{count} x {kind.name or 'device'}", ranks[:count]
    if len(kinds) > 1:
        yield "all devices", tuple(range(cluster.devices))


def _lines(options: list[_Option], chosen: _Option, deadline_seconds: float) -> list[str]:
    rows = [["part", "samples/s", "epoch", "per epoch", ""]]
    for option in options:
        late = "" if option.seconds <= deadline_seconds else "too late"
        numbers = [f"{speed_of(option.plan):.4g}", seconds_text(option.seconds), f"{option.cost:.4g}"]
        rows.append([option.part, *numbers, "taken" if option is chosen else late])
    head = f"The cheapest plan that ends an epoch in {seconds_text(deadline_seconds)}; the fastest plan of each part:"
    return [head, *table_lines(rows, left={0, 4})]
