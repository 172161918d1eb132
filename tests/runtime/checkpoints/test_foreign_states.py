"""States of another training are refused before anything is changed, in memory and from files."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CheckpointError, PenstockError
from support import checkpointed
from support.checkpointed import SUBJECT
from support.jobs.hook_jobs import Dragging


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def deeper() -> nn.Module:
    return nn.Sequential(*SUBJECT.build().children(), nn.Linear(3, 3).double())


def wider() -> nn.Module:
    model = SUBJECT.build()
    model[-1] = nn.Linear(6, 4).double()
    return model


def make(build: Callable[[], nn.Module] = SUBJECT.build, **options: Any) -> penstock.Pipeline:
    pipe = checkpointed.make(replace(SUBJECT, build=build), **options)
    x, y = SUBJECT.batches[0]
    pipe.step(x.to(next(iter(pipe.parameters())).dtype), y)
    return pipe


AVERAGED: dict[str, Any] = {"update_hooks": [penstock.WeightAverage(0.9), Dragging()]}
SWAPPED: dict[str, Any] = {"update_hooks": AVERAGED["update_hooks"][::-1]}

OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a bigger model": ({"build": deeper}, {}, "another model|which the model has not"),
    "a smaller model": ({}, {"build": deeper}, "another model|the state dict has no"),
    "other shapes": ({"build": wider}, {}, "another model|has shape"),
    "another type": ({"build": lambda: SUBJECT.build().float(), "sample": (SUBJECT.sample[0].float(),)}, {}, "float32"),
    "Adam into SGD": ({}, {"optimizer": sgd}, r"\['SGD', None\], found that of \['AdamW', None\]"),
    "SGD into Adam": ({"optimizer": sgd}, {}, r"\['AdamW', None\], found that of \['SGD', None\]"),
    "another scheduler": ({"lr_scheduler": step_lr}, {"lr_scheduler": exponential}, "ExponentialLR"),
    "a scheduler into none": ({"lr_scheduler": step_lr}, {}, "StepLR"),
    "none into a scheduler": ({}, {"lr_scheduler": step_lr}, "StepLR"),
    "hooks in another order": (AVERAGED, SWAPPED, "in the same order"),
    "hooks into none": (AVERAGED, {}, "update_hooks="),
    "none into hooks": ({}, AVERAGED, "update_hooks="),
    "a loss scale into none": ({"loss_scale": "dynamic"}, {}, "loss_scale="),
    "none into a loss scale": ({}, {"loss_scale": "dynamic"}, "loss_scale"),
}


def snapshot(pipe: penstock.Pipeline) -> Any:
    return copy.deepcopy(pipe.state_dict())


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(value, second[key]) for key, value in first.items())
    return bool(first == second)


@pytest.mark.parametrize("case", OTHERS)
def test_the_state_of_another_training_is_refused(case: str, tmp_path: Path) -> None:
    saved, loaded, message = OTHERS[case]
    one = make(**saved)
    path = one.save(tmp_path / "run")
    two = make(**loaded)
    before = snapshot(two)
    for load in (lambda: two.load_state_dict(one.state_dict()), lambda: two.load(path)):
        with pytest.raises(CheckpointError, match=message):
            load()
        assert equal(snapshot(two), before)
    two.step(*SUBJECT.batches[1])


NOTHING = object()


def put(value: Any, *path: str) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        for step in path[:-1]:
            state = state[step]
        state[path[-1]] = value
        if value is NOTHING:
            del state[path[-1]]

    return change


def without(*path: str) -> Callable[[Any], Any]:
    return put(NOTHING, *path)


NAME = "0.linear.weight"
SPOILT = {
    "no steps": without("pipeline", "steps"),
    "no seed": without("pipeline", "seed"),
    "no hooks": without("pipeline", "hooks"),
    "no state of hooks": without("optimizer", "hooks"),
    "an empty part": put({}, "pipeline"),
    "a text for microbatches": put("a", "pipeline", "microbatches"),
    "a negative count": put(-1, "pipeline", "steps"),
    "a text as the seed": put("a", "pipeline", "seed"),
    "updates for hours": put(10**18, "pipeline", "updates"),
    "microbatches without end": put(10**30, "pipeline", "microbatches"),
    "a seed of another size": put(2**64, "pipeline", "seed"),
    "a text as the step of an optimizer": put("a", "optimizer", "state", NAME, "step"),
    "no step of an optimizer": without("optimizer", "state", NAME, "step"),
    "no moment": without("optimizer", "state", NAME, "exp_avg"),
    "a number for a moment": put(1.0, "optimizer", "state", NAME, "exp_avg"),
    "a list for the state of a parameter": put([1], "optimizer", "state", NAME),
    "a text for options": put("a", "optimizer", "options", NAME),
    "parameters among options": put([1], "optimizer", "options", NAME, "params"),
    "a hook of another number": put({"99.average": torch.ones(1)}, "optimizer", "hooks", NAME),
    "a hook without a number": put({"average": torch.ones(1)}, "optimizer", "hooks", NAME),
    "a list for a hook": put([1], "optimizer", "hooks", NAME),
    "no updates": without("pipeline", "updates"),
    "a text for updates": put("a", "pipeline", "updates"),
    "a list for a part": put([], "optimizer"),
    "an array for a weight": lambda state: put(state["model"][NAME].numpy(), "model", NAME)(state),
    "another type of weight": lambda state: put(state["model"][NAME].float(), "model", NAME)(state),
    "a moment of another shape": put(torch.zeros(3), "optimizer", "state", NAME, "exp_avg"),
    "no class": without("optimizer", "classes", NAME),
    "another parameter": put(torch.zeros(1), "model", "new.weight"),
    "a scale of another kind": put({"scale": "a", "good": 0}, "pipeline", "loss_scale"),
}


def test_spoilt_states_are_refused() -> None:
    pipe = make(lr_scheduler=step_lr, loss_scale="dynamic")
    before, accepted = snapshot(pipe), []
    for case, spoil in SPOILT.items():
        state = snapshot(pipe)
        spoil(state)
        with suppress(CheckpointError):
            pipe.load_state_dict(state)
            accepted.append(case)
        assert equal(snapshot(pipe), before), case
    for wrong in (None, 5, [], "a"):
        with pytest.raises(CheckpointError, match=r"expected a dict, found .* what Pipeline\.state_dict\(\) returned"):
            pipe.load_state_dict(wrong)  # type: ignore[arg-type]

    assert accepted == []
    pipe.load_state_dict(before)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_optimizer_of_parameters_that_the_model_has_not_is_refused(frozen: bool) -> None:
    temperature = nn.Parameter(torch.ones(2, 5), requires_grad=not frozen)
    with pytest.raises(PenstockError, match=r"found 1 other\(s\) in SGD, the first of shape \(2, 5\)"):
        make(optimizer=lambda params: torch.optim.SGD([*params, temperature], lr=0.1))
