"""`penstock rehearse`: the same text as the function's, and exit codes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main

SETUP = """
import torch
from torch import nn

def make(loss_fn=nn.functional.mse_loss):
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    return {
        "model": nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))),
        "batches": [(x, y)] * 2,
        "sample": (x[:2],),
        "loss_fn": loss_fn,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "microbatches": 2,
    }

def wrong():
    return make(lambda output, target: (output - target).square().sum())

def broken():
    return [1, 2][3]

def pair():
    return make()["model"], make()["sample"]

def no_batches():
    return {name: value for name, value in make().items() if name != "batches"}
"""


@pytest.fixture(autouse=True)
def setup_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("train_setup.py").write_text(SETUP)
    yield
    sys.modules.pop("penstock_subject_train_setup", None)


def test_equal_numbers(capsys: Any) -> None:
    assert main(["rehearse", "train_setup.py:make"]) == 0

    assert "your loop, the pipeline" in capsys.readouterr().out


def test_other_numbers(capsys: Any) -> None:
    assert main(["rehearse", "train_setup.py:wrong", "--steps", "1"]) == 1

    error = capsys.readouterr().err
    assert error.startswith(
        "penstock: error: the numbers of your loop in microbatches are not those of your loop. First the loss"
    )
    assert "likely cause: the loss is no mean over samples" in error
    assert main(["rehearse", "train_setup.py:wrong", "--accumulation"]) == 0


def test_json(capsys: Any) -> None:
    assert main(["rehearse", "train_setup.py:make", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["rehearse", "train_setup.py:wrong", "--json"]) == 1
    wrong = json.loads(capsys.readouterr().out)

    assert found["steps"] == 2
    assert found["cause"] == ""
    assert [one["difference"] for one in found["comparisons"]] == [None, None]
    different = [one["difference"] for one in wrong["comparisons"] if one["difference"]]
    assert [(one["step"], one["kind"]) for one in different] == [(0, "loss")]


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        ("missing.py:make", "no such file"),
        ("train_setup.py:nothing", "there is no function 'nothing'"),
        ("train_setup.py:broken", "line 20: IndexError"),
        ("train_setup.py:no_batches", "expected batches"),
        ("train_setup.py:pair", "found (model, sample), as profile takes it: batches, loss_fn and optimizer are"),
    ],
)
def test_refusals(subject: str, text: str, capsys: Any) -> None:
    assert main(["rehearse", subject]) == 1

    assert text in capsys.readouterr().err
