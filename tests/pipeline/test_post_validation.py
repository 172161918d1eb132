"""Updates that are validated later have the numbers of updates that wait, whichever of them are taken back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Cluster, LayerProfile, Plan, Profile
from penstock.errors import PenstockError, PlanError, ScheduleError
from penstock.planning import find_order
from support import models
from support.jobs.precision_jobs import CAST, CAST_BATCHES
from support.jobs.scaling_jobs import run_scaled, scaled_options
from support.own_schedules import offloading
from support.processes import Pool
from support.training import LAYERS, Case, Outcome, assert_equal, run_pipeline, run_reference, train_by_oracle

NORMS = {"none": 1e9, "some": 0.3, "all": 1e-3}
"""Of `clip_grad_norm`: which updates clip."""
PROFILE = Profile(
    tuple(LayerProfile(str(index), (1 + index) * 1e-3, (2 + index) * 1e-3, 1e3, 1e6, 1e3) for index in range(LAYERS)), 2
)


def found(case: Case) -> Case:
    """The case with an order that is found where memory is free."""
    plan = replace(case.options["plan"], schedule="1f1b-flush")
    best = find_order(plan, PROFILE, Cluster.uniform(case.ranks, 1e9), memory_bytes=1e12).plan
    assert str(best.schedule) == "found"
    return replace(case, schedule=best.schedule)  # type: ignore[arg-type]  # a definition does as well


def run_validated(case: Case, most: float | None, **options: Any) -> Outcome:
    return run_pipeline(case, clip_grad_norm=most, post_validation=True, **options)


CASES = {
    **{
        f"{schedule}-{ranks}": Case("layered", schedule, ranks, 4, "adamw")
        for schedule in ("1f1b-flush", "zb-h1")
        for ranks in (1, 2, 3, 4)
    },
    "gpipe": Case("layered", "gpipe", 3, 4, drain_after=(1, 2)),
    "buffers": Case("normalized", "zb-h1", 3, 4),
    "spp": Case("layered", "spp", 3, 5, samples=(10, 7, 5)),
    "skips": Case("skipping", "zb-h1", 4, 5, "adamw"),
    "turned": Case("layered", "zb-h1", 3, 4, turned=True),
    "replicas": Case("layered", "zb-h1", 2, 4, replicas=(2, 2)),
    "idle replicas": Case("layered", "1f1b-flush", 2, 2, replicas=(3, 3)),
    "split": Case("layered", "zb-h1", 2, 4, replicas=(1, 2), split=True),
    "found": found(Case("layered", "1f1b-flush", 3, 6, "adamw")),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("clips", NORMS)
@pytest.mark.parametrize("name", CASES)
def test_one_process_equals_the_oracle(name: str, clips: str) -> None:
    case = CASES[name]

    assert_equal(run_reference(case, clip_grad_norm=NORMS[clips]), run_validated(case, NORMS[clips]))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("clips", NORMS)
@pytest.mark.parametrize("name", ["1f1b-flush-2", "zb-h1-4", "found", "replicas", "split"])
def test_processes_equal_the_oracle(pool: Pool, name: str, clips: str) -> None:
    case = CASES[name]
    for part in pool.run(case.processes, run_validated, case, NORMS[clips]):
        assert_equal(run_reference(case, clip_grad_norm=NORMS[clips]), part)


def run_overflowing(case: Case) -> tuple[Outcome, list[float | None]]:
    return run_scaled(case, post_validation=True, clip_grad_norm=500.0)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-h1"])
def test_gradients_that_overflow_are_left_out(pool: Pool, schedule: str) -> None:
    case = Case("layered", schedule, 3, 4)
    expected = train_by_oracle(case.build(), case.batches * 2, **scaled_options(case), clip_grad_norm=500.0)

    for outcome, _ in (run_overflowing(case), *pool.run(3, run_overflowing, case)):
        assert_equal(expected, outcome)


def steps_of(pipe: penstock.Pipeline, case: Case) -> list[float]:
    """How many forwards each step ran, over its own microbatches."""
    counts = []
    for x, y in case.batches * 2:
        pipe.step(x, y)
        counts.append(sum(span.kind == "forward" for span in pipe.timeline().spans) / (case.microbatches * case.ranks))
    return counts


def test_forwards_run_again_where_an_update_is_taken_back() -> None:
    case = Case("layered", "zb-h1", 3, 6)
    free, tight = (
        penstock.Pipeline(case.build(), **case.options, check="off", post_validation=True, clip_grad_norm=most)
        for most in (1e9, 1e-3)
    )

    # The ranks have run 3, 2 and 0 forwards before their validations.
    assert steps_of(free, case) == [1.0] * 8
    assert steps_of(tight, case) == [1.0, *[1 + 5 / 18] * 7]


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


OPTIONS: dict[str, dict[str, Any]] = {
    "scheduler": {"lr_scheduler": decay},
    "hooks": {"update_hooks": [penstock.WeightAverage(0.5), penstock.ErrorFeedback()]},
    "masters": {"version_dtype": torch.bfloat16, "autocast": torch.bfloat16},
    "wire": {"wire_dtype": torch.bfloat16},
    "recompute": {"recompute": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_an_update_changes_is_taken_back(name: str) -> None:
    case = Case("layered", "1f1b-flush", 3, 4, "adamw")
    build, batches = (CAST["linear"], CAST_BATCHES * 2) if name == "masters" else (case.build, case.batches * 2)
    given = {**case.options, "check": "off", "clip_grad_norm": NORMS["some"], **OPTIONS[name]}
    given["sample"] = (batches[0][0][:3],)

    runs = []
    for later in (False, True):
        pipe = penstock.Pipeline(list(build().children()), **given, post_validation=later)
        losses = [pipe.step(x, y).loss for x, y in batches]
        averages = pipe.averages() if name == "hooks" else {}
        rates = [group["lr"] for optimizer in pipe.optimizers for group in optimizer.param_groups]
        state = pipe.state_dict()
        runs.append((list(map(float, losses)), rates, pipe.gradient_norm, {**state["model"], **averages}))
    (*expected, weights), (*actual, others) = runs
    assert actual == expected
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_offloads_are_taken_back() -> None:
    case = Case("layered", "zb-h1", 3, 4, "adamw")
    plan: Plan = case.options["plan"]
    plan = replace(plan, schedule=offloading(plan.definition))

    assert_equal(run_reference(case, clip_grad_norm=1e-3), run_validated(case, 1e-3, plan=plan))


def test_what_the_user_changes_between_steps_counts_for_later_updates_alone() -> None:
    case, runs = Case("layered", "1f1b-flush", 2, 4), []
    for later in (False, True):
        given = {**case.options, "clip_grad_norm": 1e-2, "lr_scheduler": decay, "check": "off"}
        pipe = penstock.Pipeline(case.build(), **given, post_validation=later)
        losses = []
        for number, (x, y) in enumerate(case.batches * 2):
            losses.append(float(pipe.step(x, y).loss))
            for group in pipe.optimizers[0].param_groups:
                group["momentum"] = 0.5 + 0.1 * number
        runs.append(losses)

    assert runs[0] == runs[1]


def test_saves_evaluations_and_resumed_runs_drain(tmp_path: Path) -> None:
    case, runs = Case("layered", "1f1b-flush", 3, 4, "adamw"), []
    for later in (False, True):
        given = {**case.options, "check": "off", "clip_grad_norm": NORMS["all"], "post_validation": later}
        pipe, losses = penstock.Pipeline(case.build(), **given), []
        for x, y in case.batches[:2]:
            losses.append(float(pipe.step(x, y).loss))
            losses.append(float(pipe.evaluate(x, y).loss))
        pipe.step(*case.batches[2])
        pipe.save(tmp_path / str(later), wait=False).wait()
        pipe.step(*case.batches[0])
        resumed = penstock.Pipeline(case.build(), **given)
        resumed.load(tmp_path / str(later))
        losses += [float(each.step(*case.batches[1]).loss) for each in (resumed, pipe)]
        runs.append(losses)

    assert runs[0] == runs[1]


def test_weights_that_the_user_writes_are_written_after_a_drain() -> None:
    case = Case("layered", "1f1b-flush", 2, 4)
    pipe = penstock.Pipeline(case.build(), **case.options, check="off", clip_grad_norm=1e9, post_validation=True)
    weight = next(pipe.parameters())
    for drains in (True, False):
        pipe.step(*case.batches[0])
        if drains:
            pipe.drain()
        with torch.no_grad():
            weight.mul_(0.5)
        if drains:
            pipe.step(*case.batches[1])
            pipe.drain()

    with pytest.raises(PenstockError, match=r"were written after a step.*Call drain\(\) before you write"):
        pipe.step(*case.batches[2])


class Counting(torch.optim.SGD):
    """Counts its steps where no state has it."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        return super().step(closure)


