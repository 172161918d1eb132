"""Plans that the planners make of measured profiles run as planned, on chains shaped like what was measured.

The chains of small layers are shaped like VGG-16 and GNMT-8. The profiles are those of tests/data/pipedream,
their nodes joined to the layers of the chains; samples are fewer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from support.training import Outcome, assert_equal, assert_ranks_equal, train, train_by_oracle

SLOW, FAST = 1e8, 1.2e10
"""Bytes per second: a network of 1 Gbit/s within reach, and PCIe."""


DATA = PIPEDREAM
SAMPLES = 3
"""In a microbatch."""
STEPS = 2
LENGTH, HIDDEN, CLASSES = 5, 6, 62


@dataclass(frozen=True)
class Subject:
    """A chain, and the nodes of its profile at which its layers begin."""

    make: Callable[[], list[nn.Module]]
    inputs: Callable[[int], Tensor]
    targets: Callable[[int], Tensor]
    begins: Callable[[str, str, str], bool]
    """Given the kinds of a node, of the node before and of the one before that."""

    def build(self) -> nn.Sequential:
        """The chain, the same at each call."""
        torch.manual_seed(5)
        return nn.Sequential(*self.make()).double()

    def batches(self, microbatches: int) -> list[tuple[Tensor, Tensor]]:
        """Batches of as many microbatches and one sample more."""
        torch.manual_seed(6)
        samples = SAMPLES * microbatches + 1
        return [(self.inputs(samples), self.targets(samples)) for _ in range(STEPS)]

    @property
    def sample(self) -> tuple[Tensor]:
        torch.manual_seed(7)
        return (self.inputs(SAMPLES),)


@dataclass(frozen=True)
class Run:
    subject: str
    plan: penstock.Plan


def profile_of(name: str) -> Profile:
    """Measured by PipeDream's authors; as if a microbatch were of `SAMPLES` samples."""
    measured = Profile.from_pipedream(DATA / name / "graph.txt", SAMPLES)
    kinds = ["", "", *(layer.name.split()[1] for layer in measured.layers)]
    groups: list[list[LayerProfile]] = [[]]
    for index, layer in enumerate(measured.layers):
        if groups[-1] and SUBJECTS[name].begins(kinds[index + 2], kinds[index + 1], kinds[index]):
            groups.append([])
        groups[-1].append(layer)
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
    return Profile(tuple(joined), SAMPLES, name)


def run_planned(run: Run) -> tuple[Outcome, list[tuple[int, str]]]:
    """What a run leaves, and the ranks and their actions in the last step, each rank's in order."""
    subject = SUBJECTS[run.subject]
    pipe = penstock.Pipeline(subject.build(), sample=subject.sample, check="off", **_options(run))
    losses = [pipe.step(x, y).loss for x, y in subject.batches(run.plan.microbatches)]
    done = [(span.rank, span.action) for span in pipe.timeline().spans]
    return replace(train(pipe, []), losses=tuple(map(float, losses))), done


def run_reference(run: Run) -> Outcome:
    subject = SUBJECTS[run.subject]
    batches = subject.batches(run.plan.microbatches)
    return train_by_oracle(subject.build(), batches, sample=subject.sample, **_options(run))


def _options(run: Run) -> dict[str, Any]:
    return {"loss_fn": loss_fn, "optimizer": models.momentum, "plan": run.plan, "seed": 2}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


class Recurrent(nn.Module):
    """An LSTM with dropout before it, which may attend to its own input and add it."""

    def __init__(self, before: int = HIDDEN, both: bool = False, attends: bool = False, adds: bool = False) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(before, HIDDEN, batch_first=True, bidirectional=both)
        self.attends, self.adds = attends, adds

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(self.dropout(x))[0]
        if self.attends:
            y = y + torch.softmax(y @ x.transpose(1, 2), -1) @ x
        return x + y if self.adds else y


