"""Measures how much longer an action takes than its layers: the worker around them, and Python with cold caches.

A pipeline of one stage trains in this process alone. Its layer reads more memory than a core's cache holds, as real
layers do, so that the worker finds its caches as cold as in a real training. A step of many microbatches less one of
few is the time of that many forwards and backwards; the layer's own, in a plain loop, are taken off.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.doors import capture
from penstock.runtime.assembly.parallelize_hooks import ParallelStages
from penstock.runtime.assembly.pipeline_options import RunOptions
from penstock.runtime.assembly.scheduled_plans import ScheduledPlan, make_schedule
from penstock.runtime.assembly.started_engines import start_engine
from penstock.runtime.batches.microbatches import split
from penstock.runtime.engine.engine import Engine
from penstock.runtime.transport.worlds import SingleProcess
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan

_FEW, _MANY = 2, 10
"""Microbatches of the two kinds of steps."""
_ROUNDS = 9
_CACHE_NUMBERS = 2**19
"""The numbers that the layer reads: two megabytes."""
_PROCESS_SECONDS = 60.0


class _Reader(nn.Module):
    """A layer that reads a lot and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("memory", torch.zeros(_CACHE_NUMBERS))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.get_buffer("memory")
        return x * self.weight + memory.sum()


def measure_action_seconds() -> float:
    """How many seconds a forward or backward takes beyond its layers, on this process's CPU."""
    inputs, target = torch.ones(1, 4), torch.zeros(1, 4)
    with torch.random.fork_rng(devices=[]), ExitStack() as opened:
        chain = capture(_Reader(), (inputs,))
        steps = {count: _stepper(chain, inputs, target, count, opened) for count in (_FEW, _MANY)}
        loop = _plain_loop(chain, inputs, target)
        for work in (*steps.values(), loop):
            work()
        series: dict[object, list[float]] = {_FEW: [], _MANY: [], loop: []}
        for _ in range(_ROUNDS):
            for name, work in (*steps.items(), (loop, loop)):
                start = time.perf_counter()
                work()
                series[name].append(time.perf_counter() - start)
    return action_seconds(series[_FEW], series[_MANY], series[loop])


def action_seconds(few: Sequence[float], many: Sequence[float], bare: Sequence[float]) -> float:
    """From the seconds of steps with few and with many microbatches, and of as many microbatches without a worker as
    the latter have more; each has a forward and a backward.
    """
    return max(0.0, median(many) - median(few) - median(bare)) / (2 * (_MANY - _FEW))


def _plain_loop(chain: LayerChain, inputs: Tensor, target: Tensor) -> Callable[[], None]:
    """The layers of the microbatches by which the two kinds of steps differ."""
    module = chain.layers[0].module

    def run() -> None:
        for _ in range(_MANY - _FEW):
            (output,) = module(inputs)
            torch.autograd.backward(F.mse_loss(output, target))

    return run


def _stepper(chain: LayerChain, inputs: Tensor, target: Tensor, count: int, opened: ExitStack) -> Callable[[], object]:
    """A step of `count` microbatches."""
    plan = Plan.uniform(len(chain.layers), 1, microbatches=count)
    engine = _engine(plan, chain, opened)
    batch = split(chain.inputs, inputs.repeat(count, 1), target.repeat(count, 1), count)
    return lambda: float(engine.train(batch))


def _engine(plan: Plan, chain: LayerChain, opened: ExitStack) -> Engine:
    engine, _ = start_engine(
        SingleProcess(),
        ScheduledPlan(plan, make_schedule(plan, chain), granularities={}, ranks=(0,)),
        ParallelStages(chain, {}),
        Recipe(F.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.0)),
        RunOptions(timeout_seconds=_PROCESS_SECONDS),
        device=torch.device("cpu"),
        opened=opened,
    )
    return engine
