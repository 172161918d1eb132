"""What the actions of a schedule cost: seconds and bytes, stage by stage.

The simulator asks nothing else about a model or a machine, so a unit-time picture and a prediction for measured layers
are one computation with two sets of costs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import assert_never

from penstock.errors import PlanError
from penstock.scheduling.placements import Placement, Skip
from penstock.simulating.assumptions import AllReduce, Assumptions
from penstock.simulating.routes import slowest_link
from penstock.values.clusters import Cluster
from penstock.values.crossings import find_traffic
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile

__all__ = ["Costs", "plan_costs", "require_fit"]

_DEFAULT = Assumptions()


@dataclass(frozen=True, slots=True)
class Costs:
    """Of every stage on one replica; microbatches that are split cost a replica its share of the seconds and bytes.

    `forward_seconds`, `backward_seconds`, `saved_bytes`, `workspace_bytes`: of a microbatch. `weight_seconds`: of a
    backward's weight part, a share of `backward_seconds`; half of them if it is left out. `split_seconds`: what every
    weight part takes beside that. `update_seconds`, `reduce_seconds`: of one update and of its all-reduce.
    `cut_bytes[s]`: of a whole microbatch, between stages s and s + 1, each way; cuts within a rank are never asked
    for. With `recompute` a backward takes a forward more, unless it directly follows its forward. Without a `cluster`
    the links are instant. What is left out is zero. `skips`: of a whole microbatch, what goes directly between two
    stages that are no neighbours, each way, and is in no cut.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...] = ()
    reduce_seconds: tuple[float, ...] = ()
    cut_bytes: tuple[float, ...] = ()
    skips: tuple[tuple[Skip, float], ...] = ()
    weight_seconds: tuple[float, ...] = ()
    split_seconds: float = 0.0
    saved_bytes: tuple[float, ...] = ()
    workspace_bytes: tuple[float, ...] = ()
    parameter_bytes: tuple[float, ...] = ()
    recompute: bool = False
    cluster: Cluster | None = None
    tensor_parallel: int = 1
    assumptions: Assumptions = _DEFAULT

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        if not self.weight_seconds:
            object.__setattr__(self, "weight_seconds", tuple(seconds / 2 for seconds in self.backward_seconds))
        for name, expected in (
            ("backward_seconds", stages),
            ("weight_seconds", stages),
            ("update_seconds", stages),
            ("reduce_seconds", stages),
            ("saved_bytes", stages),
            ("workspace_bytes", stages),
            ("parameter_bytes", stages),
            ("cut_bytes", stages - 1),
        ):
            given = getattr(self, name)
            if not given and name != "backward_seconds":
                object.__setattr__(self, name, (0.0,) * expected)
            elif len(given) != expected:
                raise PlanError(
                    f"costs of {stages} stages: expected {expected} {name}, found {len(given)}: give one each"
                )

    @classmethod
    def unit(cls, stages: int, *, split: bool = False) -> "Costs":
        """One second for a forward, one for a backward (or if `split` for each of its two parts), none for updates and
        transfers.
        """
        return cls((1.0,) * stages, (2.0 if split else 1.0,) * stages)

    @property
    def input_seconds(self) -> tuple[float, ...]:
        """Of the input part of a backward in two parts: what its weight part leaves of it."""
        return tuple(map(sub, self.backward_seconds, self.weight_seconds))


