"""A parallel configuration of a transformer, (p, t, d, b, v), and its seconds and bytes by closed forms.

A pipeline has p positions with v stages each, every stage k = l / (p v) layers; the first stage has the embedding and
the last one the head. Every stage of every replica is on t devices, and there are d replicas [Narayanan 2021, chapter
4].

Seconds of a minibatch, with T_i of position i for all its stages and one microbatch, and m microbatches per pipeline:

    m max T_i + (sum T_i - max T_i) / v + all-reduce of the gradients + update

which is (b' / b + p - 1) (tf + tb) of equation 4.1 where all positions are equal and v = 1. T_i includes the
all-reduces of tensor parallelism, the second forward of recomputed layers, and two messages per stage: Megatron-LM
sends and receives in both directions at once and waits, so that messages are not hidden behind computation.

Bytes of a position are its parameters' state and, for F stages in flight,

    without recomputation   F k A
    with it                 F c A_in + ceil(k / c) A      c of the k layers keep their input
"""

from dataclasses import dataclass
from math import ceil, isqrt

from penstock.planning.memory import chunks_in_flight
from penstock.planning.ptd_p.accelerator_models import AcceleratorModel, Precision
from penstock.planning.ptd_p.ring_links import Ring
from penstock.planning.ptd_p.transformer_costs import TransformerCosts
from penstock.scheduling.orders import INTERLEAVED, ONE_F_ONE_B_FLUSH
from penstock.values.transformers import Transformer


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The sizes of all dimensions of parallelism, for p t d devices."""

    pipeline: int
    tensor: int
    data: int
    microbatch_size: int = 1
    stages_per_rank: int = 1
    recompute: bool = True
    checkpoints: int = 1
    """Layers per stage that keep their input when recomputed; 1: the stage is recomputed as a whole."""

    @property
    def devices(self) -> int:
        """p t d."""
        return self.pipeline * self.tensor * self.data

    @property
    def schedule(self) -> str:
        """`interleaved` with several stages per rank, else `1f1b-flush`."""
        return INTERLEAVED.name if self.stages_per_rank > 1 else ONE_F_ONE_B_FLUSH.name

    def __str__(self) -> str:
        text = f"(p, t, d) = ({self.pipeline}, {self.tensor}, {self.data}), b = {self.microbatch_size}"
        text += f", v = {self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        return text + (f", recompute with {self.checkpoints} checkpoints per stage" if self.recompute else "")


@dataclass(frozen=True, slots=True)
class ParallelLinks:
    """The links of the three kinds of groups."""

    tensor: Ring
    data: Ring
    pipeline: Ring
    scatter_gather: bool = True


@dataclass(frozen=True, slots=True)
class ConfigEstimate:
    """A configuration and its predicted costs; the seconds by cause add up to those of one minibatch."""

    config: ParallelConfig
    minibatch_seconds: float
    device_operations: float
    """Operations per second and device by [Narayanan 2021, equation 4.2], including the recomputed forward."""
    samples_per_second: float
    compute_seconds: float
    """m microbatches on the average position, and the update: the time with equal stages and free messages."""
    tensor_seconds: float
    """All-reduces among the t devices."""
    pipeline_seconds: float
    """Messages between stages, with the gathers that follow them."""
    bubble_seconds: float
    """Filling and draining the pipeline, and waiting for its slowest position."""
    data_seconds: float
    """All-reduces of gradients: of the d replicas, and of the embedding that the first and the last stage share."""
    pipelined_seconds: float
    """From the first forward to the last backward; the gradients' all-reduce and the update come after."""
    slowest_seconds: float
    """T of the slowest position."""
    peak_bytes: float
    """The memory of the device that needs most."""
    simulated: bool = False
    """Whether the seconds are the simulator's; its difference to the closed form is counted as bubble."""


def checkpoint_count(layers: int, input_bytes: float, layer_bytes: float, in_flight: int = 1) -> int:
    """The c in 1 to `layers` with the least ``F c A_in + ceil(l / c) A``; of equals, the smallest.

    For F = 1 it is close to ``sqrt(l A / A_in)`` ([Narayanan 2021, section 4.3.5], which ignores how many stages are in
    flight).
    """

    def size(count: int) -> tuple[float, int]:
        return in_flight * count * input_bytes + ceil(layers / count) * layer_bytes, count

    # Only the least c for each value of ceil(l / c) can be best: there are at most 2 sqrt(l) of them.
    root = isqrt(layers)
    counts: set[int] = {*range(1, root + 2), *(ceil(layers / rows) for rows in range(1, root + 2))}
    return min((count for count in counts if count <= layers), key=size)


def stages_in_flight(pipeline: int, stages_per_rank: int, microbatches: int, position: int) -> int:
    """The most forwards of stages whose backward has not run yet, on one position of a pipeline."""
    schedule = INTERLEAVED if stages_per_rank > 1 else ONE_F_ONE_B_FLUSH
    return chunks_in_flight(pipeline, stages_per_rank, microbatches, schedule)[0][position]