def _vgg16() -> list[nn.Module]:
    """Sixteen layers: channels, pixels and neurons are a sixteenth, or less where one can do with less."""
    channels = (4, 4, "pool", 8, 8, "pool", 16, 16, 16, "pool", 32, 32, 32, "pool", 32, 32, 32, "pool")
    layers: list[nn.Module] = []
    before = 3
    for after in channels:
        if isinstance(after, str):
            layers[-1] = models.InARow(layers[-1], nn.MaxPool2d(2))
        else:
            layers.append(models.InARow(nn.Conv2d(before, after, 3, 1, 1), nn.ReLU()))
            before = after
    layers.append(models.InARow(nn.Flatten(), nn.Linear(128, 600), nn.ReLU(), nn.Dropout(0.5)))
    layers.append(models.InARow(nn.Linear(600, 64), nn.ReLU(), nn.Dropout(0.5)))
    layers.append(nn.Linear(64, CLASSES))
    return layers


def _gnmt() -> list[nn.Module]:
    """Eleven layers. The decoder's embedding stands in the row as the two matrices of its size."""
    wide = 16 * HIDDEN
    return [
        nn.Embedding(32 * HIDDEN, HIDDEN),
        Recurrent(both=True),
        Recurrent(2 * HIDDEN),
        Recurrent(adds=True),
        Recurrent(adds=True),
        models.InARow(nn.Linear(HIDDEN, wide), nn.Tanh(), nn.Linear(wide, HIDDEN)),
        Recurrent(attends=True),
        *(Recurrent(adds=True) for _ in range(3)),
        nn.Linear(HIDDEN, 32 * HIDDEN),
    ]


def _images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 64, 64, dtype=torch.float64)


def _classes(samples: int) -> Tensor:
    return torch.randint(CLASSES, (samples,))


def _texts(samples: int) -> Tensor:
    return torch.randint(32 * HIDDEN, (samples, LENGTH))


SUBJECTS = {
    "vgg16": Subject(_vgg16, _images, _classes, lambda kind, *_: kind in ("Conv2d", "Linear")),
    "gnmt": Subject(
        _gnmt,
        _texts,
        _texts,
        lambda kind, last, _: (
            last != "hidden" and ("LSTM" in kind or kind in ("Embedding", "RecurrentAttention", "Classifier"))
        ),
    ),
}


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
    Wish("gnmt", 5, FAST, "pipedream", "pipedream", 7, (1, 1, 1, 1, 1)),
    Wish("gnmt", 5, FAST, "spp", "spp", 7, (1, 1, 3)),
    Wish("gnmt", 4, FAST, "2bw", "2bw", 8, (2, 2)),
    Wish("gnmt", 5, FAST, None, "2bw", 7, (2, 1, 2)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wish", WISHES, ids=lambda w: f"{w.subject}-{w.planner}-{w.schedule}-{w.replicas}")
def test_plans_run_as_planned(pool: Pool, wish: Wish) -> None:
    plan = wish.plan()
    assert (plan.schedule, plan.replicas, plan.microbatches) == (wish.schedule, wish.replicas, wish.microbatches)
    run = Run(wish.subject, plan)

    outcomes, expected = pool.run(plan.ranks, run_planned, run), run_reference(run)

    assert_ranks_equal([[found] for found, _ in outcomes], [expected])
    assert_done(plan, outcomes[0][1])


def assert_done(plan: penstock.Plan, done: list[tuple[int, str]]) -> None:
    """In the last step every rank did what its schedule says."""
    programs = schedule(plan).step(STEPS - 1)
    assert [[action for rank, action in done if rank == own] for own in range(plan.ranks)] == [
        [str(action) for action in program] for program in programs
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_rows_that_come_in_one_piece_are_like_those_that_are_joined(here: int, there: int) -> None:
    """An LSTM's output does not lie in memory in the order of its dimensions, and dropout draws in that order."""
    ends = (penstock.Stage(0, 3, tuple(range(here))), penstock.Stage(3, 11, tuple(range(here, here + there))))
    run = Run("gnmt", penstock.Plan(ends, microbatches=2, routing="split"))
    found, _ = run_planned(run)

    assert_equal(run_reference(run), found)
