"""Numbers about a running pipeline: speed, utilization, bubble and memory, its stragglers, and a better cut of it.

The loss and the statistics are logged to Weights & Biases, TensorBoard, or anything with their methods.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch

from penstock.arguments import FLAG, Rule, check_arguments, integer, number
from penstock.capturing.chain import LayerChain
from penstock.capturing.work_estimates import estimate_seconds
from penstock.doctor.stragglers import Stragglers, find_slow_layers, find_stragglers, recut, stage_seconds
from penstock.errors import PenstockError
from penstock.runtime.batches.results import StepResult
from penstock.runtime.collectives.agreements import gather_results
from penstock.runtime.engine.step_records import Speed
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule
from penstock.timelines.timelines import Timeline
from penstock.values.plans import Plan
from penstock.values.profiles import Profile


@dataclass(frozen=True, slots=True)
class Stats:
    """Describes the last steps of a training, at most 8. What is unknown is None.

    Times are those of this process. All ranks take equally long for a step on average, so rates are those of the whole
    pipeline.
    """

    steps: int
    """The number of steps that are measured; 0 if none has ended."""
    step_seconds: float | None = None
    """The mean time from the start of one step to the start of the next, what the training loop does between them
    included. Steps that are followed by something else (an evaluation, a drain) are left out."""
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    """By `tokens_per_sample`, else the items that ``loss_weight`` counts."""
    flops_per_second: float | None = None
    """The floating-point operations that the model needs, per second, on all devices together."""
    flops_utilization: float | None = None
    """The share that these are of the peak rate of all devices ("MFU")."""
    idle_share: float | None = None
    """The share of the time in which this rank computes nothing; None if several ranks take turns in one process."""
    bubble: float | None = None
    """The mean of the idle shares of all ranks; known with ``all_ranks`` only."""
    predicted_bubble: float | None = None
    """The same as predicted: by the plan, else for stages of equal cost and free messages."""
    peak_memory_bytes: int | None = None
    """The most GPU memory that this process had allocated since its start, or since
    ``torch.cuda.reset_peak_memory_stats()``; with ``all_ranks`` the most of all processes. None on a CPU."""

    def as_dict(self) -> dict[str, float]:
        """The numbers that are known, by name."""
        return {name: number for name, number in asdict(self).items() if number is not None}


_RATE = number(above=0).but("leave it out for the default").optional
_RULES: Mapping[str, Rule[Any]] = {
    "tokens_per_sample": _RATE,
    "flops_per_sample": _RATE,
    "peak_flops": _RATE,
    "all_ranks": FLAG,
}


class StatsSource:
    """Makes the numbers of one pipeline. What it works out of the model and the schedule it keeps. `profile`: what the
    plan was made from; stages are compared with estimates if it is None.
    """

    def __init__(
        self,
        chain: LayerChain,
        plan: Plan,
        schedule: Schedule,
        device: torch.device,
        world: World,
        *,
        profile: Profile | None,
    ) -> None:
        self._chain, self._plan, self._schedule, self._device, self._world = chain, plan, schedule, device, world
        self._profile = profile

    def stats(
        self,
        speed: Speed | None,
        *,
        tokens_per_sample: float | None,
        flops_per_sample: float | None,
        peak_flops: float | None,
        all_ranks: bool,
    ) -> Stats:
        """The statistics of steps of `speed`; None if there are none. The other arguments are those of
        `Pipeline.stats`.
        """
        check_arguments(
            "stats",
            _RULES,
            tokens_per_sample=tokens_per_sample,
            flops_per_sample=flops_per_sample,
            peak_flops=peak_flops,
            all_ranks=all_ranks,
        )
        # Processes that do not read targets know of no items.
        items = speed.items / speed.seconds if speed is not None and speed.items is not None else None
        idle_share = speed.idle_share if speed is not None else None
        memory = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        own = items, idle_share, memory
        every = self._world.gather(own, "for Pipeline.stats") if all_ranks else [own]
        rates, shares, memories = ([value for value in each if value is not None] for each in zip(*every, strict=True))
        stats = Stats(
            steps=0,
            idle_share=idle_share,
            bubble=sum(shares) / len(shares) if all_ranks and len(shares) == len(every) else None,
            predicted_bubble=self._predicted_bubble,
            peak_memory_bytes=max(memories, default=None),
        )
        if speed is None:
            return stats
        samples_per_second = speed.samples / speed.seconds
        flops = self._flops_per_sample if flops_per_sample is None else flops_per_sample
        flops_per_second = _product(flops, samples_per_second)
        peak = peak_flops_of(self._device) if peak_flops is None else peak_flops
        return replace(
            stats,
            steps=speed.steps,
            step_seconds=speed.seconds / speed.steps,
            samples_per_second=samples_per_second,
            tokens_per_second=_product(tokens_per_sample, samples_per_second) or next(iter(rates), None),
            flops_per_second=flops_per_second,
            flops_utilization=peak and _product(flops_per_second, 1 / (peak * self._world.processes)),
        )

    def stragglers(
        self, timeline: Timeline, profile: Profile | None, tolerance: float, measure: Callable[..., Profile] | None
    ) -> Stragglers:
        """The stragglers in `timeline`; of layers, too, if `measure` measures them. Collective."""
        known = profile or self._profile
        found = find_stragglers(timeline, self._plan, self._weights(), profile=known, tolerance=tolerance)
        if measure is None:
            return found

        def seconds() -> list[float]:
            return [layer.seconds for layer in measure(iterations=3, warmup=1, progress=False).layers]

        own = gather_results(self._world, "while it measured its layers", seconds)
        names = [layer.name for layer in self._chain.layers]
        return replace(found, found=(*found.found, *find_slow_layers(names, own, known, tolerance)))

    def recut(self, timeline: Timeline, profile: Profile | None) -> Plan:
        """The plan with the cut that the measured stages of `timeline` ask for. Collective."""
        known = profile or self._profile
        weights = [layer.seconds for layer in known.layers] if known is not None else self._weights()
        return recut(self._plan, weights, stage_seconds(timeline))

    def _weights(self) -> Sequence[float]:
        """The estimated work of each layer, by process 0: the plan must be the same in all."""

        def estimate() -> list[float]:
            if self._world.rank != 0:
                return []
            return list(estimate_seconds(self._chain, self._device) or [1.0] * len(self._chain.layers))

        return gather_results(self._world, "while it estimated its layers", estimate)[0]

    @cached_property
    def _flops_per_sample(self) -> float | None:
        return count_training_flops(self._chain)

    @cached_property
    def _predicted_bubble(self) -> float:
        from penstock.simulating.simulator import balanced_bubble

        predicted = self._plan.predicted
        return balanced_bubble(self._schedule, self._plan.recomputed) if predicted is None else predicted.bubble


def _product(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


# The words in the name of a device, and its peak rate: dense products of matrices in bfloat16 (float16 on GPUs without
# bfloat16) with tensor cores, at the highest clock, in operations per second. Utilization is relative to this rate
# whatever type a model computes in, as is usual. The first row whose words are all there counts. The sources are
# NVIDIA's data sheets of these GPUs, and for B200 that of the HGX B200, divided by its eight GPUs. Where a data sheet
# gives the rate with sparsity, the dense one is half of it.
_RATES: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250e12),
    (("H200", "NVL"), 835.5e12),
    (("H200",), 989.5e12),
    (("H100", "NVL"), 835.5e12),
    (("H100", "PCIe"), 756.5e12),
    (("H100",), 989.5e12),
    (("A100",), 312e12),
    (("V100", "PCIE"), 112e12),
    (("V100",), 125e12),
    (("L40S",), 362.05e12),
    (("L4",), 121e12),
    (("A10",), 125e12),
    (("T4",), 65e12),
)


def peak_flops_of(device: torch.device) -> float | None:
    """The peak rate of `device` in operations per second; None for a CPU and a GPU that is not in the table."""
    return rate_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def rate_of(name: str) -> float | None:
    """The peak rate of the GPU that PyTorch calls `name`, such as ``NVIDIA A100-SXM4-80GB``; None if unknown."""
    words = set(name.replace("-", " ").split())
    return next((rate for parts, rate in _RATES if words.issuperset(parts)), None)


def count_training_flops(chain: LayerChain) -> float | None:
    """Three times the operations of the forward, for one sample of the captured ones: without recomputation, without
    the loss, and without regard to weights that are not trained.

    A backward takes twice the operations of its forward: one product for the gradient of each factor. A multiplication
    with an addition is two operations. None if no operator was counted.
    """
    operators = [operator for layer in chain.layers for operator in layer.operators]
    return 3 * sum(operator.flops for operator in operators) / chain.inputs.microbatch_size if operators else None


@runtime_checkable
class DictWriter(Protocol):
    """Takes all numbers of a step at once, as a run of Weights & Biases does."""

    def log(self, data: dict[str, float], step: int) -> object:
        """Writes `data`."""


@runtime_checkable
class ScalarWriter(Protocol):
    """Takes one number after the other, as TensorBoard's ``SummaryWriter`` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Writes one number."""


