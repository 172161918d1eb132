"""Plain ``1f1b`` means two schedules: wherever it is written, the error has the word for each."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.cli import main
from penstock.errors import PenstockError
from penstock.planning.requests import Request
from penstock.scheduling import Schedule
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage

BOTH = (
    "'1f1b' has two meanings: PyTorch and Megatron mean one that flushes after every minibatch, here '1f1b-flush'; "
    "PipeDream's paper means one that never flushes and trains on stale weights, here 'pipedream'."
)
PROFILE = Profile(tuple(LayerProfile(str(index), 1e-3, 2e-3, 1e3, 1e3, 1e3) for index in range(4)), 2)
STAGES = (Stage(0, 2, (0,)), Stage(2, 4, (1,)))


OPTIONS: dict[str, Any] = {
    "sample": (torch.ones(2, 4),),
    "loss_fn": F.mse_loss,
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    "stages": 2,
}
LAYERS = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
BATCHES = [(torch.ones(2, 4), torch.ones(2, 4))]
WAYS: dict[str, Callable[[str], object]] = {
    "Schedule": lambda name: Schedule(name, 2, 4),
    "Plan": lambda name: Plan(STAGES, name, 4),
    "plan": lambda name: penstock.plan(PROFILE, Cluster.uniform(2, 1e9), schedule=name),
    "a planner's request": lambda name: Request(name),
    "Pipeline": lambda name: penstock.Pipeline(LAYERS, **OPTIONS, schedule=name),
    "reference_train": lambda name: penstock.reference_train(LAYERS, BATCHES, **OPTIONS, schedule=name),
}


@pytest.mark.parametrize("name", ["1f1b", "1F1B"])
@pytest.mark.parametrize("way", WAYS)
def test_plain_1f1b_is_refused_with_both_meanings(way: str, name: str) -> None:
    with pytest.raises(PenstockError, match=re.escape(BOTH)):
        WAYS[way](name)


def test_a_file_that_says_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    Plan(STAGES, "pipedream", 4).save(path)
    path.write_text(re.sub(r"\bpipedream\b", "1f1b", path.read_text()))

    with pytest.raises(PenstockError, match=re.escape(BOTH)) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_the_command_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, cluster = tmp_path / "profile.json", tmp_path / "cluster.yaml"
    PROFILE.save(profile)
    Cluster.uniform(2, 1e9).save(cluster)

    assert main(["plan", str(profile), str(cluster), "--schedule", "1f1b"]) == 1
    assert BOTH in capsys.readouterr().err
