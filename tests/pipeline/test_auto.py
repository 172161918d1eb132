"""``plan="auto"``: one plan on every rank, run as exactly as any other, and compared with what it promised."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.autoplans import fastest_plan
from penstock.capturing import capture
from penstock.capturing.export.cutting import takes_statistics
from penstock.errors import PlanError
from penstock.runtime.assembly.pipeline_options import PlanOptions
from penstock.values import Cluster, LayerProfile, Plan, Profile
from support import models
from support.logs import logged
from support.processes import Pool

STEPS = 14
"""Enough for a comparison."""
FEW_STEPS = 4
"""Enough for every delay."""


@dataclass(frozen=True)
class Automatic:
    """What a run with ``plan="auto"`` chose, and what came of it."""

    plan: Plan
    profile: Profile | None
    """None where the plan was given."""
    cluster: Cluster | None
    losses: tuple[float, ...]
    state: dict[str, Tensor]
    lines: tuple[str, ...]
    """What was logged on this rank."""


def run_automatically(subject: str, steps: int, options: dict[str, Any]) -> Automatic:
    """Trains `subject` for `steps` steps under a plan of Penstock's own."""
    chosen = models.SUBJECTS[subject]
    with logged() as lines:
        pipe = penstock.Pipeline(
            chosen.build(),
            sample=chosen.sample,
            loss_fn=chosen.loss_fn,
            optimizer=models.momentum,
            seed=3,
            **{"plan": "auto", **options},
        )
        losses = [pipe.step(*chosen.batches[step % len(chosen.batches)]).loss for step in range(steps)]
        pipe.drain()
        numbers = tuple(float(loss) for loss in losses)
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    pipe.close()
    auto = pipe.auto_plan
    profile, cluster = (None, None) if auto is None else (auto.profile, auto.cluster)
    return Automatic(pipe.plan, profile, cluster, numbers, state, tuple(lines))


