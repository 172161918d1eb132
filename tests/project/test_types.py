"""The types of the public API, as mypy sees them from outside: `assert_type` is checked by ``./scripts/check``.

The test also runs, so that what it calls is what users call.
"""

from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.runtime.batches.results import StepResult
from penstock.scheduling.verification.verifier import Verification


def make_profile() -> penstock.Profile:
    layers = tuple(penstock.LayerProfile(f"layer {n}", 1.0, 2.0, 8, 8, 8) for n in range(4))
    return penstock.Profile(layers, microbatch_size=1)


def test_a_plan_and_its_four_readers() -> None:
    profile = assert_type(make_profile(), penstock.Profile)
    cluster = assert_type(penstock.Cluster.uniform(2, 1e9), penstock.Cluster)
    plan = assert_type(penstock.plan(profile, cluster, schedule="1f1b-flush", microbatches=2), penstock.Plan)
    schedule = assert_type(penstock.schedule(plan), penstock.Schedule)
    timeline = assert_type(penstock.simulate(plan, profile, cluster), penstock.Timeline)

    assert_type(plan.stages, tuple[penstock.Stage, ...])
    assert_type(penstock.verify(schedule), Verification)
    assert_type(penstock.render(schedule), str)
    assert_type(penstock.render(timeline), str)
    assert_type(timeline.seconds, float)
    assert_type(timeline.bubble, float)


def test_a_pipeline() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    inputs, target = torch.ones(4, 4), torch.zeros(4, 2)
    pipe = penstock.Pipeline(
        model,
        sample=(inputs[:2],),
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: assert_type(
            torch.optim.SGD(assert_type(parameters, penstock.NamedParameters), lr=0.1), torch.optim.SGD
        ),
        schedule="gpipe",
        microbatches=2,
        stages=2,
    )
    result = assert_type(pipe.step(inputs, target), StepResult)

    assert_type(float(result.loss), float)
    assert_type(pipe.evaluate(inputs, target), StepResult)
    assert_type(pipe.rank, int)
    assert_type(pipe.plan, penstock.Plan)
    assert_type(pipe.gradient_norm, float | None)
    assert_type(pipe.state_dict(), dict[str, Any])
    assert_type(pipe.timeline(), penstock.Timeline)
    pipe.close()
