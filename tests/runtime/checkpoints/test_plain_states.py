"""A checkpoint holds all that the state dicts of a plain loop hold: the resumed run equals the plain loop to the bit."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from support.jobs.state_jobs import (
    NOISY,
    SAVED,
    STEPS,
    TRAININGS,
    Training,
    X,
    losses,
    plain_losses,
    resume_all,
    seed_generators,
    train_and_save,
)
from support.processes import Pool


@cache
def expected(name: str) -> list[float]:
    return plain_losses(TRAININGS[name])


def by_save(pipe: penstock.Pipeline, directory: Path) -> Any:
    path = pipe.save(directory)
    return lambda other: other.load(path)


def by_save_beside(pipe: penstock.Pipeline, directory: Path) -> Any:
    save = pipe.save(directory, wait=False)
    return lambda other: other.load(save.wait())


def by_state_dict(pipe: penstock.Pipeline, directory: Path) -> Any:
    state = pipe.state_dict()
    return lambda other: other.load_state_dict(state)


ROUTES = [by_save, by_save_beside, by_state_dict]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_resumed_run_equals_the_plain_loop(name: str, route: Any, tmp_path: Path) -> None:
    with TRAININGS[name].start(stages=2) as pipe:
        assert losses(pipe, SAVED) == expected(name)[:SAVED]
        load = route(pipe, tmp_path / "run")
        assert losses(pipe, STEPS - SAVED) == expected(name)[SAVED:]
        with TRAININGS[name].start(stages=3 if route is by_save else 1) as resumed:
            load(resumed)
            assert losses(resumed, STEPS - SAVED) == expected(name)[SAVED:]
            assert resumed.state_dict()["model"].keys() == TRAININGS[name].net().state_dict().keys()


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("wait", [True, False])
def test_generators_of_numpy_and_python_go_on(seed: int | None, wait: bool, tmp_path: Path) -> None:
    with NOISY.start(stages=2, seed=seed) as pipe:
        losses(pipe, SAVED)
        saved: Any = pipe.save(tmp_path / "run", wait=wait)
        went_on, drawn = losses(pipe, STEPS), torch.rand(1)
        if not wait:
            saved.wait()
    seed_generators(9)
    torch.manual_seed(9)
    with NOISY.start(stages=2, seed=seed, resume=tmp_path / "run") as resumed:
        assert losses(resumed, STEPS) == went_on
        assert torch.rand(1) == drawn


def test_a_whole_state_dict_fits_the_plain_model() -> None:
    """And that of a plain model fits the pipeline."""
    for name in ("extra state", "code of state dicts", "hooks that change a weight", "hooks of the whole model"):
        training = TRAININGS[name]
        with training.start(stages=2) as pipe:
            losses(pipe, SAVED)
            found, state, drawn = pipe.full_state_dict(), pipe.state_dict(), pipe.predict(X)
            went_on = losses(pipe, 1)
        net = net_after(training, found)
        assert torch.equal(net.eval()(X), drawn)
        with training.start(stages=2) as other:
            other.load_state_dict({**state, "model": net.state_dict()})
            assert losses(other, 1) == went_on


def test_hooks_after_a_load_see_the_weights_that_were_loaded(tmp_path: Path) -> None:
    training = TRAININGS["hooks that change a weight"]
    with training.start(stages=2) as pipe:
        losses(pipe, SAVED)
        pipe.save(tmp_path)
        model = training.net()
        sample = (X[:2],)
        with penstock.Pipeline(model, sample, F.mse_loss, training.optimizer, stages=2, resume=tmp_path):
            for block in model:
                assert block.loaded == block.linear.weight.sum() != 0


def net_after(training: Training, state: Any) -> nn.Module:
    net = training.net()
    net.load_state_dict(copy.deepcopy(state))
    return net


def test_several_processes(pool: Pool, tmp_path: Path) -> None:
    """Two save and one resumes, and the other way."""
    names = [name for name in TRAININGS if name not in ("hooks that change a weight",)]
    pool.run(2, train_and_save, names, tmp_path / "two")
    pool.run(1, train_and_save, names, tmp_path / "one")
    alone = resume_all(names, tmp_path / "two")
    for found in (*pool.run(2, resume_all, names, tmp_path / "one"), alone):
        for (own, state), (other, whole), name in zip(
            found, alone, [name for name in names for _ in range(2)], strict=True
        ):
            assert own == other == expected(name)[SAVED:], name
            assert state.keys() == whole.keys() == TRAININGS[name].net().state_dict().keys()
            net_after(TRAININGS[name], state)
