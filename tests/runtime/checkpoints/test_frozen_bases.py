"""Checkpoints of adapters over a frozen base: with all numbers, or with digests of those that are not trained."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CheckpointError
from support.jobs.state_jobs import BLOCKS, SAVED, STEPS, Training, losses
from support.packed_layers import Adapted, packed
from support.processes import Pool


def base(damage: Any = lambda model: None) -> nn.Module:
    model = packed(nn.Sequential(*(Adapted(dtype=torch.float64) for _ in range(BLOCKS))))
    damage(model)
    return model


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


TRAINING = Training(model=base, optimizer=adam)
NAMES = {f"{index}.base_layer.weight{part}" for index in range(BLOCKS) for part in ("", ".scales", ".most")}


def went_on() -> list[float]:
    with TRAINING.start(stages=2) as pipe:
        return losses(pipe, STEPS)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_a_run_resumes_beside_its_base(schedule: str, wait: bool, tmp_path: Path) -> None:
    options: Any = {"stages": 2, "schedule": schedule, "save_frozen": False}
    with TRAINING.start(**options) as pipe:
        losses(pipe, SAVED)
        saved: Any = pipe.save(tmp_path / "run") if wait else pipe.save(tmp_path / "run", wait=False)
        expected = losses(pipe, STEPS)
        path = saved if wait else saved.wait()
    content = json.loads((path / "manifest.json").read_text())["content"]
    assert content["base"].keys() == NAMES
    assert not any("base_layer" in key for key in content["tensors"])
    with TRAINING.start(**options) as resumed:
        resumed.load(path)
        assert losses(resumed, STEPS) == expected


def test_a_save_beside_the_training_does_not_drain_for_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are in no parameter, and no microbatch changes them."""
    caplog.set_level(logging.INFO, "penstock")
    found = []
    for saves in (False, True):
        with TRAINING.start(stages=2, schedule="2bw") as pipe:
            losses(pipe, SAVED)
            save = pipe.save(tmp_path / "run", wait=False) if saves else None
            found.append(losses(pipe, STEPS))
            assert save is None or save.wait()
    assert found[0] == found[1]


def test_what_is_saved_in_one_way_loads_in_the_other(tmp_path: Path) -> None:
    expected = went_on()
    for whole in (True, False):
        with TRAINING.start(stages=2, save_frozen=whole) as pipe:
            losses(pipe, SAVED)
            path = pipe.save(tmp_path / str(whole))
        with TRAINING.start(stages=3, save_frozen=not whole) as resumed:
            resumed.load(path)
            assert losses(resumed, STEPS - SAVED) == expected[SAVED:]


def test_the_base_is_in_a_state_dict_all_the_same() -> None:
    with TRAINING.start(stages=2, save_frozen=False) as pipe:
        losses(pipe, 1)
        assert pipe.full_state_dict().keys() == base().state_dict().keys()
        assert pipe.state_dict()["model"].keys() == base().state_dict().keys()


def scale(model: Any) -> None:
    model[1].base_layer.weight.state.scales[2] *= 1.0000001


def code(model: Any) -> None:
    model[3].base_layer.weight.data[0, 0] ^= 1


DAMAGES = {"1.base_layer.weight.scales": scale, "3.base_layer.weight": code}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_base_is_named_before_anything_is_changed(name: str, tmp_path: Path) -> None:
    with TRAINING.start(stages=2, save_frozen=False) as pipe:
        losses(pipe, SAVED)
        path = pipe.save(tmp_path / "run")
    damaged = Training(model=partial(base, DAMAGES[name]), optimizer=adam)
    with damaged.start(stages=2) as pipe, damaged.start(stages=2) as other:
        with pytest.raises(CheckpointError, match=rf"^{name}: expected the frozen weights .* found other numbers"):
            pipe.load(path)
        assert losses(pipe, STEPS) == losses(other, STEPS)


def test_a_base_that_was_not_packed_lacks_the_scales(tmp_path: Path) -> None:
    with TRAINING.start(stages=2, save_frozen=False) as pipe:
        path = pipe.save(tmp_path / "run")
    plain = Training(model=lambda: nn.Sequential(*(Adapted(dtype=torch.float64) for _ in range(BLOCKS))))
    with plain.start(stages=2) as other, pytest.raises(CheckpointError, match=r"base_layer\.weight"):
        other.load(path)


def save_and_resume(directory: Path) -> tuple[list[float], list[float], str]:
    """In each process: the losses after a save beside the base, those of a resumed run, and what a damage says."""
    with TRAINING.start(save_frozen=False) as pipe:
        losses(pipe, SAVED)
        pipe.save(directory)
        expected = losses(pipe, STEPS - SAVED)
    with TRAINING.start(save_frozen=False, resume=directory) as pipe:
        resumed = losses(pipe, STEPS - SAVED)
    try:
        Training(model=partial(base, scale), optimizer=adam).start(resume=directory).close()
    except CheckpointError as error:
        return expected, resumed, str(error)
    return expected, resumed, ""


def test_two_processes(pool: Pool, tmp_path: Path) -> None:
    expected = went_on()[SAVED:]
    for found in pool.run(2, save_and_resume, tmp_path / "run"):
        assert found[:2] == (expected, expected)
        assert "1.base_layer.weight.scales: expected the frozen weights" in found[2]
    with TRAINING.start(stages=1, resume=tmp_path / "run") as alone:
        assert losses(alone, STEPS - SAVED) == expected


def other_bases(directory: Path) -> str:
    """The error of a save where two replicas have other bases, which changed after they were built."""
    plan = penstock.Plan((penstock.Stage(0, 2, (0, 1)), penstock.Stage(2, 4, (2,))), "gpipe", 2)
    torch.manual_seed(0)
    model = base()
    training = Training(model=lambda: model, optimizer=adam)
    with training.start(plan=plan, microbatches=None, save_frozen=False) as pipe:
        if torch.distributed.get_rank() == 1:
            scale(model)
        try:
            pipe.save(directory)
        except CheckpointError as error:
            return str(error)
    return ""


def test_replicas_with_other_scales_are_refused(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run(3, other_bases, tmp_path / "run"):
        assert "1.base_layer.weight.scales has another value on rank 1" in error
