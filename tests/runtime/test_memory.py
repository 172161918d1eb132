"""What a step holds in memory: what the schedule promises, and nothing that grows."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import penstock
from processes import Pool
from training import Case, count_tensors

SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "1f1b", "vertical", "2bw")
RANKS = 3

alive: Counter[int] = Counter()
peak: Counter[int] = Counter()


class Token:
    """Lives as long as the graph of one forward of one layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        alive[layer] += 1
        peak[layer] = max(peak[layer], alive[layer])

    def __del__(self) -> None:
        alive[self.layer] -= 1


class Marked(torch.autograd.Function):
    """The identity; its node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: int) -> Tensor:
        ctx.token = Token(layer)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Layer(nn.Module):
    """A linear layer of a width that no other test uses."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.linear = nn.Linear(13, 13, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Marked.apply(self.linear(x), self.layer)


def build(schedule: str) -> penstock.Pipeline:
    """One layer for each stage."""
    per_rank = 2 if schedule == "interleaved" else 1
    plan = penstock.Plan.uniform(
        RANKS * per_rank,
        RANKS * per_rank,
        schedule="1f1b" if schedule == "vertical" else schedule,
        microbatches=9,
        stages_per_rank=per_rank,
        vertical_sync=schedule == "vertical",
    )
    model = nn.Sequential(*(Layer(index) for index in range(len(plan.stages))))
    return penstock.Pipeline(model, sample=(torch.randn(1, 13),), loss_fn=F.mse_loss, optimizer=models.plain, plan=plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_in_flight_are_those_of_the_schedule(schedule: str) -> None:
    pipe, x = build(schedule), torch.randn(9, 13)
    peak.clear()
    for _ in range(3):
        pipe.step(x, x)
    pipe.drain()

    stages = range(pipe.schedule.stages)
    assert [peak[stage] for stage in stages] == [pipe.schedule.in_flight(stage) for stage in stages]
    assert not any(alive.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weight_versions_are_those_of_the_schedule(schedule: str) -> None:
    gc.collect()
    pipe, x = build(schedule), torch.randn(9, 13)
    for _ in range(3):
        pipe.step(x, x)
    pipe.drain()
    gc.collect()
    weights = {t.data_ptr() for t in gc.get_objects() if issubclass(type(t), Tensor) and t.shape == (13, 13)}

    assert len(weights) == sum(pipe.schedule.versions(stage) for stage in range(pipe.schedule.stages))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_tensors_are_constant_from_step_to_step(schedule: str) -> None:
    interleaves = schedule == "interleaved"
    counts = count_tensors(Case("normalized", schedule, 2, 4, "adamw", stages_per_rank=2 if interleaves else 1), 7)

    assert len(set(counts[3:])) == 1, counts


def test_live_tensors_are_constant_in_several_processes(pool: Pool) -> None:
    for counts in pool.run(2, count_tensors, Case("normalized", "1f1b", 2, 4, "adamw"), 7):
        assert len(set(counts[3:])) == 1, counts