class Measured(Protocol):
    """A `Pipeline`."""

    @property
    def stats(self) -> Callable[..., Stats]:
        """As that of `Pipeline`."""


def log_stats(
    pipe: Measured,
    writer: DictWriter | ScalarWriter | None,
    step: int,
    result: StepResult | None = None,
    *,
    every: int = 10,
    **options: Any,
) -> None:
    """Logs the statistics of `pipe` under ``penstock/<name>``, if `step` is a multiple of `every`.

    `writer` has a method ``log(dict, step)``, as a run of Weights & Biases, or ``add_scalar(name, number, step)``, as
    TensorBoard's ``SummaryWriter``. It is None on ranks that log nothing. With `result`, what `Pipeline.step` returned,
    the loss is logged as ``loss``, and metrics under their own names; reading them waits until the last stage has them.
    Other keywords are those of `Pipeline.stats`; with ``all_ranks=True`` every rank must make this call. Raises
    `PenstockError` for another writer.
    """
    every = integer(1).but("give the number of steps between two that are logged").check("log_stats(every=)", every)
    step = integer(0).but("give the number of the step").check("log_stats(step=)", step)
    if writer is not None and not isinstance(writer, DictWriter | ScalarWriter):
        raise PenstockError(
            f"writer: expected an object with log(dict, step) or add_scalar(name, number, step), found {writer!r}. "
            "Pass a run of Weights & Biases or a SummaryWriter of TensorBoard, or None on ranks that log nothing"
        )
    if step % every or (writer is None and not options.get("all_ranks")):
        return
    stats = pipe.stats(**options)
    if writer is None:
        return
    numbers = {f"penstock/{name}": number for name, number in stats.as_dict().items()}
    if result is not None:
        numbers = {"loss": float(result.loss), **result.metrics, **numbers}
    if isinstance(writer, DictWriter):
        writer.log(numbers, step=step)
        return
    for name, value in numbers.items():
        writer.add_scalar(name, value, global_step=step)