class Writing(torch.optim.SGD):
    """Writes in the gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "found"), [(Counting, "Counting: its attribute 'taken' changes"), (Writing, "Writing: a gradient")]
)
def test_steps_that_cannot_be_taken_back_are_refused(optimizer: Callable[..., Any], found: str) -> None:
    case = Case("layered", "1f1b-flush", 2, 4)
    given = {**case.options, "optimizer": lambda parameters: optimizer(parameters, lr=0.1)}
    pipe = penstock.Pipeline(case.build(), **given, clip_grad_norm=1.0, post_validation=True)

    with pytest.raises(PenstockError, match=f"{found}.* Leave post_validation= out"):
        pipe.step(*case.batches[0])


NEEDED = ("sample", "loss_fn", "optimizer")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no norm": ({"clip_grad_norm": None}, "none: no update waits"),
    "asynchronous": ({"schedule": "2bw"}, "'2bw', whose stages update at their own times"),
    "several stages": ({"schedule": "zb-v"}, "several: one would read"),
    "state on the host": ({"state_on_host": True}, "state_on_host=True keeps the state"),
    "no seed": ({"seed": None}, "seed=None lets a forward"),
    "a hook": ({"parallelize": lambda stage, mesh: None}, "parallelize= has modules"),
    "no flag": ({"post_validation": 1}, "post_validation=.: expected True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_back_is_refused_at_build(name: str) -> None:
    options, found = REFUSED[name]
    given: dict[str, Any] = {"clip_grad_norm": 1.0, "post_validation": True, "schedule": "1f1b-flush", **options}
    case = Case("layered", "1f1b-flush", 2, 4)

    with pytest.raises((PlanError, ScheduleError), match=found):
        penstock.Pipeline(case.build(), *(case.options[name] for name in NEEDED), stages=2, microbatches=4, **given)


class Remembering(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Shifting(nn.Linear):
    """Writes in what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0))


