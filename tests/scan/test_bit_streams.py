"""The paper's task: which of ten biased coins made a stream of bits (section 4.1). All backwards learn it alike."""

import json

import pytest
import torch

from bit_stream_study import METHODS, Run, Task, farthest, means, picture, table, train
from support.paths import ROOT

SHORT = Task(steps=20, width=8, samples=32, updates=30, rate=0.02, dtype=torch.float64)


def test_all_curves_are_the_same() -> None:
    runs = {method: train(SHORT, method) for method in METHODS}
    expected = runs.pop("nn.RNN")

    for run in runs.values():
        # Adam divides by the size of a gradient, so that a rounding of a tiny one counts.
        assert farthest(run, expected) < 1e-9
    assert means(expected.losses)[-1] < means(expected.losses)[0] - 0.3


def test_the_recorded_study_shows_the_same_curve() -> None:
    text = (ROOT / "studies/results/bit_streams.jsonl").read_text()
    runs = [Run(**json.loads(line)) for line in text.splitlines()]
    document = (ROOT / "studies/results/bit_streams.md").read_text()

    assert [run.method for run in runs] == list(METHODS)
    for run in runs[1:]:
        assert means(run.losses) == pytest.approx(means(runs[0].losses), abs=0.02)
    assert [row for row in table(runs) if row not in document] == []
    assert (ROOT / "docs/pictures/scan-bit-streams.svg").read_text() == picture(runs)
