"""The types of the public API, as mypy sees them from outside: `assert_type` is checked by ``./scripts/check``.

The test also runs, so that what it calls is what users call.
"""

from pathlib import Path
from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    assert_type(pipe.schedule, penstock.Schedule)
    assert_type(pipe.optimizers, tuple[torch.optim.Optimizer, ...])
    pipe.close()


def test_a_pipeline_that_saves(tmp_path: Path) -> None:
    batches = [(torch.ones(4, 4), torch.zeros(4, 2))] * 2
    with penstock.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 2)],
        (torch.ones(2, 4),),
        nn.MSELoss(),
        torch.optim.SGD,
        microbatches=2,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        update_hooks=penstock.WeightAverage(0.9),
        resume=tmp_path,
    ) as pipe:
        for x, y in penstock.prefetch(batches, penstock.local_device()):
            assert_type(x, Tensor)
            pipe.step(x, y)
        assert_type(pipe.save(tmp_path, keep=1), Path)
        save = pipe.save(tmp_path, wait=False)
        assert_type(save.wait(), Path)
        assert_type(pipe.full_state_dict(), dict[str, Any])
        pipe.gather_model()
        assert_type(pipe.steps, int)
        with pipe.averaged():
            pipe.predict(batches[0][0])
        for name, parameter in pipe.named_parameters():
            assert_type((name, parameter), tuple[str, nn.Parameter])
        assert_type(pipe.stats(), penstock.Stats)