class _Wearing(nn.Linear):
    """A layer that fails from its tenth forward on: it is captured with fewer, and measured with more."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards >= 10:
            raise ValueError("the layer is worn out")
        return super().forward(x)


def _refusal(model: nn.Module | list[nn.Module], **options: Any) -> str:
    try:
        penstock.Pipeline(
            model, sample=(torch.randn(3, 6),), loss_fn=F.cross_entropy, optimizer=models.momentum, **options
        )
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def build_with_a_layer_that_cannot_be_measured() -> str:
    """The profile on rank 0 fails."""
    torch.manual_seed(0)
    return _refusal([nn.Linear(6, 6), _Wearing(6, 6), nn.Linear(6, 3)], plan="auto")


def build_with_other_wishes() -> str:
    """The function that makes the plan chooses another schedule on each rank."""
    torch.manual_seed(0)
    made = Plan.uniform(8, 2, ("gpipe", "1f1b-flush")[dist.get_rank()])
    return _refusal(models.Perceptron(), plan=lambda processes: made, schedule="gpipe")


def assert_equals_the_oracle(subject: str, outcomes: list[Automatic]) -> None:
    """Every rank has the losses and weights that the oracle finds for the plan that was chosen."""
    chosen = models.SUBJECTS[subject]
    reference = penstock.reference_train(
        chosen.build(),
        [chosen.batches[step % len(chosen.batches)] for step in range(len(outcomes[0].losses))],
        sample=chosen.sample,
        loss_fn=chosen.loss_fn,
        optimizer=models.momentum,
        plan=outcomes[0].plan,
        seed=3,
    )
    for outcome in outcomes:
        assert outcome.losses == reference.losses != ()
        for name, tensor in outcome.state.items():
            assert torch.equal(tensor, reference.state[name]), name
    assert {name for outcome in outcomes for name in outcome.state} == set(reference.state)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (3, {"microbatches": 4}),
        (2, {"schedule": "interleaved", "microbatches": 4}),
        (3, {"schedule": "pipedream", "vertical_sync": True}),
    ],
)
def test_several_processes_run_one_plan_exactly(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    steps = FEW_STEPS if options else STEPS
    outcomes = pool.run(ranks, run_automatically, "normalized", steps, options)
    first, *rest = outcomes

    for other in rest:
        assert (other.plan, other.profile, other.cluster) == (first.plan, first.profile, first.cluster)
        assert other.plan.explain() == first.plan.explain()
    assert first.plan.ranks == ranks
    assert first.plan.predicted is not None
    assert first.plan.schedule == options.get("schedule", first.plan.schedule)
    assert first.plan.microbatches == options.get("microbatches", first.plan.microbatches)
    assert first.cluster is not None
    assert first.cluster.devices == ranks
    assert first.cluster.latency(0, 1) > 0
    assert_equals_the_oracle("normalized", outcomes)


def test_microbatches_with_statistics_stay_whole() -> None:
    plans = {}
    for name in ("perceptron", "normalized"):
        subject = models.SUBJECTS[name]
        chain = capture(subject.build(), subject.sample)
        even = profile(*[1.0] * len(chain.layers))
        # A single microbatch keeps both devices busy only if they split it.
        plans[name] = fastest_plan(even, Cluster.uniform(2, math.inf), chain, PlanOptions(microbatches=1))

    assert plans["perceptron"].routing == "split"
    assert plans["normalized"].routing != "split"
    batch_norm = penstock.capture([nn.BatchNorm1d(3), nn.Linear(3, 3)], (torch.ones(4, 3),))
    assert [takes_statistics(layer.module) for layer in batch_norm.layers] == [True, False]


@pytest.mark.parametrize("options", [{}, {"stages": 3}, {"stages": 4, "schedule": "interleaved", "microbatches": 2}])
def test_a_single_process_plans_for_as_many_ranks_as_it_is_given(options: dict[str, Any]) -> None:
    outcome = run_automatically("skipping", FEW_STEPS if options else STEPS, options)

    assert len(outcome.plan.stages) == options.get("stages", 1)
    assert outcome.cluster == Cluster.uniform(outcome.plan.ranks, math.inf)
    assert_equals_the_oracle("skipping", [outcome])


def test_an_error_of_the_measurement_is_that_of_every_rank(pool: Pool) -> None:
    """All ranks measure the model, for about equally long."""
    for reason in pool.run(3, build_with_a_layer_that_cannot_be_measured):
        assert re.match(r"ProfileError: layer 1 \(1\) raised ValueError in its (for|back)ward: the layer is", reason)


def test_an_error_of_the_planner_reaches_every_rank_as_that_error(pool: Pool) -> None:
    with pytest.raises(AssertionError) as caught:
        pool.run(2, run_automatically, "perceptron", STEPS, {"stages": 99})

    reason = "no plan: stages: expected at most 2"
    assert str(caught.value).count(f"PlanError: {reason}") == 1
    assert str(caught.value).count(f"PlanError: rank 0, while it measured the model and planned: {reason}") == 1


def test_ranks_that_want_different_things_all_raise(pool: Pool) -> None:
    first, second = pool.run(2, build_with_other_wishes)

    contradiction = "schedule='gpipe' contradicts the plan, which has schedule '1f1b-flush'"
    assert second.startswith(f"PlanError: {contradiction}")
    assert first.startswith(f"PlanError: rank 1, while it read its plan: {contradiction}")


def profile(*seconds: float) -> Profile:
    """Layers of these seconds, forward and backward together, whose cuts cost nothing."""
    return Profile(tuple(LayerProfile(f"layer{i}", s / 3, 2 * s / 3, 0.0, 1.0, 1.0) for i, s in enumerate(seconds)), 4)


def test_the_fastest_schedule_that_flushes_is_taken() -> None:
    subject = models.SUBJECTS["perceptron"]
    chain = capture(subject.build(), subject.sample)
    even, links = profile(*[1.0] * 8), Cluster.uniform(2, math.inf)
    # Replicas would sum gradients for longer than they compute; what crosses a cut costs nothing.
    slow = Cluster.uniform(2, 0.001)

    assert fastest_plan(even, links, chain, PlanOptions(microbatches=2)).replicas == (2,)
    assert fastest_plan(even, slow, chain, PlanOptions(microbatches=2)).schedule in ("interleaved", "zb-v", "v-half")
    # 3 microbatches do not deal out; the other schedules that flush are equally fast here, and one byte apart.
    assert fastest_plan(even, links, chain, PlanOptions(microbatches=3)).schedule in ("gpipe", "1f1b-flush", "spp")
    assert fastest_plan(even, links, chain, PlanOptions(microbatches=2, stages=2)).schedule == "1f1b-flush"
    assert fastest_plan(even, links, chain, PlanOptions(schedule="2bw", microbatches=2)).schedule == "2bw"
    assert fastest_plan(profile(1, 1, 1, 5, 1, 1, 1, 1), slow, chain, PlanOptions(schedule="gpipe")).stages[0].stop == 4
    assert fastest_plan(even, slow, chain, PlanOptions(microbatches=4)).schedule == "zb-v"
    assert fastest_plan(even, slow, chain, PlanOptions(microbatches=4), whole_backwards=True).schedule == "interleaved"
    # More devices than layers: some have replicas.
    assert fastest_plan(even, Cluster.uniform(9, math.inf), chain, PlanOptions()).ranks == 9
    with pytest.raises(penstock.PlanError):
        fastest_plan(even, Cluster.uniform(2, math.inf, memory_bytes=1.0), chain, PlanOptions())


def test_a_single_process_streams_what_does_not_fit(tmp_path: Path) -> None:
    """Six layers of 256 KB: weights, gradients and Adam's state take 6 MB, and the limit is half of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    options: dict[str, Any] = {"plan": "auto", "microbatches": 2, "check": "off"}
    sample, loss = (torch.zeros(2, 256),), nn.functional.mse_loss

    with pytest.raises(PlanError, match="memory_bytes= is the memory that plan='auto' plans for"):
        penstock.Pipeline(model, sample, loss, models.adamw, memory_bytes=3e6)
    with pytest.raises(PlanError, match=r"nothing fits.*host_bandwidth of the cluster"):
        penstock.Pipeline(model, sample, loss, models.adamw, memory_bytes=3e6, **options)
    with penstock.Pipeline(model, sample, loss, models.adamw, memory_bytes=3e6, offload_to=tmp_path, **options) as pipe:
        assert pipe.plan.streamed and pipe.plan.ranks == 1
        assert max(pipe.plan.predicted.peak_bytes) <= 3e6  # type: ignore[union-attr]
