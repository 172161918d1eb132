"""The search of PTD-P: the fastest (p, t, d, b, v), with or without recomputation, that fits in memory.

The thesis gives heuristics (chapter 4, takeaways 1 to 3) and leaves the search to others (section 4.1). Here every
arrangement of n = p t d devices is tried by its closed form: t divides the heads, p v the layers, d the batch, b what
is left of it, and interleaving has m mod p = 0. The best few are then played by the simulator.

Ranks are laid out as in `penstock.planning.ptd_p.ring_links`: t innermost, then d, then p.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import inf, isqrt

from penstock.errors import PlanError
from penstock.planning.ptd_p.config_tables import ranking_text
from penstock.planning.ptd_p.device_models import A100, Accelerator, Precision
from penstock.planning.ptd_p.parallel_configs import (
    Arrangement,
    ArrangementLinks,
    Candidate,
    candidate,
    checkpoint_count,
    position_bytes,
    stages_in_flight,
)
from penstock.planning.ptd_p.pipeline_simulations import play
from penstock.planning.ptd_p.ring_links import Ring, data_ring, pipeline_ring, tensor_ring
from penstock.planning.ptd_p.transformer_costs import part_costs
from penstock.values.clusters import Cluster
from penstock.values.documents import is_count, text_of
from penstock.values.plans import Plan, Prediction, Stage
from penstock.values.quantities import bytes_text
from penstock.values.transformers import Transformer

__all__ = ["ThreeDRequest", "plan_of", "plan_three_d", "rank_three_d"]

_LARGEST_BATCH = 10**8
"""Far more than anyone trains with; all divisors of the batch are tried."""

_LONGEST_TRIAL = 500_000
"""Forwards of stages in one pipeline: more would take the simulator long, and only lengthen the steady state."""


@dataclass(frozen=True, slots=True)
class ThreeDRequest:
    """What is searched; a dimension that is given is fixed."""

    transformer: Transformer
    cluster: Cluster
    batch_size: int
    """B: samples in a minibatch."""
    accelerator: Accelerator = A100
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
    """Layers per stage that keep their input when recomputed; None takes what needs least memory. 1 is what Penstock's
    runtime does: it recomputes a stage as a whole."""
    scatter_gather: bool = True
    overlap: bool = True
    """Whether the simulator hides messages behind computation, as Penstock does and Megatron-LM does not."""

    def __post_init__(self) -> None:
        numbers = ("devices", "pipeline", "tensor", "data", "microbatch_size", "stages_per_rank", "checkpoints")
        for name in ("batch_size", *numbers):
            value = getattr(self, name)
            if value is None and name != "batch_size":
                continue
            if not is_count(value, least=1):
                raise PlanError(f"{name}: expected a whole number, 1 or more, found {text_of(value)}: give one")
        if self.batch_size > _LARGEST_BATCH:
            raise PlanError(
                f"batch_size: expected at most {_LARGEST_BATCH}, found {self.batch_size}: give the samples of one "
                "minibatch, not of the data set"
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


def rank_three_d(request: ThreeDRequest, simulated: int = 5) -> tuple[Candidate, ...]:
    """Every arrangement that fits, fastest first; the first `simulated` by the simulator, the others by closed form.

    `PlanError` if there is no arrangement of so many devices, or if none fits; it says what would be needed.
    """
    if not is_count(simulated, least=0):
        raise PlanError(f"simulated: expected a whole number, 0 or more, found {text_of(simulated)}: give one")
    limit = request.cluster.memory_bytes
    found = [_candidate(request, arrangement) for arrangement in _fitting(request, inf if limit is None else limit)]
    if not found:
        raise _nothing_fits(request)
    found.sort(key=_order)
    played = sorted((_simulated(request, one) for one in found[:simulated]), key=_order)
    return (*played, *found[simulated:])


def plan_three_d(
    transformer: Transformer,
    cluster: Cluster,
    *,
    batch_size: int,
    accelerator: Accelerator = A100,
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
    """The fastest arrangement of `transformer` on `cluster` for minibatches of `batch_size` samples, as a plan.

    The layers of the plan are those of `profile_of`: the embedding, the transformer's layers, the head. A dimension
    that is given is fixed; see `ThreeDRequest`. The best `simulated` arrangements by closed form are played by the
    simulator, and the best of them is taken; `Plan.explain` shows the ranking. Raises `PlanError`.
    """
    request = ThreeDRequest(
        transformer,
        cluster,
        batch_size,
        accelerator,
        Precision() if precision is None else precision,
        devices,
        pipeline,
        tensor,
        data,
        microbatch_size,
        stages_per_rank,
        recompute,
        checkpoints,
        scatter_gather,
        overlap,
    )
    ranked = rank_three_d(request, simulated)
    return replace(plan_of(request, ranked[0]), explanation=ranking_text(ranked))


def plan_of(request: ThreeDRequest, chosen: Candidate) -> Plan:
    """A candidate of `request` as a plan with its prediction; stage i of replica j is on ranks (i d + j) t and on."""
    form = chosen.arrangement
    p, v, width = form.pipeline, form.stages_per_rank, form.data * form.tensor
    per_stage = request.transformer.layers // (p * v)
    # The embedding is layer 0 and the head the last one.
    cuts = [0, *(1 + per_stage * stage for stage in range(1, p * v)), request.transformer.layers + 2]
    ranks = [tuple(range(width * position, width * (position + 1))) for position in range(p)]
    stages = tuple(Stage(cuts[stage], cuts[stage + 1], ranks[stage % p]) for stage in range(p * v))
    microbatches = request.batch_size // form.microbatch_size
    costs = part_costs(request.transformer, request.accelerator, _links(request, form).tensor, form.microbatch_size)
    peaks = [
        position_bytes(costs, request.precision, form, request.transformer.layers, microbatches // form.data, position)
        for position in range(p)
    ]
    seconds = chosen.minibatch_seconds
    busy = microbatches // form.data * chosen.slowest_seconds / seconds
    slowest = 0 if costs.embedding.seconds > costs.head.seconds else len(stages) - 1
    return Plan(
        stages,
        form.schedule,
        microbatches,
        form.microbatch_size,
        recompute=form.recompute,
        tensor_parallel=form.tensor,
        predicted=Prediction(
            minibatch_seconds=seconds,
            samples_per_second=chosen.samples_per_second,
            bottleneck_seconds=chosen.slowest_seconds / form.data,
            peak_bytes=tuple(peak for peak in peaks for _ in range(width)),
            bubble=max(0.0, chosen.bubble_seconds / seconds),
            limit=f"stage {slowest} (busy {busy:.0%} of the time)",
        ),
        planner="ptd-p",
    )


def _order(one: Candidate) -> tuple[float, float, int]:
    """Fastest first; of equally fast ones the smaller in memory, then the one with fewer stages."""
    return one.minibatch_seconds, one.peak_bytes, one.arrangement.pipeline * one.arrangement.stages_per_rank


def _links(request: ThreeDRequest, form: Arrangement) -> ArrangementLinks:
    cluster, ranks = request.cluster, form.devices
    return ArrangementLinks(
        tensor_ring(cluster, ranks, form.tensor),
        data_ring(cluster, ranks, form.tensor, form.data),
        pipeline_ring(cluster, ranks, form.pipeline),
        request.scatter_gather,
    )


def _candidate(request: ThreeDRequest, form: Arrangement) -> Candidate:
    links = _links(request, form)
    costs = part_costs(request.transformer, request.accelerator, links.tensor, form.microbatch_size)
    model, device, precision = request.transformer, request.accelerator, request.precision
    return candidate(model, device, precision, links, costs, form, request.batch_size)


def _simulated(request: ThreeDRequest, one: Candidate) -> Candidate:
    """`one` with the seconds of the simulator for its pipeline; all-reduces between replicas and updates stay.

    What is too long to play keeps the closed form.
    """
    form, links = one.arrangement, _links(request, one.arrangement)
    microbatches = request.batch_size // (form.microbatch_size * form.data)
    if microbatches * form.pipeline * form.stages_per_rank > _LONGEST_TRIAL:
        return one
    costs = part_costs(request.transformer, request.accelerator, links.tensor, form.microbatch_size)
    before = play(request.transformer.layers, costs, form, links, microbatches, overlap=request.overlap)
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


def _fitting(request: ThreeDRequest, limit: float, devices: int | None = None) -> Iterator[Arrangement]:
    """All arrangements of which no device needs more than `limit` bytes."""
    for pipeline, tensor, data in _grids(request, request.count if devices is None else devices):
        for size in _divisors(request.batch_size // data, request.microbatch_size):
            microbatches = request.batch_size // data // size
            for per_rank in _divisors(request.transformer.layers // pipeline, request.stages_per_rank):
                if per_rank > 1 and (pipeline == 1 or microbatches % pipeline):
                    continue
                for recompute in (False, True) if request.recompute is None else (request.recompute,):
                    form = Arrangement(pipeline, tensor, data, size, per_rank, recompute)
                    form = replace(form, checkpoints=_checkpoints(request, form))
                    if _peak_bytes(request, form) <= limit:
                        yield form


def _checkpoints(request: ThreeDRequest, form: Arrangement) -> int:
    per_stage = request.transformer.layers // (form.pipeline * form.stages_per_rank)
    if not form.recompute:
        return 1
    if request.checkpoints is not None:
        return min(request.checkpoints, per_stage)
    microbatches = request.batch_size // (form.microbatch_size * form.data)
    in_flight = stages_in_flight(form.pipeline, form.stages_per_rank, microbatches, 0)
    costs = part_costs(request.transformer, request.accelerator, Ring(form.tensor), form.microbatch_size)
    return checkpoint_count(per_stage, costs.boundary_bytes, costs.layer.saved_bytes, in_flight)


def _peak_bytes(request: ThreeDRequest, form: Arrangement) -> float:
    # Bytes do not depend on the links.
    costs = part_costs(request.transformer, request.accelerator, Ring(form.tensor), form.microbatch_size)
    microbatches = request.batch_size // (form.microbatch_size * form.data)
    layers, precision = request.transformer.layers, request.precision
    ends = {0, form.pipeline - 1}
    return max(position_bytes(costs, precision, form, layers, microbatches, position) for position in ends)


def _smallest(request: ThreeDRequest, devices: int) -> tuple[float, Arrangement] | None:
    """The arrangement of `devices` devices that needs least memory; of the microbatch sizes the least is enough."""
    request = request if request.microbatch_size is not None else replace(request, microbatch_size=1)
    forms = [(_peak_bytes(request, form), form) for form in _fitting(request, inf, devices)]
    return min(forms, key=lambda pair: pair[0], default=None)


def _enough_devices(request: ThreeDRequest, limit: float) -> int | None:
    """The least number of devices on which an arrangement fits; replicas only add to them."""
    model, data = request.transformer, request.data or 1
    tensors, pipelines = _divisors(model.heads, request.tensor), _divisors(model.layers, request.pipeline)
    for devices in sorted({tensor * pipeline * data for tensor in tensors for pipeline in pipelines}):
        smallest = _smallest(request, devices)
        if smallest is not None and smallest[0] <= limit:
            return devices
    return None


def _nothing_fits(request: ThreeDRequest) -> PlanError:
    model, limit = request.transformer, request.cluster.memory_bytes
    smallest = _smallest(request, request.count)
    fixed = [field.name for field in fields(request) if field.name in _FIXABLE and getattr(request, field.name)]
    asked = " with " + ", ".join(f"{name} = {getattr(request, name)}" for name in fixed) if fixed else ""
    if smallest is None or limit is None:
        other = next((n for n in range(request.count - 1, 0, -1) if _smallest(request, n)), None)
        mend = "leave a dimension free" if other is None else f"use devices={other}, the next smaller number that has"
        return PlanError(
            f"{request.count} devices have no arrangement (p, t, d, b, v){asked}: expected p t d = {request.count}, t "
            f"a divisor of {model.heads} heads, p v of {model.layers} layers, d b of a batch of {request.batch_size} "
            f"(and m mod p = 0 if v > 1), found none. Change the batch size or the number of devices: {mend}"
        )
    needed, form = smallest
    mends = [f"devices of {bytes_text(needed)}"]
    enough = _enough_devices(request, limit)
    if enough is not None:
        mends.append(f"{enough} devices like these")
    if request.recompute is False:
        other_bytes = _smallest(replace(request, recompute=True), request.count)
        if other_bytes is not None and other_bytes[0] < needed:
            mends.append(f"recompute=True, which needs {bytes_text(other_bytes[0])}")
    return PlanError(
        f"{model.parameters / 1e9:.4g} billion parameters do not fit on {request.count} devices{asked}: expected at "
        f"most {bytes_text(limit)} on each, found {bytes_text(needed)} in the smallest arrangement, {form}. "
        f"It takes {', or '.join(mends)}"
    )


_FIXABLE = ("pipeline", "tensor", "data", "microbatch_size", "stages_per_rank", "checkpoints")
