"""The study of curves: both backwards learn alike, and so did they in the record."""

import torch
from torch import nn

import scan_curves_study as study
from penstock.scan import ScanLSTM, ScanSequential
from support.paths import ROOT

RECORD = (ROOT / "studies/results/scan_curves.md").read_text().splitlines()


def test_curves_are_the_same() -> None:
    """A part of the digits, and short spectrograms."""
    pictures, classes, *_ = study.digits()
    few = pictures[:48], classes[:48]
    sounds = study.spectrograms(16, torch.Generator().manual_seed(0), frames=15)
    pairs = [
        (lambda: study.lenet(nn.Sequential), lambda: study.lenet(ScanSequential), few),
        (
            lambda: study.Last(nn.LSTM(study.COEFFICIENTS, study.WIDTH, batch_first=True)),
            lambda: study.Last(ScanLSTM(study.COEFFICIENTS, study.WIDTH, batch_first=True, method="blelloch")),
            sounds,
        ),
    ]
    for plain, scanning, data in pairs:
        runs = [
            study.train(
                study.Run("", ""),
                build,
                lambda data=data: study.batches_of(data[0], data[1], 16, 2),  # type: ignore[misc]
                data,
                lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            )
            for build in (plain, scanning)
        ]
        assert study.farthest(*runs) < 1e-10 and runs[0].losses[-1] != runs[0].losses[0]
        assert abs(runs[0].test_loss - runs[1].test_loss) < 1e-10


def test_recorded_curves_are_the_same() -> None:
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in RECORD]
    differences = [float(row[6]) for row in cells if len(row) == 8 and row[6][:1].isdigit()]

    assert len(differences) == 5 and max(differences) < 1e-8
    accuracies = {row[0]: float(row[1]) for row in cells[-3:]}
    assert accuracies["pruned"] < accuracies["trained again"] and accuracies["trained again"] > 0.97
