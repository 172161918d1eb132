"""The costs of the actions of a schedule: seconds and bytes, stage by stage.

The simulator uses nothing else about a model or a machine, so a picture in unit time and a prediction for measured
layers are the same computation with different costs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import sub

from penstock.errors import PlanError
from penstock.scheduling.placements import Placement, Skip
from penstock.simulating.assumptions import AllReduce, Assumptions
from penstock.simulating.transfer_times import slowest_link
from penstock.values.clusters import Cluster
from penstock.values.crossings import Traffic, find_traffic
from penstock.values.device_kinds import DeviceKind
from penstock.values.link_tables import MessageCosts
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile

_DEFAULT = Assumptions()


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The seconds of every stage for one microbatch, as on one rank."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...]
    """The share of `backward_seconds` that the weight backward takes."""

    @property
    def input_seconds(self) -> tuple[float, ...]:
        """The seconds of an input backward: what the weight backward leaves of the whole one."""
        return tuple(map(sub, self.backward_seconds, self.weight_seconds))


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of every stage on one replica; where microbatches are split, the replica's share of them.

    `forward_seconds`, `backward_seconds`, `saved_bytes` and `workspace_bytes` are those of one microbatch.
    `weight_seconds` is the share of `backward_seconds` that the weight backward takes, half of it by default;
    `split_seconds`, and `split_share` of the whole backward, are added to every weight backward. Where replicas share
    the optimizer's state, an all-reduce is the half that sums, and the half that gathers the weights is in the update,
    whose other part each replica does for its share. `update_seconds` and
    `reduce_seconds` are those of one update and of its all-reduce, `reduce_handling_seconds` what the all-reduce takes
    from the computation of each replica, and `reduce_blocking` the share of it that no backward hides. `cut_bytes[s]`
    is what a whole microbatch sends each way between stages s and s + 1; cuts within a rank are not used. A backward of
    a stage in `recomputed` takes one forward more, unless it directly follows its forward or has a `Recompute` in the
    row. Without a `cluster` the links are instant.
    `rank_times` has the times of every rank where devices differ; those of the stages are then the longest of their
    replicas. `skips` holds what a whole microbatch sends each way directly between two stages that are not neighbours;
    it is in no cut. `wire_bytes` and `wire_skips` are what links carry of these, by default all. `offloaded_bytes` is
    what an offload moves of `saved_bytes`: all but what the stage received, which stays, and nothing of a stage that
    recomputes. The weights of a stage in `streamed` are on the host between its visits, with its optimizer's state.
    `library_bytes` is what libraries keep on every rank. Everything else is zero by default.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...] = ()
    reduce_seconds: tuple[float, ...] = ()
    reduce_handling_seconds: tuple[float, ...] = ()
    reduce_blocking: tuple[float, ...] = ()
    cut_bytes: tuple[float, ...] = ()
    skips: tuple[tuple[Skip, float], ...] = ()
    wire_bytes: tuple[float, ...] = ()
    wire_skips: tuple[tuple[Skip, float], ...] = ()
    weight_seconds: tuple[float, ...] = ()
    split_seconds: float = 0.0
    split_share: float = 0.0
    saved_bytes: tuple[float, ...] = ()
    offloaded_bytes: tuple[float, ...] = ()
    workspace_bytes: tuple[float, ...] = ()
    parameter_bytes: tuple[float, ...] = ()
    library_bytes: float = 0.0
    frozen_bytes: tuple[float, ...] = ()
    recomputed: frozenset[int] = frozenset()
    streamed: frozenset[int] = frozenset()
    cluster: Cluster | None = None
    tensor_parallel: int = 1
    assumptions: Assumptions = _DEFAULT
    rank_times: tuple[StageTimes, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        if not self.weight_seconds:
            object.__setattr__(self, "weight_seconds", tuple(seconds / 2 for seconds in self.backward_seconds))
        object.__setattr__(self, "wire_bytes", self.wire_bytes or self.cut_bytes)
        object.__setattr__(self, "wire_skips", self.wire_skips or self.skips)
        for name, expected in (
            ("backward_seconds", stages),
            ("weight_seconds", stages),
            ("update_seconds", stages),
            ("reduce_seconds", stages),
            ("reduce_handling_seconds", stages),
            ("reduce_blocking", stages),
            ("saved_bytes", stages),
            ("offloaded_bytes", stages),
            ("workspace_bytes", stages),
            ("parameter_bytes", stages),
            ("frozen_bytes", stages),
            ("cut_bytes", stages - 1),
            ("wire_bytes", stages - 1),
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
        """Costs of one second per forward and backward (with `split`, per half of a backward); the rest is free."""
        return cls((1.0,) * stages, (2.0 if split else 1.0,) * stages)

    @property
    def weight_bytes(self) -> tuple[float, ...]:
        """By stage, one version of its weights as they compute, with what is not trained: what a fetch moves."""
        copies = self.assumptions.version_copies
        return tuple(size * copies + more for size, more in zip(self.parameter_bytes, self.frozen_bytes, strict=True))

    def update_bytes(self, stage: int) -> tuple[float, float]:
        """What an update moves to the device, and back, where any stage is streamed: the state. Of a streamed stage
        these are also the weights as they are trained, and the gradients, which do not come back.
        """
        assumed, size = self.assumptions, self.parameter_bytes[stage]
        back = assumed.optimizer_copies + (assumed.master_copies + assumed.version_copies) * (stage in self.streamed)
        return (back + (stage in self.streamed)) * size, back * size

    @property
    def on_wire(self) -> "Costs":
        """These costs with what links carry in place of what is sent."""
        return replace(self, cut_bytes=self.wire_bytes, skips=self.wire_skips)

    def times_of(self, rank: int) -> StageTimes:
        """The times of the stages on `rank`."""
        if self.rank_times:
            return self.rank_times[rank]
        return StageTimes(self.forward_seconds, self.backward_seconds, self.weight_seconds)


def plan_costs(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    placement: Placement,
    assumptions: Assumptions = _DEFAULT,
    *,
    skips: Iterable[Skip] = (),
) -> Costs:
    """The costs of the stages of `plan` under `placement`.

    A stage takes the sum of its layers' seconds. What crosses a cut is the ``cut_bytes`` of the layer before it, and as
    many bytes come back [Narayanan 2021, section 2.4]; `skips` of the schedule bypass the cut and are left out. What a
    stage relays without reading it is held until the backward, if the profile has it. With tensor parallelism the
    profile is that of one rank of a group: its seconds include the group's communication, and its bytes are its own.
    Raises `PlanError` if plan, profile and cluster do not match.
    """
    require_fit(plan, profile)
    cluster = plan.used(cluster)
    layers = [profile.layers[stage.start : stage.stop] for stage in plan.stages]

    def shares(name: str) -> tuple[float, ...]:
        return tuple(_sum(own, name) / count for own, count in zip(layers, sharers, strict=True))

    parameters = tuple(_sum(own, "parameter_bytes") for own in layers)
    parallel = plan.tensor_parallel
    rings = [[stage.ranks[tp_rank::parallel] for tp_rank in range(parallel)] for stage in plan.stages]
    starts, skips = [stage.start for stage in plan.stages], tuple(skips)
    traffic = find_traffic(profile.crossings, starts, skips)
    wire_traffic = find_traffic(profile.on_wire.crossings, starts, skips)
    # With recomputation the relayed tensors are part of the stage's input, which is kept anyway.
    again = plan.recomputed
    relayed = [0.0 if stage in again else traffic.relayed.get(stage, 0.0) for stage in range(len(layers))]
    sharers = plan.replicas if placement.split else (1,) * len(layers)
    rank_times = _rank_times(plan, profile, cluster, sharers)
    longest = _longest(plan, rank_times)
    cuts = _cut_bytes(plan, profile, traffic)
    saved = tuple(
        size + more / count for size, more, count in zip(shares("saved_bytes"), relayed, sharers, strict=True)
    )
    skipped = [sum(size for (_, to), size in traffic.direct.items() if to == stage) for stage in range(len(layers))]
    staying = zip(saved, (0.0, *cuts), skipped, sharers, strict=True)
    groups = list(zip(parameters, rings, strict=True))
    reducing = [max(reduce_seconds(size, each, cluster, assumptions.allreduce) for each in own) for size, own in groups]
    handling = [max(reduce_handling_seconds(size, ring, cluster) for ring in own) for size, own in groups]
    updating = [
        _sum(own, "update_seconds") + assumptions.update_seconds_per_byte * size
        for own, size in zip(layers, parameters, strict=True)
    ]
    if assumptions.shard_optimizer:
        reducing, handling = [seconds / 2 for seconds in reducing], [seconds / 2 for seconds in handling]
        parts = zip(updating, plan.replicas, reducing, handling, strict=True)
        updating = [seconds / count + gathering + more for seconds, count, gathering, more in parts]
    return Costs(
        forward_seconds=longest.forward_seconds,
        backward_seconds=longest.backward_seconds,
        weight_seconds=longest.weight_seconds,
        split_seconds=assumptions.split_seconds if profile.split_share is None else 0.0,
        split_share=profile.split_share or 0.0,
        update_seconds=tuple(updating),
        reduce_seconds=tuple(reducing),
        reduce_handling_seconds=tuple(handling),
        reduce_blocking=tuple(
            max((cost.blocking for ring in own for cost in _ring_costs(ring, cluster)), default=0.0) for own in rings
        ),
        cut_bytes=cuts,
        skips=tuple(traffic.direct.items()),
        wire_bytes=_cut_bytes(plan, profile.on_wire, wire_traffic),
        wire_skips=tuple(wire_traffic.direct.items()),
        saved_bytes=saved,
        offloaded_bytes=tuple(
            0.0 if stage in again else max(0.0, size - sum(received) / count)
            for stage, (size, *received, count) in enumerate(staying)
        ),
        workspace_bytes=tuple(
            _workspace(own, stage in again) / count
            for stage, (own, count) in enumerate(zip(layers, sharers, strict=True))
        ),
        parameter_bytes=parameters,
        library_bytes=profile.library_bytes,
        frozen_bytes=tuple(_sum(own, "frozen_bytes") for own in layers),
        recomputed=again,
        streamed=plan.streaming,
        cluster=cluster,
        tensor_parallel=parallel,
        assumptions=assumptions,
        # Replicas that split microbatches wait for the slowest of them.
        rank_times=() if placement.split or len(set(rank_times)) == 1 else rank_times,
    )


def _cut_bytes(plan: Plan, profile: Profile, traffic: Traffic) -> tuple[float, ...]:
    """What crosses the cuts between the stages of `plan`, without what skips carry past them."""
    lasts = (profile.layers[stage.stop - 1] for stage in plan.stages[:-1])
    return tuple(max(0.0, last.cut_bytes - traffic.past.get(cut, 0.0)) for cut, last in enumerate(lasts))


def _rank_times(plan: Plan, profile: Profile, cluster: Cluster, sharers: Sequence[int]) -> tuple[StageTimes, ...]:
    """The times of every rank of the schedule; a single one if all devices are equal.

    `sharers`: the replicas that share each microbatch, by stage. A group of tensor-parallel ranks is as fast as its
    slowest device.
    """
    bounds = [(stage.start, stage.stop) for stage in plan.stages]

    def times(kind: DeviceKind) -> StageTimes:
        if kind.speed == 1 and not profile.others:
            columns = ("forward_seconds", "backward_seconds", "weight_part_seconds")
            parts = [[getattr(layer, name) for layer in profile.layers] for name in columns]
        else:
            found = profile.times_on(kind)
            parts = [list(part) for part in (found.forward_seconds, found.backward_seconds, found.weight_seconds)]
        return StageTimes(
            *(
                tuple(float(sum(part[i:j])) / count for (i, j), count in zip(bounds, sharers, strict=True))
                for part in parts
            )
        )

    if cluster.is_equal:
        return (times(cluster.kind_of(0)),)
    known = {kind: times(kind) for kind in {cluster.class_of(rank) for rank in range(plan.ranks)}}
    width = plan.tensor_parallel
    groups = (
        [known[cluster.class_of(rank)] for rank in range(first, first + width)] for first in range(0, plan.ranks, width)
    )
    return tuple(max(group, key=lambda own: sum(own.forward_seconds) + sum(own.backward_seconds)) for group in groups)


def _longest(plan: Plan, rank_times: tuple[StageTimes, ...]) -> StageTimes:
    """The times of every stage on the slowest of its replicas."""
    if len(rank_times) == 1:
        return rank_times[0]
    width = plan.tensor_parallel

    def longest(name: str) -> tuple[float, ...]:
        return tuple(
            max(getattr(rank_times[rank // width], name)[index] for rank in stage.ranks)
            for index, stage in enumerate(plan.stages)
        )

    backward, weight = longest("backward_seconds"), longest("weight_seconds")
    return StageTimes(longest("forward_seconds"), backward, weight)


def _sum(layers: Sequence[LayerProfile], name: str) -> float:
    return float(sum(getattr(layer, name) for layer in layers))


def _workspace(layers: Sequence[LayerProfile], recompute: bool) -> float:
    """The most that a stage takes temporarily beyond all that it saves for a microbatch.

    While a layer runs, the layers behind it have saved nothing yet, or have freed it. That space holds the gradient of
    the layer's output (behind the last layer the gradient is a message and counts as one). A forward that is recomputed
    later saves nothing, so that only the workspaces count.
    """
    most = behind = 0.0
    for index, layer in reversed(list(enumerate(layers, 1))):
        handed_on = layer.cut_bytes if index < len(layers) else 0.0
        room = 0.0 if recompute else max(0.0, behind - handed_on)
        most = max(most, layer.workspace_bytes - room)
        behind += layer.saved_bytes
    return most


def reduce_seconds(size_bytes: float, ranks: Sequence[int], cluster: Cluster, allreduce: AllReduce) -> float:
    """[SPP 2022, equation 1] with 2(r-1) latencies for the messages of a ring; 0 for one rank."""
    replicas = len(ranks)
    if replicas == 1:
        return 0.0
    bandwidth, latency = slowest_link(cluster, ranks, ranks)
    rounds = reduce_rounds(replicas, shared=allreduce == "shared")
    return rounds * size_bytes / bandwidth + 2 * (replicas - 1) * latency


def reduce_rounds(replicas: int, *, shared: bool) -> float:
    """How many times the weights cross each link in an all-reduce: in a ring, or through one medium that all share."""
    return 2 * (replicas - 1) / (1 if shared else replicas)


def reduce_handling_seconds(size_bytes: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """The processor time of one replica for an all-reduce in a ring, whose 2(r-1) messages it sends and receives; 0 for
    one rank.
    """
    replicas, costs = len(ranks), _ring_costs(ranks, cluster)
    if not costs:
        return 0.0
    share_bytes = size_bytes / replicas
    message_seconds = max(cost.seconds for cost in costs) + share_bytes * max(cost.seconds_per_byte for cost in costs)
    return 2 * 2 * (replicas - 1) * message_seconds


def _ring_costs(ranks: Sequence[int], cluster: Cluster) -> list[MessageCosts]:
    """The costs of every link of a ring; none where messages cost nothing, and for one rank."""
    if len(ranks) == 1 or not cluster.has_message_costs:
        return []
    return [cluster.message_costs(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]


def require_fit(plan: Plan, profile: Profile) -> None:
    """Raises `PlanError` if plan and profile do not match."""
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
    if plan.tensor_parallel != profile.tensor_parallel:
        raise PlanError(
            f"tensor_parallel: the layers of the profile {profile.name!r} are on {profile.tensor_parallel} devices and "
            f"those of the plan on {plan.tensor_parallel}: expected the same. Use a profile that was measured with "
            f"tensor_parallel={plan.tensor_parallel} (docs/planning.md)"
        )