def build_of(layer: type[nn.Linear], **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    layers = [layer(6, 6), nn.Linear(6, 6)]
    given = {"stages": 2, "microbatches": 4, "clip_grad_norm": 1e-3, **options}
    return penstock.Pipeline(layers, (torch.zeros(2, 6),), nn.functional.mse_loss, models.momentum, **given)


def test_forwards_that_cannot_run_again_are_refused() -> None:
    pipe, x = build_of(Remembering, post_validation=True), torch.randn(8, 6)
    pipe.step(x, x)

    with pytest.raises(PenstockError, match=r"a forward changes 0\.calls, which would happen twice"):
        pipe.step(x, x)


@pytest.mark.parametrize("most", [1e9, 1e-3])
def test_buffers_count_every_microbatch_once(most: float) -> None:
    batches, found = torch.randn(3, 8, 6), []
    for later in (False, True):
        torch.manual_seed(0)
        layers = [nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)]
        pipe = penstock.Pipeline(
            layers,
            (torch.zeros(2, 6),),
            nn.functional.mse_loss,
            models.momentum,
            stages=2,
            microbatches=4,
            check="off",
            clip_grad_norm=most,
            post_validation=later,
        )
        losses = [float(pipe.step(x, x).loss) for x in batches]
        found.append((losses, pipe.state_dict()["model"]))
    (expected, weights), (actual, others) = found

    assert actual == expected
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    assert any(int(tensor) == 12 for name, tensor in weights.items() if name.endswith("num_batches_tracked"))


def test_inputs_that_a_layer_writes_are_whole_when_it_runs_again() -> None:
    batches = torch.randn(3, 8, 6)
    plain, later = (build_of(Shifting, post_validation=later, check="off") for later in (False, True))

    for x in batches:
        assert float(plain.step(x.clone(), x).loss) == float(later.step(x.clone(), x).loss)
