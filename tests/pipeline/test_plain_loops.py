"""Optimizers, schedulers and changes of options beside the same loop of PyTorch: the same numbers, or a refusal."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as schedulers

import penstock
from support.logs import logged
from support.optimizers import GlobalNorm, GroupCounter, Own, OwnCounter, clamping
from support.processes import Pool
from support.training import train_by_loop

FLUSHING = ("1f1b-flush", "interleaved", "zb-h1")
LASTING = ("2bw", "pipedream")


STEPS, MICROBATCHES = 6, 4
Weights = dict[str, Tensor]
x, y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (1, 2))


class TensorCounter(Own):
    """Counts in a tensor of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.steps = torch.zeros(())

    def rate(self, group: dict[str, Any]) -> Any:
        self.steps += 1
        return group["lr"] / self.steps.item()


class StateCounter(Own):
    """Counts in its state, beside those of parameters."""

    def rate(self, group: dict[str, Any]) -> Any:
        state: Any = self.state
        state["steps"] = state.get("steps", 0) + 1
        return group["lr"] / state["steps"]


def counting_hooks(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Lowers the rate in a hook before every step."""
    made = torch.optim.SGD(parameters, lr=0.2)

    def lower(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    made.register_step_pre_hook(lower)
    return made


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "GroupCounter": GroupCounter,
    "OwnCounter": OwnCounter,
    "TensorCounter": TensorCounter,
    "StateCounter": StateCounter,
    "GlobalNorm": GlobalNorm,
    "clamping": clamping,
    "counting_hooks": counting_hooks,
    "sgd": sgd,
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda update: 1 / (update + 1)),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=40),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.5)], milestones=[3]
    ),
}
CHANGES: dict[str, tuple[str, Any]] = {
    "weight_decay": ("weight_decay", 0.5),
    "lr": ("lr", 0.03),
    "momentum": ("momentum", 0.2),
    "nesterov": ("nesterov", True),
}
"""What the user sets in all groups after the third step."""


def build() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4, dtype=torch.float64), nn.Tanh())]
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def run_loop(optimizer: str, scheduler: str | None = None, change: str | None = None) -> Weights:
    model = build()
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    schedule = SCHEDULERS[scheduler](made) if scheduler else None
    steps = iter(range(STEPS))

    def after_step() -> None:
        if schedule is not None:
            schedule.step()
        _change(made, change, next(steps))

    return train_by_loop(
        model, [(x, y)] * STEPS, mse_loss, lambda parameters: made, MICROBATCHES, after_step=after_step
    ).state


def make_pipeline(schedule: str, optimizer: Any, **options: Any) -> penstock.Pipeline:
    """With four stages where a rank holds two, else with two."""
    stages = 4 if schedule in ("interleaved", "zb-v") else 2
    made = OPTIMIZERS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
    given = {"sample": (x[:2],), "loss_fn": mse_loss, "optimizer": made, "schedule": schedule, "stages": stages}
    return penstock.Pipeline(build(), **{**given, "microbatches": MICROBATCHES, **options})


def run_pipeline(
    schedule: str, optimizer: str, scheduler: str | None = None, change: str | None = None, drains: bool = False
) -> Weights:
    """The pipeline; `drains` before the change of options."""
    pipe = make_pipeline(schedule, optimizer, lr_scheduler=SCHEDULERS[scheduler] if scheduler else None)
    for step in range(STEPS):
        pipe.step(x, y)
        if drains and step == 2:
            pipe.drain()
        _change(pipe.optimizer, change, step)
    state = pipe.state_dict()["model"]
    weights: Weights = {name: tensor.clone() for name, tensor in state.items()}
    pipe.close()
    return weights


def run_oracle(schedule: str, optimizer: str, scheduler: str | None = None) -> Weights:
    return penstock.reference_train(
        build(),
        [(x, y)] * STEPS,
        sample=(x[:2],),
        loss_fn=mse_loss,
        optimizer=OPTIMIZERS[optimizer],
        schedule=schedule,
        stages=4 if schedule in ("interleaved", "zb-v") else 2,
        microbatches=MICROBATCHES,
        lr_scheduler=SCHEDULERS[scheduler] if scheduler else None,
    ).state


def warnings_of(optimizer: Callable[[Any], torch.optim.Optimizer]) -> list[str]:
    with logged(logging.WARNING) as said:
        make_pipeline("1f1b-flush", optimizer).close()
    return [text.removeprefix("WARNING ") for text in said]


def rate_of_rank(parameters: Any) -> torch.optim.Optimizer:
    """Has another rate on every rank."""
    return torch.optim.SGD(parameters, lr=0.1 * (torch.distributed.get_rank() + 1))


def hooked(parameters: Any) -> torch.optim.Optimizer:
    """Has a hook on its steps."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    return optimizer


def _change(optimizer: torch.optim.Optimizer | None, change: str | None, step: int) -> None:
    if change is not None and step == 2 and optimizer is not None:
        key, value = CHANGES[change]
        for group in optimizer.param_groups:
            group[key] = value


def assert_same(expected: Weights, found: Weights) -> None:
    for name, tensor in found.items():
        assert torch.equal(expected[name], tensor), name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_steps_once_per_update(optimizer: str, schedule: str) -> None:
    expected = run_loop(optimizer)

    assert_same(expected, run_pipeline(schedule, optimizer))
    assert_same(expected, run_oracle(schedule, optimizer))


@pytest.mark.sampled(2)
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


@pytest.mark.sampled(7)
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
        "a group of the optimizer has lr=0.1 on rank 0 and lr=0.2 on rank 1: all ranks take part in one training. "
        "Build the same optimizer on every rank, unless you mean it"
    ]


def test_hooks_on_steps_are_warned_of_in_several_processes(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(2, warnings_of, hooked)):
        (warning,) = said
        assert warning.startswith(f"rank {rank}: an optimizer has hooks on its steps, which see the parameters of this")
