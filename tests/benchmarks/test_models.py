"""The table of models: what differs is found and said, and a case that does not end is ended."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from model_cases.cases import Case
from model_cases.comparison import compare
from model_cases.families import CASES
from model_cases.habit_blocks import Stack, draw
from model_cases.pages import outcome_of, page, summary
from model_cases.training import Outcome
from model_cases.trials import try_case

HABITS = {case.name: case for case in CASES if case.family.endswith("blocks")}
TRAINED = Outcome((1.0, 0.5), {"weight": torch.ones(3, dtype=torch.float64), "attribute calls": 3})


def record_of(**entry: Any) -> dict[str, Any]:
    training = {"schedule": "zb-h1", "stages": 3, "against": "plain loop", "phase": "step", **entry}
    return {"case": "a", "family": "state in blocks", "dtype": "float64", "layers": 4, "trainings": [training]}


def test_every_difference_counts() -> None:
    weight = TRAINED.state["weight"]
    assert compare(TRAINED, TRAINED).relative == 0
    assert compare(TRAINED, replace(TRAINED, losses=(1.0, 0.5 + 2**-52))).where == "the loss of step 1"
    assert compare(TRAINED, replace(TRAINED, state={"weight": weight + 1e-9})).relative == pytest.approx(1e-9)
    assert compare(TRAINED, replace(TRAINED, state={"weight": weight / 0})).relative == math.inf
    assert compare(TRAINED, replace(TRAINED, state={"weight": weight[:2]})).relative == math.inf
    assert compare(TRAINED, replace(TRAINED, state={})).relative == math.inf
    assert compare(TRAINED, replace(TRAINED, state={**TRAINED.state, "saved weight": weight * 2})).relative == 1
    assert compare(TRAINED, replace(TRAINED, state={**TRAINED.state, "attribute calls": 4})).relative == 0.25


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        (record_of(kind="compared", relative=0.0), "equal"),
        (record_of(kind="compared", relative=1e-15), "close"),
        (record_of(kind="compared", relative=1e-9), "wrong"),
        (record_of(kind="compared", relative=math.inf), "wrong"),
        (record_of(kind="compared", relative=1e-9, against="oracle"), "oracle"),
        (record_of(kind="refused", error="CaptureError: it fixes the batch size"), "refused"),
        (record_of(kind="internal", error="TypeError: no"), "internal"),
        ({**record_of(kind="compared", relative=0.0), "ended": "the limit of time"}, "limit"),
        ({**record_of(), "eager": "TypeError: no"}, "unusable"),
    ],
)
def test_outcomes(record: dict[str, Any], outcome: str) -> None:
    assert outcome_of(record) == outcome


def test_a_case_that_is_wrong_shows() -> None:
    """The loop's model is another one than the pipeline's from the third build on."""
    made: list[nn.Module] = []

    class Colder(Stack):
        def __init__(self) -> None:
            super().__init__(nn.Tanh)
            self.heat = 1.0 if len(made) < 2 else 1.01
            made.append(self)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.heat

    record = try_case(Case("colder", "state in blocks", Colder, draw), lambda record: None)

    assert outcome_of(record) == "wrong"
    assert "colder" in summary(record)
    assert "| **other numbers than the plain loop**: colder | 0 | 1 |" in page([record], "")


def test_right_and_refused_cases_are_on_the_page() -> None:
    records = [try_case(HABITS[name], lambda record: None) for name in ("RandomDepth", "CounterOutside")]
    text = page(records, "torch 2")

    assert [outcome_of(record) for record in records] == ["close", "refused"]
    assert "0 of 0 models of libraries, and 1 of 2 by hand" in text
    assert "| refused, with a `PenstockError` | 0 | 1 |" in text
    assert "outside of its blocks | move that into a block, or draw with `torch.rand` | 1 |" in text
    assert "No way out was tried for: CounterOutside." in text


@pytest.mark.processes
def test_a_case_that_does_not_end_is_ended() -> None:
    def spin() -> nn.Module:
        while True:
            pass

    record = models._in_a_process(Case("spin", "state in blocks", spin, draw), seconds=1)

    assert (record["case"], record["ended"], outcome_of(record)) == ("spin", "the limit of processor time", "limit")