def activation_bytes(costs: TransformerCosts, layers: int, in_flight: int, checkpoints: int | None) -> float:
    """The activations of `in_flight` stages of `layers` layers; `checkpoints` is None without recomputation."""
    if checkpoints is None:
        return in_flight * layers * costs.layer.saved_bytes
    kept = in_flight * checkpoints * costs.boundary_bytes
    return kept + ceil(layers / checkpoints) * costs.layer.saved_bytes


def position_bytes(
    costs: TransformerCosts,
    precision: Precision,
    config: ParallelConfig,
    *,
    layers: int,
    microbatches: int,
    position: int,
) -> float:
    """The peak of one position of the pipeline for a model of `layers` layers and `microbatches` per pipeline."""
    p, v = config.pipeline, config.stages_per_rank
    per_stage = layers // (p * v)
    in_flight = stages_in_flight(p, v, microbatches, position)
    checkpoints = config.checkpoints if config.recompute else None
    size = precision.state_bytes * v * per_stage * costs.layer.parameters
    size += activation_bytes(costs, per_stage, in_flight, checkpoints)
    if position == 0:
        # The first stage alone has p in flight, and p more once its second round of microbatches starts.
        embedded = min(microbatches, p if v == 1 else 2 * p)
        size += precision.state_bytes * costs.embedding.parameters + embedded * costs.embedding.saved_bytes
    if position == p - 1:
        size += costs.head.saved_bytes + (precision.state_bytes * costs.tied_parameters if p > 1 else 0.0)
    return size


def peak_bytes(
    costs: TransformerCosts, precision: Precision, config: ParallelConfig, *, layers: int, microbatches: int
) -> float:
    """The memory of the position that needs most: the first or the last, since it decreases between them."""
    return max(
        position_bytes(costs, precision, config, layers=layers, microbatches=microbatches, position=position)
        for position in {0, config.pipeline - 1}
    )


def boundary_seconds(costs: TransformerCosts, links: ParallelLinks) -> tuple[float, float, float]:
    """(Seconds, of them gathering, bytes per device) to hand one microbatch from a stage to the next.

    With scatter/gather each of the t devices sends a t-th to its peer, and the peers gather it over their own, faster
    links (section 4.4.1); used only where that is faster than to send all of it t times.
    """
    whole = links.pipeline.transfer_seconds(costs.boundary_bytes)
    slice_bytes = costs.boundary_bytes / costs.tensor
    gathering = links.tensor.gather_seconds(costs.boundary_bytes)
    scattered = links.pipeline.transfer_seconds(slice_bytes) + gathering
    if links.scatter_gather and scattered < whole:
        return scattered, gathering, slice_bytes
    return whole, 0.0, costs.boundary_bytes


def estimate_config(
    transformer: Transformer,
    accelerator: AcceleratorModel,
    precision: Precision,
    links: ParallelLinks,
    costs: TransformerCosts,
    *,
    config: ParallelConfig,
    batch_size: int,
) -> ConfigEstimate:
    """The closed form of one configuration; m = B / (b d) must be whole."""
    p, v = config.pipeline, config.stages_per_rank
    layers, microbatches = transformer.layers, batch_size // (config.microbatch_size * config.data)
    layer = costs.layer.seconds + (costs.layer.forward_seconds if config.recompute else 0.0)
    handing = 2 * v * boundary_seconds(costs, links)[0] if p > 1 else 0.0
    usual = layers // p * layer + handing
    first, last = costs.embedding.seconds, costs.head.seconds
    slowest = usual + (max(first, last) if p > 1 else first + last)
    total = p * usual + first + last
    pipelined = microbatches * slowest + (total - slowest) / v
    reducing = layers * costs.layer.reduce_seconds * (1.5 if config.recompute else 1)
    reducing += costs.embedding.reduce_seconds + costs.head.reduce_seconds
    tensor, messages = microbatches * reducing / p, microbatches * handing
    # The first position has the most parameters.
    parameters = layers // p * costs.layer.parameters + costs.embedding.parameters
    data = links.data.allreduce_seconds(precision.gradient_bytes * parameters)
    if p > 1:
        # The first and the last stage sum the gradients of the embedding that both hold.
        pair = Ring(2, links.pipeline.bandwidth, links.pipeline.latency_seconds)
        data += pair.allreduce_seconds(precision.gradient_bytes * costs.tied_parameters)
    update = accelerator.moving_seconds(precision.update_bytes * parameters)
    seconds = pipelined + data + update
    operations = transformer.batch_operations(batch_size, recompute=config.recompute)
    return ConfigEstimate(
        config=config,
        minibatch_seconds=seconds,
        device_operations=operations / (config.devices * seconds),
        samples_per_second=batch_size / seconds,
        compute_seconds=microbatches * total / p - tensor - messages + update,
        tensor_seconds=tensor,
        pipeline_seconds=messages,
        bubble_seconds=pipelined - microbatches * total / p,
        data_seconds=data,
        pipelined_seconds=pipelined,
        slowest_seconds=slowest,
        peak_bytes=peak_bytes(costs, precision, config, layers=layers, microbatches=microbatches),
    )
