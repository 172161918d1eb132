"""Training without a stash: a backward reads newer weights than its forward did, as `paci` promises and no more."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.scheduling.actions import format_programs, parse_programs
from penstock.scheduling.orders import PACI
from penstock.scheduling.verification.verifier import verify_programs
from support import models
from support.jobs.scaling_jobs import RISKY, run_scaled, scaled_options
from support.processes import Pool
from support.training import Case, assert_equal, run_pipeline, run_reference, train, train_by_oracle

RATE = 0.1


def train_by_hand(weights: list[Tensor], batches: list[tuple[Tensor, Tensor]], m: int) -> list[Tensor]:
    """W(t+1) = W(t) - rate x mean gradient, of linear layers, each a stage, under a loss that is half of a mean square.

    With y = x W^T the gradient of x is that of y times the newest W, and the gradient of W is made of the x of the
    forward, which read an older one.
    """
    p, versions = len(weights), [[weight.clone()] for weight in weights]
    parts = [part for x, y in batches for part in zip(x.chunk(m), y.chunk(m), strict=True)]
    sums = [torch.zeros_like(weight) for weight in weights]
    for k, (x, y) in enumerate(parts):
        read = [max(0, k - (p - 1 - s)) // m for s in range(p)]
        inputs = [x]
        for s in range(p):
            inputs.append(inputs[-1] @ versions[s][read[s]].T)
        gradient = (inputs[-1] - y) / y.numel() / m
        for s in reversed(range(p)):
            sums[s] += gradient.T @ inputs[s]
            gradient = gradient @ versions[s][k // m]
        if k % m == m - 1:
            for s in range(p):
                versions[s].append(versions[s][-1] - RATE * sums[s])
                sums[s] = torch.zeros_like(sums[s])
    return [stage[-1] for stage in versions]


def half_mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() / 2


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def linear(p: int) -> nn.Sequential:
    torch.manual_seed(p)
    return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(p))).double()


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (3, 2), (4, 1), (4, 4)])
def test_numbers_are_those_of_the_formulas(p: int, m: int) -> None:
    batches = [(torch.randn(2 * m, 5).double(), torch.randn(2 * m, 5).double()) for _ in range(5)]
    options: dict[str, Any] = {"sample": (batches[0][0][:2],), "loss_fn": half_mean_square, "optimizer": sgd}
    options |= {"schedule": "paci", "stages": p, "microbatches": m}
    expected = train_by_hand([layer.weight.detach() for layer in linear(p)], batches, m)
    oracle = penstock.reference_train(linear(p), batches, **options)
    pipe = penstock.Pipeline(linear(p), **options)
    losses = tuple([float(pipe.step(x, y).loss) for x, y in batches])
    pipe.drain()

    # A product has other roundings where autograd has its factors the other way round.
    torch.testing.assert_close(list(oracle.state.values()), expected, rtol=1e-12, atol=1e-14)
    assert losses == oracle.losses
    for name, weight in pipe.state_dict()["model"].items():
        assert torch.equal(weight, oracle.state[name])
    if p > 1:
        stashed = penstock.reference_train(linear(p), batches, **{**options, "schedule": "gpipe"})
        assert any(not torch.allclose(stashed.state[name], oracle.state[name], rtol=1e-6) for name in oracle.state)


CASES: list[tuple[Case, dict[str, Any]]] = [
    (Case("layered", "paci", 4, 1), {}),
    (Case("skipping", "paci", 3, 2, "adamw", drain_after=(1,)), {"clip_grad_norm": 0.3}),
    (Case("layered", "paci", 2, 4, replicas=(2, 1)), {}),
    (Case("layered", "paci", 2, 3, replicas=(2, 2), drain_after=(0,)), {"clip_grad_norm": 0.3}),
    (Case("normalized", "paci", 2, 2, "adamw", replicas=(1, 2), split=True), {}),
]


@pytest.mark.parametrize(("case", "options"), CASES, ids=str)
def test_the_bits_are_those_of_the_oracle(case: Case, options: dict[str, Any]) -> None:
    assert_equal(run_reference(case, **options), run_pipeline(case, **options))


def test_updates_that_overflow_are_skipped() -> None:
    case = Case("layered", "paci", 3, 2)
    given = {**scaled_options(case), "clip_grad_norm": 500.0}
    found, scales = run_scaled(case, clip_grad_norm=500.0)

    assert min(scales) < RISKY.initial  # type: ignore[type-var]
    assert_equal(train_by_oracle(case.build(), case.batches * 2, **given), found)


@pytest.mark.parametrize("options", [{}, {"version_dtype": torch.bfloat16}], ids=str)
def test_what_a_forward_made_of_weights_is_as_it_was(options: dict[str, Any]) -> None:
    """Under autocast a layer saves a copy of its weight; a version in low precision is the weight itself."""
    batches = [(torch.randn(4, 5), torch.randn(4, 5)) for _ in range(5)]
    given: dict[str, Any] = {
        "sample": (batches[0][0][:2],),
        "loss_fn": F.mse_loss,
        "optimizer": models.adamw,
        "schedule": "paci",
    }
    given |= {"stages": 3, "microbatches": 2, "autocast": torch.bfloat16, **options}
    expected = train_by_oracle(linear(3).float(), batches, **given)

    assert_equal(expected, train(penstock.Pipeline(linear(3).float(), **given), batches))


def test_the_bits_are_those_of_the_oracle_in_several_processes(pool: Pool) -> None:
    for case, options in CASES[1:4]:
        for outcome in pool.run(case.processes, run_with, case, options):
            assert_equal(run_reference(case, **options), outcome)


def run_with(case: Case, options: dict[str, Any]) -> Any:
    return run_pipeline(case, **options)


def test_a_save_drains(tmp_path: Path) -> None:
    """What is in flight could not be computed again: its weights are gone."""
    case = Case("layered", "paci", 3, 2, "adamw", drain_after=(1,))
    pipes = [penstock.Pipeline(case.build(), **case.options) for _ in range(2)]
    losses = [pipes[0].step(x, y).loss for x, y in case.batches[:2]]
    pipes[0].save(tmp_path / "kept")
    pipes[1].load(tmp_path / "kept")
    later = [train(pipe, case.batches[2:]) for pipe in pipes]

    for outcome in later:
        assert_equal(run_reference(case), replace(outcome, losses=(*map(float, losses), *outcome.losses)))


def test_there_is_one_set_of_weights() -> None:
    made = penstock.schedule(Case("layered", "paci", 3, 2).options["plan"])

    assert made.guarantees.versions == (1, 1, 1)
    assert made.guarantees.drift == penstock.verify(made).drift == (1, 1, 0)
    assert str(penstock.verify(made)).endswith("1 1 1 weight versions, 1 1 0 updates between forward and backward")


BREACHES = {
    "of its forward": (
        "0B2@1",
        "0B2@0",
        "a backward reads the newest version of its stage at that moment",
        "version 1",
    ),
    "update in between": (
        "0F3@0 0S3>1 0R1<1 0B1@0 0U1<0",
        "0R1<1 0B1@0 0U1<0 0F3@0 0S3>1",
        "a forward reads the newest version of its stage at that moment, and so does its backward",
        "version 1 for microbatch 3 on stage 0",
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_planted_breach_is_found(breach: str) -> None:
    right, wrong, law, expected = BREACHES[breach]
    made = penstock.schedule(Case("layered", "paci", 3, 2).options["plan"])
    text = format_programs(made.program(3))
    assert right in text
    with pytest.raises(penstock.ScheduleError) as caught:
        verify_programs(parse_programs(text.replace(right, wrong)), made, 3)

    assert f"violates an invariant: {law}" in str(caught.value)
    assert f"expected: {expected}" in str(caught.value)


def test_more_drift_than_is_guaranteed_is_found() -> None:
    made = penstock.schedule(Case("layered", "paci", 4, 1).options["plan"])
    programs = made.program(5)
    object.__setattr__(made, "guarantees", replace(made.guarantees, drift=(3, 1, 1, 0)))
    with pytest.raises(penstock.ScheduleError, match="at most 1 updates on stage 1") as caught:
        verify_programs(programs, made, 5)

    assert "expected: fewer than 2 updates since 1F2@0" in str(caught.value)


def build(**options: Any) -> penstock.Pipeline:
    given: dict[str, Any] = {"schedule": "paci", "stages": 2, "microbatches": 2, **options}
    return penstock.Pipeline(linear(2), (torch.ones(2, 5).double(),), F.mse_loss, models.plain, **given)


def build_tied() -> penstock.Pipeline:
    model = linear(3)
    model[2].weight = model[0].weight
    return penstock.Pipeline(
        model, (torch.ones(2, 5).double(),), F.mse_loss, models.plain, schedule="paci", stages=3, microbatches=2
    )


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "recomputation": (lambda: build(recompute=True), "expected no stages that recompute, found 0, 1"),
    "layers": (lambda: build(recompute="layers"), "expected no stages that recompute, found 0, 1"),
    "compilation": (lambda: build(compile={"backend": "eager"}), "expected stages that are not compiled"),
    "ties": (build_tied, "so the copies would drift apart"),
    "replicas": (
        lambda: run_pipeline(Case("layered", "paci", 2, 2, replicas=(3, 1))),
        "3 replicas that take microbatches in turn need at least 3 microbatches",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_meaning_is_refused(what: str) -> None:
    refused, words = REFUSED[what]
    with pytest.raises((penstock.PlanError, penstock.ScheduleError), match=words):
        refused()


def test_a_definition_says_what_it_guarantees() -> None:
    kept = replace(PACI, name="own", stashes=True)
    with pytest.raises(penstock.ScheduleError, match=r"UNSTASHED exactly with stashes=False, .* with stashes=True"):
        penstock.Schedule(kept, 2, 2)


def test_a_pipeline_warns_once_of_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        with build() as pipe:
            pipe.step(torch.ones(4, 5).double(), torch.ones(4, 5).double())
        build(schedule="2bw").close()

    (warning,) = [record.getMessage() for record in caplog.records if "set of weights" in record.getMessage()]
    assert "up to 1 update(s) lie between the forward and the backward" in warning


def test_it_is_planned_by_its_name_only() -> None:
    layers = tuple(penstock.LayerProfile(f"layer{i}", 1e-3, 2e-3, 1e3, 1e6, 1e6) for i in range(8))
    profile, cluster = penstock.Profile(layers, 1), penstock.Cluster.uniform(4, 1e9, memory_bytes=1e8)
    named, older = (penstock.plan(profile, cluster, schedule=name, microbatches=4) for name in ("paci", "2bw"))

    assert penstock.plan(profile, cluster, microbatches=4).schedule != "paci"
    assert named.schedule == "paci"
    assert not named.recompute
    assert max(named.predicted.peak_bytes) < max(older.predicted.peak_bytes)
