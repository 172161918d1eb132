"""What a pipeline holds while it trains, counted: by the tests themselves, and in the processes of the pool."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.runtime.execution.executor import StageExecutor
from support import models
from support.live_tensors import count_at_rest, forget_what_is_there, live_tensors
from support.training import stages_on_a_rank

__all__ = ["Observed", "Setting", "observe", "observe_all"]

WIDTH = 13
"""No other test uses it."""
MICROBATCHES = 12
"""As many as three replicas and two ranks of a pipeline divide."""

alive: Counter[tuple[int, int]] = Counter()
peak: Counter[tuple[int, int]] = Counter()
executors: dict[tuple[int, int], StageExecutor] = {}
"""Those of the pipeline at hand."""
held: Counter[tuple[int, int]] = Counter()
"""The most microbatches that an executor has had, together with the one that goes forward."""


class Token:
    """Lives as long as the graph of one forward of one layer on one replica."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        alive[key] += 1
        peak[key] = max(peak[key], alive[key])

    def __del__(self) -> None:
        alive[self.key] -= 1


class Marked(torch.autograd.Function):
    """The identity; its node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: tuple[int, int]) -> Tensor:
        ctx.token = Token(key)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Layer(nn.Module):
    """A linear layer. Its buffer tells the replicas apart, since each has its own."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("own", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        key = self.layer, self.own.data_ptr()
        if key in executors:
            held[key] = max(held[key], len(executors[key].in_flight) + 1)
        return Marked.apply(self.linear(x), key)


@dataclass(frozen=True)
class Setting:
    """One layer for each stage; `schedule` 'vertical' is `pipedream` with vertical sync."""

    schedule: str
    replicas: tuple[int, ...]
    split: bool = False

    @property
    def plan(self) -> penstock.Plan:
        """The plan."""
        per_rank = stages_on_a_rank(self.schedule)
        stages = len(self.replicas) * per_rank
        plan = penstock.Plan.uniform(
            stages,
            stages,
            schedule="pipedream" if self.schedule == "vertical" else self.schedule,
            microbatches=MICROBATCHES,
            stages_per_rank=per_rank,
            vertical_sync=self.schedule == "vertical",
        )
        groups = [tuple(range(*span)) for span in pairwise(accumulate(self.replicas, initial=0))]
        placed = tuple(penstock.Stage(s.start, s.stop, groups[s.ranks[0]]) for s in plan.stages)
        return replace(plan, stages=placed, routing="split" if self.split else "round-robin")


@dataclass(frozen=True)
class Observed:
    """What one process held."""

    peaks: dict[int, list[int]]
    """By stage: of each replica here, the most microbatches in flight; ascending."""
    graphs: dict[int, list[int]]
    """And the most of autograd's graphs."""
    weights: int
    """Tensors of a weight's shape after the drain, each storage once."""
    live: list[int]
    """Tensors alive after each step."""


def observe(setting: Setting, steps: int = 5) -> Observed:
    """Trains some steps; all ranks here, or this process's."""
    forget_what_is_there()
    return _observe(setting, steps)


def observe_all(settings: list[Setting]) -> list[Observed]:
    """Several settings, one after the other."""
    return [observe(setting) for setting in settings]


def _observe(setting: Setting, steps: int) -> Observed:
    torch.manual_seed(0)
    plan = setting.plan
    model = nn.Sequential(*(Layer(index) for index in range(len(plan.stages))))
    x = torch.randn(3 * MICROBATCHES, WIDTH)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": models.plain, "plan": plan}
    # The comparison of the first batch would run the layers of all stages.
    pipe = penstock.Pipeline(model, sample=(x[:1],), check="off", **options)
    # Capture has run the layers too.
    peak.clear()
    held.clear()
    executors.clear()
    for stages in pipe._engine.stages.values():
        for index, stage in stages.items():
            executors[index, stage.weights.buffers[0].data_ptr()] = stage.executor
    live: list[int] = []
    for _ in range(steps):
        float(pipe.step(x, x).loss)
        live.append(count_at_rest(live[2:]))
    pipe.drain()
    weights = {t.data_ptr() for t in live_tensors() if t.shape == (WIDTH, WIDTH)}
    left = [key for key, count in alive.items() if count]
    assert not left, f"graphs of {left} are alive after the drain"
    executors.clear()
    pipe.close()
    return Observed(_by_stage(held), _by_stage(peak), len(weights), live)


def _by_stage(most: Mapping[tuple[int, int], int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for (stage, _), count in most.items():
        found[stage] = sorted([*found.get(stage, []), count])
    return found
