"""Plans that the planners make of measured profiles run as planned.

The profiles are those of tests/data/pipedream, their nodes joined to eight layers; samples are fewer.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.values import Cluster, LayerProfile, Profile
from penstock.values.plans import schedule
from support import models
from support.paths import PIPEDREAM
from support.processes import Pool
from support.training import LAYERS, Case, Outcome, assert_equal, assert_ranks_equal, run_reference, train

SLOW, FAST = 1e8, 1.2e10
"""Bytes per second: a network of 1 Gbit/s within reach, and PCIe."""


def profile_of(name: str) -> Profile:
    """Measured by PipeDream's authors; as if a microbatch were of three samples."""
    measured = Profile.from_pipedream(PIPEDREAM / name / "graph.txt", 3).layers
    bounds = [len(measured) * layer // LAYERS for layer in range(LAYERS + 1)]
    groups = [measured[start:stop] for start, stop in pairwise(bounds)]
    joined = (
        LayerProfile(
            group[0].name,
            sum(layer.forward_seconds for layer in group),
            sum(layer.backward_seconds for layer in group),
            group[-1].cut_bytes,
            sum(layer.saved_bytes for layer in group),
            sum(layer.parameter_bytes for layer in group),
        )
        for group in groups
    )
    return Profile(tuple(joined), 3, name)


@dataclass(frozen=True)
class Wish:
    """What is planned, and what comes out: the replicas of the stages."""

    profile: str
    devices: int
    bandwidth: float
    planner: str | None
    schedule: str
    microbatches: int
    replicas: tuple[int, ...]

    def plan(self) -> penstock.Plan:
        return penstock.plan(
            profile_of(self.profile),
            Cluster.uniform(self.devices, self.bandwidth),
            planner=self.planner,
            schedule=self.schedule,
            microbatches=self.microbatches,
            progress=False,
        )


WISHES = [
    Wish("vgg16", 5, SLOW, "pipedream", "pipedream", 5, (4, 1)),
    Wish("vgg16", 3, SLOW, "pipedream", "1f1b-flush", 5, (1, 2)),
    Wish("vgg16", 5, SLOW, "spp", "spp", 5, (3, 1, 1)),
    Wish("vgg16", 4, SLOW, "2bw", "2bw", 16, (2, 2)),
    Wish("vgg16", 4, SLOW, "interleaved", "interleaved", 8, (2, 2, 2, 2)),
    Wish("gnmt", 5, FAST, "pipedream", "pipedream", 7, (1, 1, 1, 1, 1)),
    Wish("gnmt", 5, FAST, "spp", "spp", 5, (1, 1, 3)),
    Wish("gnmt", 5, FAST, None, "2bw", 7, (1, 1, 1, 2)),
]


def run_planned(plan: penstock.Plan) -> tuple[Outcome, list[tuple[int, str]]]:
    """What a run leaves, and the ranks and their actions in the last step, each rank's in order."""
    case = Case("layered", "gpipe", 1, 1)
    pipe = penstock.Pipeline(case.build(), check="off", **{**case.options, "plan": plan})
    losses = [pipe.step(x, y).loss for x, y in case.batches]
    done = [(span.rank, span.action) for span in pipe.timeline().spans]
    return replace(train(pipe, []), losses=tuple(map(float, losses))), done


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wish", WISHES, ids=lambda w: f"{w.profile}-{w.planner}-{w.schedule}-{w.replicas}")
def test_plans_run_as_planned(pool: Pool, wish: Wish) -> None:
    """In the last step every rank did what its schedule says."""
    plan, case = wish.plan(), Case("layered", "gpipe", 1, 1)
    assert (plan.schedule, plan.replicas, plan.microbatches) == (wish.schedule, wish.replicas, wish.microbatches)

    outcomes = pool.run(plan.ranks, run_planned, plan)

    assert_ranks_equal([[found] for found, _ in outcomes], [run_reference(case, plan=plan)])
    done, programs = outcomes[0][1], schedule(plan).step(len(case.batches) - 1)
    assert [[action for rank, action in done if rank == own] for own in range(plan.ranks)] == [
        [str(action) for action in program] for program in programs
    ]


class Recurrent(nn.Module):
    """An LSTM with dropout before it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.lstm = nn.Dropout(0.2), nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.dropout(x))[0]


@pytest.mark.parametrize(("here", "there"), [(1, 2), (3, 2)])
def test_rows_that_come_in_one_piece_are_like_those_that_are_joined(here: int, there: int) -> None:
    """An LSTM's output does not lie in memory in the order of its dimensions, and dropout draws in that order."""
    ends = (penstock.Stage(0, 2, tuple(range(here))), penstock.Stage(2, 4, tuple(range(here, here + there))))
    torch.manual_seed(6)
    batches = [(torch.randn(7, 5, 6).double(), torch.randn(7, 5, 6).double()) for _ in range(2)]
    options: dict[str, Any] = {
        "sample": (batches[0][0][:3],),
        "loss_fn": F.mse_loss,
        "optimizer": models.momentum,
        "plan": penstock.Plan(ends, microbatches=2, routing="split"),
    }
    model = nn.Sequential(*(Recurrent() for _ in range(4))).double()
    expected = penstock.reference_train(model, batches, **options)

    assert_equal(Outcome(expected.losses, expected.state), train(penstock.Pipeline(model, **options), batches))
