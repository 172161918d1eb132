"""The speed, utilization, bubble and memory of a training, as `Pipeline.stats` returns them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from penstock.arguments import FLAG, Rule, check_arguments, number
from penstock.capturing.chain import LayerChain
from penstock.reporting.peak_flops import peak_flops_of
from penstock.runtime.engine.step_records import Speed
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule
from penstock.simulating.simulator import balanced_bubble
from penstock.values.plans import Plan


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


@dataclass(frozen=True, slots=True)
class _Local:
    """The numbers that differ between the processes."""

    items_per_second: float | None
    """None on processes that do not read targets."""
    idle_share: float | None
    memory: int | None


_RATE = number(above=0).but("leave it out for the default").optional
_RULES: Mapping[str, Rule[Any]] = {
    "tokens_per_sample": _RATE,
    "flops_per_sample": _RATE,
    "peak_flops": _RATE,
    "all_ranks": FLAG,
}


class StatsSource:
    """Makes the `Stats` of one pipeline. What it works out of the model and the schedule it keeps."""

    def __init__(
        self,
        chain: LayerChain,
        plan: Plan,
        schedule: Schedule,
        device: torch.device,
        world: World,
    ) -> None:
        self._chain, self._plan, self._schedule, self._device, self._world = chain, plan, schedule, device, world

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
        own = _Local(
            speed.items / speed.seconds if speed is not None and speed.items is not None else None,
            speed.idle_share if speed is not None else None,
            torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
        )
        every = self._world.gather(asdict(own), "for Pipeline.stats") if all_ranks else [asdict(own)]
        ranks = [_Local(**numbers) for numbers in every]
        shares = [rank.idle_share for rank in ranks if rank.idle_share is not None]
        stats = Stats(
            steps=0,
            idle_share=own.idle_share,
            bubble=sum(shares) / len(shares) if all_ranks and len(shares) == len(ranks) else None,
            predicted_bubble=self._predicted_bubble,
            peak_memory_bytes=max((rank.memory for rank in ranks if rank.memory is not None), default=None),
        )
        if speed is None:
            return stats
        samples_per_second = speed.samples / speed.seconds
        items_per_second = next((rank.items_per_second for rank in ranks if rank.items_per_second is not None), None)
        flops = self._flops_per_sample if flops_per_sample is None else flops_per_sample
        flops_per_second = _product(flops, samples_per_second)
        peak = peak_flops_of(self._device) if peak_flops is None else peak_flops
        return replace(
            stats,
            steps=speed.steps,
            step_seconds=speed.seconds / speed.steps,
            samples_per_second=samples_per_second,
            tokens_per_second=_product(tokens_per_sample, samples_per_second) or items_per_second,
            flops_per_second=flops_per_second,
            flops_utilization=peak and _product(flops_per_second, 1 / (peak * self._world.processes)),
        )

    @cached_property
    def _flops_per_sample(self) -> float | None:
        return count_training_flops(self._chain)

    @cached_property
    def _predicted_bubble(self) -> float:
        predicted = self._plan.predicted
        return balanced_bubble(self._schedule, self._plan.recompute) if predicted is None else predicted.bubble


def _product(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


_FORWARDS_OF_A_STEP = 3
"""A backward takes twice the operations of its forward: one product for the gradient of each factor."""


def count_training_flops(chain: LayerChain) -> float | None:
    """Three times the operations of the forward, for one sample of the captured ones: without recomputation, without
    the loss, and without regard to weights that are not trained.

    A multiplication with an addition is two operations. None if no operator was counted.
    """
    operators = [operator for layer in chain.layers for operator in layer.operators]
    if not operators:
        return None
    return _FORWARDS_OF_A_STEP * sum(operator.flops for operator in operators) / chain.inputs.microbatch_size