def plan_costs(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    placement: Placement,
    assumptions: Assumptions = _DEFAULT,
    skips: Iterable[Skip] = (),
) -> Costs:
    """The costs of the stages of `plan` where `placement` has them.

    A stage takes the sum of its layers' seconds. What crosses a cut is the ``cut_bytes`` of the layer before it, and as
    much comes back (thesis, section 2.4), without what the `skips` of the schedule take past it. What a stage relays
    without reading it is held until the backward, as far as the profile tells. With tensor parallelism the profile is
    that of one rank of a group: its seconds, with what the group exchanges meanwhile, and its bytes. `PlanError` if
    plan, profile and cluster do not fit each other.
    """
    require_fit(plan, profile, cluster)
    layers = [profile.layers[stage.start : stage.stop] for stage in plan.stages]

    def shares(name: str) -> tuple[float, ...]:
        return tuple(_sum(own, name) / count for own, count in zip(layers, parts, strict=True))

    parameters = tuple(_sum(own, "parameter_bytes") for own in layers)
    groups = [stage.ranks for stage in plan.stages]
    parallel = plan.tensor_parallel
    traffic = find_traffic(profile.crossings, [stage.start for stage in plan.stages], skips)
    # With recomputation it is part of the stage's input, which is kept anyway.
    relayed = [0.0 if plan.recompute else traffic.relayed.get(stage, 0.0) for stage in range(len(layers))]
    parts = plan.replicas if placement.split else (1,) * len(layers)
    return Costs(
        forward_seconds=shares("forward_seconds"),
        backward_seconds=shares("backward_seconds"),
        weight_seconds=shares("weight_part_seconds"),
        split_seconds=assumptions.split_seconds,
        update_seconds=tuple(assumptions.update_seconds_per_byte * size for size in parameters),
        reduce_seconds=tuple(
            max(
                _reduce_seconds(size, ranks[lane::parallel], cluster, assumptions.allreduce) for lane in range(parallel)
            )
            for size, ranks in zip(parameters, groups, strict=True)
        ),
        cut_bytes=tuple(
            max(0.0, own[-1].cut_bytes - traffic.past.get(cut, 0.0)) for cut, own in enumerate(layers[:-1])
        ),
        skips=tuple(traffic.direct.items()),
        saved_bytes=tuple(
            size + more / count for size, more, count in zip(shares("saved_bytes"), relayed, parts, strict=True)
        ),
        workspace_bytes=tuple(
            _workspace(own, plan.recompute) / count for own, count in zip(layers, parts, strict=True)
        ),
        parameter_bytes=parameters,
        recompute=plan.recompute,
        cluster=cluster,
        tensor_parallel=parallel,
        assumptions=assumptions,
    )


def _sum(layers: Sequence[LayerProfile], name: str) -> float:
    return float(sum(getattr(layer, name) for layer in layers))


def _workspace(layers: Sequence[LayerProfile], recompute: bool) -> float:
    """The most that a stage takes for a moment beyond all that it saves for a microbatch.

    While a layer is at work the layers behind it have saved nothing yet, or given it back, and in that room lies the
    gradient of what the layer hands on (behind the stage it is a message, which counts as such). A forward that is
    computed again later saves nothing, so that the workspaces are all there is.
    """
    most = behind = 0.0
    for index, layer in reversed(list(enumerate(layers, 1))):
        handed_on = layer.cut_bytes if index < len(layers) else 0.0
        room = 0.0 if recompute else max(0.0, behind - handed_on)
        most = max(most, layer.workspace_bytes - room)
        behind += layer.saved_bytes
    return most


def _reduce_seconds(size_bytes: float, ranks: Sequence[int], cluster: Cluster, allreduce: AllReduce) -> float:
    """SPP (INFOCOM 2022), equation 1, with 2(r-1) latencies for the messages of a ring; 0 for one rank."""
    replicas = len(ranks)
    if replicas == 1:
        return 0.0
    bandwidth, latency = slowest_link(cluster, ranks, ranks)
    match allreduce:
        case "ring":
            share = 2 * (replicas - 1) / replicas
        case "shared":
            share = 2.0 * (replicas - 1)
        case _:
            assert_never(allreduce)
    return share * size_bytes / bandwidth + 2 * (replicas - 1) * latency


def require_fit(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """Raises `PlanError` if plan, profile and cluster do not fit each other."""
    if plan.stages[-1].stop != len(profile.layers):
        raise PlanError(
            f"the plan has layers 0 to {plan.stages[-1].stop - 1} and the profile {profile.name!r} has "
            f"{len(profile.layers)} layers: expected the same number. Use the profile that the plan was made from"
        )
    if plan.microbatch_size not in (None, profile.microbatch_size):
        raise PlanError(
            f"microbatch_size: the profile {profile.name!r} was measured with {profile.microbatch_size} samples and "
            f"the plan has {plan.microbatch_size}: expected the same. Measure again with {plan.microbatch_size} "
            f"samples, or set the plan's microbatch_size to {profile.microbatch_size}"
        )
    if cluster.devices < plan.ranks:
        raise PlanError(
            f"the plan has {plan.ranks} ranks and the cluster {cluster.devices} devices: expected one each. Plan for "
            "fewer ranks or describe more devices"
        )
