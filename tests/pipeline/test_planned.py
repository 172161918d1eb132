"""Plans that the planners make of measured profiles run as planned, on chains shaped like what was measured."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import penstock
from penstock.scheduling import Forward, Receive
from penstock.scheduling.actions import parse
from penstock.values import Cluster
from penstock.values.plans import schedule
from support.processes import Pool
from support.profiled_models import STEPS, SUBJECTS, Run, profile_of, run_planned, run_reference

SLOW, MIDDLING, FAST = 1e8, 1.25e9, 1.2e10
"""Bytes per second: a network of 1 and of 10 Gbit/s within reach, and PCIe."""


@dataclass(frozen=True)
class Wish:
    """What is planned, and what comes out: the replicas of the stages."""

    subject: str
    devices: int
    bandwidth: float
    planner: str | None
    schedule: str
    microbatches: int
    replicas: tuple[int, ...]

    def plan(self) -> penstock.Plan:
        """The planner's."""
        return penstock.plan(
            profile_of(self.subject),
            Cluster.uniform(self.devices, self.bandwidth),
            planner=self.planner,
            schedule=self.schedule,
            microbatches=self.microbatches,
            progress=False,
        )


WISHES = [
    Wish("vgg16", 5, SLOW, "pipedream", "pipedream", 5, (4, 1)),
    Wish("vgg16", 3, SLOW, "pipedream", "1f1b-flush", 5, (2, 1)),
    Wish("vgg16", 5, SLOW, "spp", "spp", 7, (3, 1, 1)),
    Wish("vgg16", 4, SLOW, "2bw", "2bw", 16, (2, 2)),
    Wish("vgg16", 4, SLOW, "interleaved", "interleaved", 8, (2, 2, 2, 2)),
    Wish("resnet18", 3, FAST, "pipedream", "pipedream", 5, (3,)),
    Wish("resnet18", 4, FAST, "spp", "spp", 7, (3, 1)),
    Wish("resnet18", 4, FAST, "interleaved", "interleaved", 8, (2, 2, 2, 2)),
    Wish("gnmt", 4, MIDDLING, "pipedream", "pipedream", 3, (1, 1, 1, 1)),
    Wish("gnmt", 5, FAST, "pipedream", "pipedream", 7, (1, 1, 1, 1, 1)),
    Wish("gnmt", 5, FAST, "spp", "spp", 7, (1, 1, 3)),
    Wish("gnmt", 4, FAST, "2bw", "2bw", 8, (2, 2)),
    Wish("gnmt", 5, FAST, None, "2bw", 7, (2, 1, 2)),
]


@pytest.mark.parametrize("wish", WISHES, ids=lambda w: f"{w.subject}-{w.planner}-{w.schedule}-{w.replicas}")
def test_plans_run_as_planned(pool: Pool, wish: Wish) -> None:
    plan = wish.plan()
    assert (plan.schedule, plan.replicas, plan.microbatches) == (wish.schedule, wish.replicas, wish.microbatches)
    run = Run(wish.subject, plan)

    outcomes, expected = pool.run(plan.ranks, run_planned, run), run_reference(run)

    for found in outcomes:
        assert found.losses == expected.losses
        for name, tensor in found.state.items():
            assert torch.equal(expected.state[name], tensor), name
    assert set(expected.state) == {name for found in outcomes for name in found.state}
    assert_done(plan, outcomes[0].done)


def assert_done(plan: penstock.Plan, done: list[tuple[int, str]]) -> None:
    """In the last step every rank did what its schedule says and what the plan means."""
    programs = schedule(plan).step(STEPS - 1)
    assert [[action for rank, action in done if rank == own] for own in range(plan.ranks)] == [
        [str(action) for action in program] for program in programs
    ]
    # And by the plan alone: who computed what, and how much came over every cut.
    microbatches = range((STEPS - 1) * plan.microbatches, STEPS * plan.microbatches)
    split = plan.routing == "split"
    forwards: Counter[tuple[int, int, int]] = Counter()
    received: Counter[int] = Counter()
    for rank, text in done:
        match parse(text):
            case Forward(stage, microbatch, _):
                forwards[rank, stage, microbatch] += 1
            case Receive(stage, _, source) if source < stage:
                received[stage] += 1
    assert forwards == {
        (rank, index, k): 1
        for index, stage in enumerate(plan.stages)
        for replica, rank in enumerate(stage.ranks)
        for k in microbatches
        if split or k % len(stage.ranks) == replica
    }
    for index, stage in enumerate(plan.stages[1:], 1):  # type: ignore[assignment]
        assert received[index] == plan.microbatches * (len(stage.ranks) if split else 1)


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_rows_that_come_in_one_piece_are_like_those_that_are_joined(here: int, there: int) -> None:
    """An LSTM's output does not lie in memory in the order of its dimensions, and dropout draws in that order."""
    ends = (penstock.Stage(0, 3, tuple(range(here))), penstock.Stage(3, 11, tuple(range(here, here + there))))
    run = Run("gnmt", penstock.Plan(ends, microbatches=2, routing="split"))
    found, expected = run_planned(run), run_reference(run)

    assert found.losses == expected.losses
    assert all(torch.equal(expected.state[name], tensor) for name, tensor in found.state.items())


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_chains_are_shaped_like_what_was_measured(name: str) -> None:
    profile, model, x = profile_of(name), SUBJECTS[name].build(), SUBJECTS[name].sample[0]
    assert len(profile) == len(model)
    weights, outputs = [], []
    for layer, module in zip(profile.layers, model, strict=True):
        x = module(x)
        weights.append((layer.parameter_bytes, sum(p.numel() for p in module.parameters())))
        outputs.append((layer.cut_bytes, x.numel()))

    for pairs in (weights, outputs):
        measured, made = np.log(np.array(pairs, dtype=float)).T
        # GNMT's outputs are all the same but for what skips over layers, and the words at the end.
        assert np.corrcoef(measured, made)[0, 1] > 0.9
