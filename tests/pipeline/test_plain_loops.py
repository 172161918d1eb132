"""Optimizers, schedulers and changes of options beside the same loop of PyTorch: the same numbers, or a refusal."""

from typing import Any

import pytest
import torch

import penstock
from support.jobs.plain_loop_jobs import (
    CHANGES,
    OPTIMIZERS,
    SCHEDULERS,
    Weights,
    hooked,
    make_pipeline,
    rate_of_rank,
    run_loop,
    run_oracle,
    run_pipeline,
    warnings_of,
    x,
    y,
)
from support.processes import Pool

FLUSHING = ("1f1b-flush", "interleaved", "zb-h1")
LASTING = ("2bw", "pipedream")


def assert_same(expected: Weights, found: Weights) -> None:
    for name, tensor in found.items():
        assert torch.equal(expected[name], tensor), name


@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_steps_once_per_update(optimizer: str, schedule: str) -> None:
    expected = run_loop(optimizer)

    assert_same(expected, run_pipeline(schedule, optimizer))
    assert_same(expected, run_oracle(schedule, optimizer))


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"GlobalNorm"}))
def test_an_optimizer_in_two_processes(pool: Pool, optimizer: str) -> None:
    for schedule in FLUSHING:
        for found in pool.run(2, run_pipeline, schedule, optimizer):
            assert_same(run_loop(optimizer), found)


def test_options_that_the_optimizer_changes_are_those_of_a_stage() -> None:
    for schedule in LASTING:
        assert_same(run_oracle(schedule, "GroupCounter"), run_pipeline(schedule, "GroupCounter"))


@pytest.mark.parametrize("schedule", LASTING)
@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("OwnCounter", "OwnCounter: its attribute 'steps' changes"),
        ("TensorCounter", "TensorCounter: its attribute 'steps' changes"),
        ("StateCounter", "StateCounter: its attribute 'steps' changes"),
        ("clamping", "SGD: hooks run"),
        ("counting_hooks", "SGD: hooks run"),
    ],
)
def test_what_stages_would_share_is_refused_where_they_update_apart(schedule: str, optimizer: str, said: str) -> None:
    with pytest.raises(penstock.PenstockError, match=f"{said}.*Choose a schedule that flushes"):
        run_pipeline(schedule, optimizer)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_options_that_the_user_changes_count_beside_a_scheduler(scheduler: str, change: str) -> None:
    expected = run_loop("sgd", scheduler, change)

    for schedule in FLUSHING:
        assert_same(expected, run_pipeline(schedule, "sgd", scheduler, change))


def test_options_that_the_user_changes_in_two_processes(pool: Pool) -> None:
    for schedule in ("1f1b-flush", "interleaved"):
        for found in pool.run(2, run_pipeline, schedule, "sgd", "StepLR", "weight_decay"):
            assert_same(run_loop("sgd", "StepLR", "weight_decay"), found)


@pytest.mark.parametrize("schedule", LASTING)
@pytest.mark.parametrize("change", ["weight_decay", "lr"])
def test_one_process_and_two_change_options_alike(pool: Pool, schedule: str, change: str) -> None:
    whole = run_pipeline(schedule, "sgd", "StepLR", change, True)

    assert any(not torch.equal(whole[name], tensor) for name, tensor in run_oracle(schedule, "sgd", "StepLR").items())
    for part in pool.run(2, run_pipeline, schedule, "sgd", "StepLR", change, True):
        assert_same(whole, part)


@pytest.mark.parametrize("schedule", ["1f1b-flush", *LASTING])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_options_of_a_checkpoint_go_before_those_of_the_code(scheduler: str, schedule: str) -> None:
    def make(lr: float, **options: Any) -> penstock.Pipeline:
        made = lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9, **options)  # noqa: E731
        return make_pipeline(schedule, made, lr_scheduler=SCHEDULERS[scheduler])

    saving, loading = make(0.01, weight_decay=0.1), make(7.0)
    for pipe in (saving, saving, loading):
        pipe.step(x, y)
    loading.load_state_dict(saving.state_dict())

    assert [saving.step(x, y).lr for _ in range(3)] == [loading.step(x, y).lr for _ in range(3)]
    assert_same(saving.state_dict()["model"], loading.state_dict()["model"])


def test_a_checkpoint_without_amsgrad_goes_on_without_it() -> None:
    def make(**options: Any) -> penstock.Pipeline:
        made = lambda params: torch.optim.Adam(params, lr=0.01, **options)  # noqa: E731
        return make_pipeline("1f1b-flush", made, lr_scheduler=SCHEDULERS["StepLR"])

    saving, loading = make(), make(amsgrad=True)
    saving.step(x, y)
    loading.load_state_dict(saving.state_dict())

    assert float(saving.step(x, y).loss) == float(loading.step(x, y).loss)
    assert_same(saving.state_dict()["model"], loading.state_dict()["model"])


def test_an_optimizer_of_no_parameter_is_explained() -> None:
    with pytest.raises(penstock.PenstockError, match=r"selects none of the 8 .*Pass a group, which may be empty"):
        make_pipeline("gpipe", lambda params: torch.optim.Adam(params.where(lambda name, p: name == "elsewhere")))
    with make_pipeline("gpipe", lambda params: torch.optim.Adam([{"params": params.where(lambda *_: False)}])) as pipe:
        assert float(pipe.evaluate(x, y).loss) > 0


def test_a_parameter_from_elsewhere_is_named(tmp_path: Any) -> None:
    pipe = make_pipeline("1f1b-flush", "sgd")
    assert pipe.optimizer is not None
    pipe.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(penstock.CheckpointError, match=r"found another one of shape \(3,\)"):
        pipe.save(tmp_path)


def test_another_rate_on_another_rank_is_warned_of(pool: Pool) -> None:
    first, second = pool.run(2, warnings_of, rate_of_rank)

    assert first == []
    assert second == [
        "a group of the optimizer has lr=0.1 on rank 0 and 0.2 on rank 1: all ranks take part in one training. Build "
        "the same optimizer on every rank, unless you mean it"
    ]


def test_hooks_on_steps_are_warned_of_in_several_processes(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(2, warnings_of, hooked)):
        (warning,) = said
        assert warning.startswith(f"rank {rank}: an optimizer has hooks on its steps, which see the parameters of this")
