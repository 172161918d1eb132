"""The search of PTD-P: the fastest (p, t, d, b, v), with or without recomputation, that fits in memory.

[Narayanan 2021] gives heuristics (chapter 4, takeaways 1 to 3) and no search (section 4.1). Here every
config of n = p t d devices is tried by its closed form: t divides the heads, p v the layers, d the batch, b what
is left of it, and interleaving has m mod p = 0. The best few are then simulated.

Ranks are laid out as in `penstock.planning.ptd_p.ring_links`: t innermost, then d, then p.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, isqrt

from penstock.arguments import FLAG, check_fields, integer
from penstock.errors import PlanError
from penstock.planning.ptd_p.accelerator_models import A100, AcceleratorModel, Precision
from penstock.planning.ptd_p.parallel_configs import (
    ConfigEstimate,
    ParallelConfig,
    ParallelLinks,
    boundary_seconds,
    checkpoint_count,
    estimate_config,
    peak_bytes,
    position_bytes,
    stages_in_flight,
)
from penstock.planning.ptd_p.ring_links import Ring, data_ring, pipeline_ring, tensor_ring
from penstock.planning.ptd_p.transformer_costs import TransformerCosts, tensor_parallel_costs
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Prediction, Stage
from penstock.values.profiles import LayerProfile, Profile
from penstock.values.quantities import bytes_text, seconds_text, table_lines
from penstock.values.transformers import Transformer

_LARGEST_BATCH = 10**8
"""All divisors of the batch are tried, so that it must be limited."""

_LONGEST_SIMULATION = 500_000
"""Forwards of stages in one pipeline: more would take the simulator too long, and only lengthen the steady state."""


@dataclass(frozen=True, slots=True)
class ThreeDRequest:
    """The search space; a dimension that is given is fixed."""

    transformer: Transformer
    cluster: Cluster
    batch_size: int
    """B: samples in a minibatch."""
    accelerator: AcceleratorModel = A100
    precision: Precision = Precision()  # noqa: RUF009 - frozen
    devices: int | None = None
    """n: None takes all devices of the cluster."""
    pipeline: int | None = None
    tensor: int | None = None
    data: int | None = None
    microbatch_size: int | None = None
    stages_per_rank: int | None = None
    recompute: bool | None = None
    checkpoints: int | None = None
    """Layers per stage that keep their input when recomputed; None takes the number that needs least memory. Penstock's
    runtime recomputes a stage as a whole, which is 1."""
    scatter_gather: bool = True
    overlap: bool = True
    """Whether the simulator hides messages behind computation, like Penstock and unlike Megatron-LM."""

    def __post_init__(self) -> None:
        numbers = ("devices", "pipeline", "tensor", "data", "microbatch_size", "stages_per_rank", "checkpoints")
        flags = {"recompute": FLAG.optional, "scatter_gather": FLAG, "overlap": FLAG}
        check_fields(
            self, {"batch_size": integer(1), **dict.fromkeys(numbers, integer(1).optional), **flags}, PlanError
        )
        if self.batch_size > _LARGEST_BATCH:
            raise PlanError(
                f"batch_size: expected at most {_LARGEST_BATCH}, found {self.batch_size}: give the samples of one "
                "minibatch, not of the data set"
            )
        if not self.cluster.is_equal or self.cluster.kind_of(0).speed != 1:
            raise PlanError(
                "cluster: expected equal devices of speed 1 for a transformer, found kinds that differ or have another "
                "speed: the ranks of a tensor-parallel group are as fast as the slowest, and the seconds come from the "
                "accelerator's rates. Plan for one kind alone (Cluster.pick), or plan a profile"
            )
        if self.count > self.cluster.devices:
            raise PlanError(
                f"devices: expected at most the {self.cluster.devices} of the cluster, found {self.count}: "
                "use fewer devices or describe more"
            )

    @property
    def count(self) -> int:
        """n."""
        return self.cluster.devices if self.devices is None else self.devices


def rank_three_d(request: ThreeDRequest, simulated: int = 5) -> tuple[ConfigEstimate, ...]:
    """Every configuration that fits, fastest first; the first `simulated` by the simulator, the others by closed form.

    Raises `PlanError` if the devices have no configuration, or if none fits; the error says what would be enough.
    """
    simulated = integer(0).check("simulated", simulated, PlanError)
    limit = request.cluster.least_memory_bytes
    found = [_estimate(request, config) for config in _fitting(request, inf if limit is None else limit)]
    if not found:
        raise _nothing_fits(request)
    found.sort(key=_order)
    resimulated = sorted((_simulated(request, one) for one in found[:simulated]), key=_order)
    return (*resimulated, *found[simulated:])


def plan_three_d(
    transformer: Transformer,
    cluster: Cluster,
    *,
    batch_size: int,
    accelerator: AcceleratorModel = A100,
    precision: Precision | None = None,
    devices: int | None = None,
    pipeline: int | None = None,
    tensor: int | None = None,
    data: int | None = None,
    microbatch_size: int | None = None,
    stages_per_rank: int | None = None,
    recompute: bool | None = None,
    checkpoints: int | None = None,
    scatter_gather: bool = True,
    overlap: bool = True,
    simulated: int = 5,
) -> Plan:
    """The fastest configuration of `transformer` on `cluster` for minibatches of `batch_size` samples, as a plan.

    The layers of the plan are those of `profile_of`: the embedding, the transformer's layers, the head. A dimension
    that is given is fixed; see `ThreeDRequest`. The best `simulated` configurations by closed form are simulated, and
    the best of them is taken; `Plan.explain` shows the ranking. Raises `PlanError`.
    """
    request = ThreeDRequest(
        transformer,
        cluster,
        batch_size,
        accelerator=accelerator,
        precision=Precision() if precision is None else precision,
        devices=devices,
        pipeline=pipeline,
        tensor=tensor,
        data=data,
        microbatch_size=microbatch_size,
        stages_per_rank=stages_per_rank,
        recompute=recompute,
        checkpoints=checkpoints,
        scatter_gather=scatter_gather,
        overlap=overlap,
    )
    ranked = rank_three_d(request, simulated)
    return replace(plan_of(request, ranked[0]), explanation=ranking_text(ranked))


def plan_of(request: ThreeDRequest, chosen: ConfigEstimate) -> Plan:
    """The `chosen` configuration as a plan with its prediction; stage i of replica j starts at rank (i d + j) t."""
    config = chosen.config
    p, v, width = config.pipeline, config.stages_per_rank, config.data * config.tensor
    per_stage = request.transformer.layers // (p * v)
    # The embedding is layer 0 and the head the last one.
    cuts = [0, *(1 + per_stage * stage for stage in range(1, p * v)), request.transformer.layers + 2]
    ranks = [tuple(range(width * position, width * (position + 1))) for position in range(p)]
    stages = tuple(Stage(cuts[stage], cuts[stage + 1], ranks[stage % p]) for stage in range(p * v))
    microbatches = request.batch_size // config.microbatch_size
    costs = tensor_parallel_costs(
        request.transformer, request.accelerator, _links(request, config).tensor, config.microbatch_size
    )
    peaks = [
        position_bytes(
            costs,
            request.precision,
            config,
            layers=request.transformer.layers,
            microbatches=microbatches // config.data,
            position=position,
        )
        for position in range(p)
    ]
    seconds = chosen.minibatch_seconds
    busy = microbatches // config.data * chosen.slowest_seconds / seconds
    slowest = 0 if costs.embedding.seconds > costs.head.seconds else len(stages) - 1
    return Plan(
        stages,
        config.schedule,
        microbatches,
        config.microbatch_size,
        recompute=config.recompute,
        tensor_parallel=config.tensor,
        predicted=Prediction(
            minibatch_seconds=seconds,
            samples_per_second=chosen.samples_per_second,
            bottleneck_seconds=chosen.slowest_seconds / config.data,
            peak_bytes=tuple(peak for peak in peaks for _ in range(width)),
            bubble=max(0.0, chosen.bubble_seconds / seconds),
            limit=f"stage {slowest} (busy {busy:.0%} of the time)",
        ),
        planner="ptd-p",
    )


def _order(one: ConfigEstimate) -> tuple[float, float, int]:
    """Fastest first; of equally fast ones the smaller in memory, then the one with fewer stages."""
    return one.minibatch_seconds, one.peak_bytes, one.config.pipeline * one.config.stages_per_rank


def _links(request: ThreeDRequest, config: ParallelConfig) -> ParallelLinks:
    cluster, ranks = request.cluster, config.devices
    return ParallelLinks(
        tensor_ring(cluster, ranks, config.tensor),
        data_ring(cluster, ranks, config.tensor, config.data),
        pipeline_ring(cluster, ranks, config.pipeline),
        request.scatter_gather,
    )


def _estimate(request: ThreeDRequest, config: ParallelConfig) -> ConfigEstimate:
    links = _links(request, config)
    costs = tensor_parallel_costs(request.transformer, request.accelerator, links.tensor, config.microbatch_size)
    model, device, precision = request.transformer, request.accelerator, request.precision
    return estimate_config(model, device, precision, links, costs, config=config, batch_size=request.batch_size)


def _simulated(request: ThreeDRequest, one: ConfigEstimate) -> ConfigEstimate:
    """`one` with the seconds of the simulator for its pipeline; all-reduces between replicas and updates stay.

    A pipeline that is too long to simulate keeps the closed form.
    """
    config, links = one.config, _links(request, one.config)
    microbatches = request.batch_size // (config.microbatch_size * config.data)
    if microbatches * config.pipeline * config.stages_per_rank > _LONGEST_SIMULATION:
        return one
    costs = tensor_parallel_costs(request.transformer, request.accelerator, links.tensor, config.microbatch_size)
    before = simulate_pipeline(request.transformer.layers, costs, config, links, microbatches, overlap=request.overlap)
    after = one.minibatch_seconds - one.pipelined_seconds + before
    return replace(
        one,
        minibatch_seconds=after,
        pipelined_seconds=before,
        device_operations=one.device_operations * one.minibatch_seconds / after,
        samples_per_second=request.batch_size / after,
        pipeline_seconds=0.0,
        bubble_seconds=one.bubble_seconds + one.pipeline_seconds + after - one.minibatch_seconds,
        simulated=True,
    )


def _divisors(number: int, fixed: int | None = None) -> list[int]:
    """Ascending; only `fixed`, if it is given and one of them."""
    if fixed is not None:
        return [fixed] if number % fixed == 0 else []
    low = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return low + [number // one for one in reversed(low) if one * one != number]


def _grids(request: ThreeDRequest, devices: int) -> Iterator[tuple[int, int, int]]:
    """(p, t, d) with p t d = `devices` that cut the model and the batch evenly."""
    for tensor in _divisors(request.transformer.heads, request.tensor):
        for pipeline in _divisors(request.transformer.layers, request.pipeline):
            data, rest = divmod(devices, tensor * pipeline)
            if rest == 0 and data and request.batch_size % data == 0 and request.data in (None, data):
                yield pipeline, tensor, data


def _fitting(request: ThreeDRequest, limit: float, devices: int | None = None) -> Iterator[ParallelConfig]:
    """All configurations in which no device needs more than `limit` bytes."""
    for pipeline, tensor, data in _grids(request, request.count if devices is None else devices):
        for size in _divisors(request.batch_size // data, request.microbatch_size):
            microbatches = request.batch_size // data // size
            for per_rank in _divisors(request.transformer.layers // pipeline, request.stages_per_rank):
                if per_rank > 1 and (pipeline == 1 or microbatches % pipeline):
                    continue
                for recompute in (False, True) if request.recompute is None else (request.recompute,):
                    config = ParallelConfig(
                        pipeline=pipeline,
                        tensor=tensor,
                        data=data,
                        microbatch_size=size,
                        stages_per_rank=per_rank,
                        recompute=recompute,
                    )
                    config = replace(config, checkpoints=_checkpoints(request, config))
                    if _peak_bytes(request, config) <= limit:
                        yield config


def _checkpoints(request: ThreeDRequest, config: ParallelConfig) -> int:
    per_stage = request.transformer.layers // (config.pipeline * config.stages_per_rank)
    if not config.recompute:
        return 1
    if request.checkpoints is not None:
        return min(request.checkpoints, per_stage)
    microbatches = request.batch_size // (config.microbatch_size * config.data)
    in_flight = stages_in_flight(config.pipeline, config.stages_per_rank, microbatches, 0)
    costs = tensor_parallel_costs(request.transformer, request.accelerator, Ring(config.tensor), config.microbatch_size)
    return checkpoint_count(per_stage, costs.boundary_bytes, costs.layer.saved_bytes, in_flight)


def _peak_bytes(request: ThreeDRequest, config: ParallelConfig) -> float:
    # Bytes do not depend on the links.
    costs = tensor_parallel_costs(request.transformer, request.accelerator, Ring(config.tensor), config.microbatch_size)
    microbatches = request.batch_size // (config.microbatch_size * config.data)
    layers = request.transformer.layers
    return peak_bytes(costs, request.precision, config, layers=layers, microbatches=microbatches)


def _smallest(request: ThreeDRequest, devices: int) -> tuple[float, ParallelConfig] | None:
    """The configuration of `devices` devices that needs least memory; only the least microbatch size is tried."""
    request = request if request.microbatch_size is not None else replace(request, microbatch_size=1)
    configs = [(_peak_bytes(request, config), config) for config in _fitting(request, inf, devices)]
    return min(configs, key=lambda pair: pair[0], default=None)


def _enough_devices(request: ThreeDRequest, limit: float) -> int | None:
    """The least number of devices on which a configuration fits; more replicas only increase it."""
    model, data = request.transformer, request.data or 1
    tensors, pipelines = _divisors(model.heads, request.tensor), _divisors(model.layers, request.pipeline)
    for devices in sorted({tensor * pipeline * data for tensor in tensors for pipeline in pipelines}):
        smallest = _smallest(request, devices)
        if smallest is not None and smallest[0] <= limit:
            return devices
    return None


def _nothing_fits(request: ThreeDRequest) -> PlanError:
    model, limit = request.transformer, request.cluster.least_memory_bytes
    smallest = _smallest(request, request.count)
    fixed = [field.name for field in fields(request) if field.name in _FIXABLE and getattr(request, field.name)]
    given = " with " + ", ".join(f"{name} = {getattr(request, name)}" for name in fixed) if fixed else ""
    if smallest is None or limit is None:
        other = next((n for n in range(request.count - 1, 0, -1) if _smallest(request, n)), None)
        fix = "leave a dimension free" if other is None else f"use devices={other}, the next smaller number that has"
        return PlanError(
            f"{request.count} devices have no configuration (p, t, d, b, v){given}: expected p t d = {request.count}, "
            f"t a divisor of {model.heads} heads, p v of {model.layers} layers, d b of a batch of {request.batch_size} "
            f"(and m mod p = 0 if v > 1), found none. Change the batch size or the number of devices: {fix}"
        )
    needed, config = smallest
    fixes = [f"devices of {bytes_text(needed)}"]
    enough = _enough_devices(request, limit)
    if enough is not None:
        fixes.append(f"{enough} devices like these")
    if request.recompute is False:
        other_bytes = _smallest(replace(request, recompute=True), request.count)
        if other_bytes is not None and other_bytes[0] < needed:
            fixes.append(f"recompute=True, which needs {bytes_text(other_bytes[0])}")
    return PlanError(
        f"{model.parameters / 1e9:.4g} billion parameters do not fit on {request.count} devices{given}: expected at "
        f"most {bytes_text(limit)} on each, found {bytes_text(needed)} in the smallest configuration, {config}. "
        f"Use {', or '.join(fixes)}"
    )


_FIXABLE = ("pipeline", "tensor", "data", "microbatch_size", "stages_per_rank", "checkpoints")


_SHOWN = 10
_HEAD = (
    *("p", "t", "d", "b", "v", "recompute"),
    *("seconds", "samples/s", "TFLOP/s", "tensor", "messages", "bubble", "gradients", "peak", "by"),
)


def ranking_text(ranked: Sequence[ConfigEstimate]) -> str:
    """The first ten of `ranked` (best first), their shares of the time by cause, and the difference to the second.

    TFLOP/s are per device, by [Narayanan 2021, equation 4.2], including recomputation.
    """
    lines = table_lines([_HEAD, *(_row(one) for one in ranked[:_SHOWN])], left=())
    if len(ranked) > _SHOWN:
        lines.append(f"and {len(ranked) - _SHOWN} slower ones that fit")
    lines.append(_difference(ranked[0], ranked[1]) if len(ranked) > 1 else "No other configuration fits.")
    return "\n".join(lines)


def _row(one: ConfigEstimate) -> tuple[str, ...]:
    config, seconds = one.config, one.minibatch_seconds
    sizes = (config.pipeline, config.tensor, config.data, config.microbatch_size, config.stages_per_rank)
    shares = (one.tensor_seconds, one.pipeline_seconds, one.bubble_seconds, one.data_seconds)
    return (
        *map(str, sizes),
        "yes" if config.recompute else "no",
        f"{seconds:.4g}",
        f"{one.samples_per_second:.4g}",
        f"{one.device_operations / 1e12:.1f}",
        *(f"{share / seconds:.1%}" for share in shares),
        bytes_text(one.peak_bytes),
        "simulator" if one.simulated else "formula",
    )


def _difference(best: ConfigEstimate, second: ConfigEstimate) -> str:
    """Where the second one loses and where it gains, the largest difference first."""
    causes = {
        "computation": second.compute_seconds - best.compute_seconds,
        "tensor all-reduces": second.tensor_seconds - best.tensor_seconds,
        "messages": second.pipeline_seconds - best.pipeline_seconds,
        "bubble": second.bubble_seconds - best.bubble_seconds,
        "gradients": second.data_seconds - best.data_seconds,
    }
    longer = second.minibatch_seconds / best.minibatch_seconds - 1
    differences = [
        f"{cause} {seconds_text(abs(change))} {'more' if change > 0 else 'less'}"
        for cause, change in sorted(causes.items(), key=lambda item: -abs(item[1]))
        if abs(change) > 1e-3 * best.minibatch_seconds
    ]
    reason = "; ".join(differences) if differences else "no cause differs by a thousandth of the time"
    return f"{second.config} takes {100 * longer:.1f} % longer: {reason}"


def simulate_pipeline(
    layers: int,
    costs: TransformerCosts,
    config: ParallelConfig,
    links: ParallelLinks,
    microbatches: int,
    *,
    overlap: bool = True,
) -> float:
    """Seconds from the first forward to the last backward of `microbatches` microbatches in one pipeline.

    The d pipelines do the same at the same time on links of their own, and so do the t devices of a stage; one of each
    represents all. A layer of the simulated profile is a stage with its gathers and recomputation.
    """
    p, stages = config.pipeline, config.pipeline * config.stages_per_rank
    _, gathering, sent_bytes = boundary_seconds(costs, links)
    recomputation = costs.layer.forward_seconds if config.recompute else 0.0
    rows, count = [], layers // stages
    for stage in range(stages):
        forward = count * costs.layer.forward_seconds
        backward = count * (costs.layer.backward_seconds + recomputation)
        if stage == 0:
            forward, backward = forward + costs.embedding.forward_seconds, backward + costs.embedding.backward_seconds
        else:
            forward += gathering
        if stage == stages - 1:
            forward, backward = forward + costs.head.forward_seconds, backward + costs.head.backward_seconds
        else:
            backward += gathering
        rows.append(
            LayerProfile(
                name=f"stage {stage}",
                forward_seconds=forward,
                backward_seconds=backward,
                cut_bytes=sent_bytes,
                saved_bytes=0.0,
                parameter_bytes=0.0,
            )
        )
    plan = Plan.of_cuts(range(stages + 1), p, config.schedule, microbatches, config.microbatch_size)
    bandwidth, latency = links.pipeline.bandwidth, links.pipeline.latency_seconds
    cluster = Cluster.uniform(p, bandwidth, None, latency)
    return evaluate(plan, Profile(tuple(rows), config.microbatch_size), cluster, overlap=overlap).minibatch_seconds
