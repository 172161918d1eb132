"""Measures what actions, steps and messages cost the ranks beside the computation of layers.

Actions: the worker around the layers, and Python with cold caches.

A pipeline of one stage trains in this process alone. Its layer reads more memory than a core's cache holds, as real
layers do, so that the worker finds its caches as cold as in a real training. A step of many microbatches less one of
few is the time of that many forwards and backwards; the layer's own, in a plain loop, are taken off. What the step of
few takes beyond its microbatches is the cost of every step.

Messages: the computation that a rank loses to each of them.
Two ranks compute and exchange messages both ways, as neighbour stages do. Each repeats small matrix products, once
without a message and once with one on its way in each direction; they compute so long that the message has arrived when
they ask for it. The difference of the two times is what the messages took from the computation: the calls that hand
them over and take them in, copies, and threads and interrupts on the same core. With the smallest message it is the
cost of every message, and what a large one takes beyond that is the cost of its bytes. Medians over the exchanges whose
message had arrived. The two ranks must be the only ones of their hosts that measure. Where the device is no CPU, it
computes on while its host sends, and messages are taken to cost nothing.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Protocol

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
from penstock.runtime.transport.transport import PendingMessage
from penstock.runtime.transport.worlds import SingleProcess
from penstock.training.recipes import Recipe
from penstock.values.link_tables import FREE, MessageCosts
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


def measure_action_seconds() -> tuple[float, float]:
    """How many seconds a forward or backward takes beyond its layers, and a step beyond its microbatches, on this
    process's CPU.
    """
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


def action_seconds(few: Sequence[float], many: Sequence[float], bare: Sequence[float]) -> tuple[float, float]:
    """The seconds of an action and of a step, from those of steps with few and with many microbatches, and of as many
    microbatches without a worker as the latter have more; each has a forward and a backward.
    """
    more = median(many) - median(few)
    step = median(few) - _FEW / (_MANY - _FEW) * max(0.0, more)
    return max(0.0, more - median(bare)) / (2 * (_MANY - _FEW)), max(0.0, step)


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


_WIDTH = 128
"""Of the matrices, whose product takes less than 0.1 ms."""
_EXCHANGES = 10
_SMALLEST = 8
_LARGE_BYTES, _LARGE_SECONDS = 2**20, 0.01
"""The large message, and how long it may take; on a slow link it is smaller. With 256 KiB on a fast link the bytes were
lost in the noise."""
_PATIENCE = 2.0
"""How many times as long as a message should take a rank computes before it asks for it."""
_LEAST_SECONDS = 2e-3
"""How long a rank computes at least."""


class Partner(Protocol):
    """This rank's side of the two links to another one."""

    @property
    def drives(self) -> bool:
        """Whether this rank decides how the two measure."""

    def send(self, kind: str, tensor: Tensor) -> None:
        """Sends to the partner."""

    def post(self, kind: str) -> PendingMessage:
        """Posts a receive from the partner."""

    def receive(self, kind: str) -> list[float]:
        """Waits for numbers of the partner."""


def measure_message_costs(partner: Partner, latency_seconds: float, bandwidth: float) -> MessageCosts:
    """What a message costs this rank, at either end. `latency_seconds` and `bandwidth`: what this rank has measured of
    the link to the partner, which makes the same call.
    """
    matrix = torch.ones(_WIDTH, _WIDTH)
    product = torch.empty_like(matrix)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)

    large = max(64, min(_LARGE_BYTES, int(_LARGE_SECONDS * bandwidth)))
    series = []
    for size in (_SMALLEST, large):
        if partner.drives:
            seconds = max(_LEAST_SECONDS, _PATIENCE * (latency_seconds + size / bandwidth))
            compute(10)
            start = time.perf_counter()
            compute(100)
            times = max(1, int(seconds / (time.perf_counter() - start) * 100))
            partner.send("costs", torch.tensor([size, times]))
        else:
            size, times = map(int, partner.receive("costs"))
        # Of two series the one with the lower median: another program may have disturbed the other one.
        series.append((size, min((_exchange(partner, size, times, compute) for _ in range(2)), key=median)))
    return fit_costs(*series)


def _exchange(partner: Partner, size: int, times: int, compute: Callable[[int], None]) -> list[float]:
    """The seconds that each exchange of messages of `size` bytes took from this rank."""
    payload = torch.zeros(size, dtype=torch.uint8)
    kind = f"exchange of {size} bytes"
    # The first message carries its header, and both ranks begin together after it.
    receive = partner.post(kind)
    partner.send(kind, payload)
    receive.wait()
    lost, waited = list[float](), list[float]()
    for _ in range(_EXCHANGES):
        start = time.perf_counter()
        compute(times)
        middle = time.perf_counter()
        receive = partner.post(kind)
        partner.send(kind, payload)
        compute(times)
        # If the partner was held up, the wait for it is no cost of the message.
        series = lost if receive.ready() else waited
        receive.wait()
        series.append((time.perf_counter() - middle) - (middle - start))
    return lost or waited


def fit_costs(smallest: tuple[int, Sequence[float]], large: tuple[int, Sequence[float]]) -> MessageCosts:
    """The costs of one message at one end, from (bytes, seconds lost to each exchange): of a message that was sent and
    one that was received.
    """
    (few, fixed), (many, more) = smallest, large
    alone = max(0.0, median(fixed))
    if many <= few:
        return MessageCosts(alone / 2) if alone else FREE
    return MessageCosts(alone / 2, max(0.0, median(more) - alone) / (2 * (many - few)))
