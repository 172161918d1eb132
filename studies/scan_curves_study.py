"""Trains the models of Wang, Bai and Pekhimenko (MLSys 2020) by PyTorch's backward and by scan, on data that is here.

    python studies/scan_curves_study.py

- LeNet-5 (figure 6) on the 8 x 8 digits of scikit-learn. The paper has CIFAR-10; as there, momentum is 0.9.
- A GRU and an LSTM of 20 hidden values (figure 13) on drawn spectrograms of the size of the set S, 259 frames of 38
  coefficients, 16 at a time. The paper has recordings of instruments, IRMAS, and no LSTM. A class is a pitch and how
  fast its loudness changes.
- A network of convolutions on the digits, of whose weights the 97 % that are smallest are pruned, and which is trained
  again for as many epochs (section 4.3, where VGG-11 learns CIFAR-10).

Curves are in float64. In float32, as in the paper, a rounding grows to a difference that one sees within hundreds of
updates of a large rate, whichever backward is taken. The table stands in studies/results/scan_curves.md.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.scan import ScanGRU, ScanLSTM, ScanSequential

ROOT = Path(__file__).parents[1]
CLASSES = 10
DTYPE = torch.float64
"""Of the curves."""
FRAMES, COEFFICIENTS, WIDTH = 259, 38, 20
AVERAGED = 10
"""Updates whose losses are averaged."""
PRUNED = 0.97

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Run:
    """A training: the loss at every update, that on the test set at the end, and the processor's seconds."""

    name: str
    backward: str
    losses: list[float] = field(default_factory=list)
    test_loss: float = math.nan
    accuracy: float = math.nan
    seconds: float = 0.0


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures (N, 1, 8, 8) and classes to train on, and a fifth of all to test on."""
    from sklearn.datasets import load_digits  # takes seconds

    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    pictures, classes = pictures[order], torch.tensor(data.target)[order]
    tested = len(pictures) // 5
    return pictures[tested:], classes[tested:], pictures[:tested], classes[:tested]


def batches_of(pictures: Tensor, classes: Tensor, size: int, epochs: int) -> Batches:
    """All samples, once in an epoch."""
    for _ in range(epochs):
        for own in torch.split(torch.randperm(len(pictures)), size):
            yield pictures[own], classes[own]


def spectrograms(count: int, generator: torch.Generator, frames: int = FRAMES) -> tuple[Tensor, Tensor]:
    """Samples (B, T, C), normalized as in the paper: each coefficient has mean 0 and variance 1 over the frames."""
    classes = torch.randint(CLASSES, (count,), generator=generator)
    pitch, beat = 2 + 3 * (classes % 5), 0.02 + 0.05 * torch.div(classes, 5, rounding_mode="floor")
    places = torch.arange(COEFFICIENTS)
    shape = torch.cos(places * pitch.unsqueeze(1) * math.pi / COEFFICIENTS)  # (B, C)
    phase = torch.rand(count, 1, generator=generator) * 2 * math.pi
    loudness = 1 + torch.sin(torch.arange(frames) * beat.unsqueeze(1) * 2 * math.pi + phase)  # (B, T)
    found = loudness.unsqueeze(2) * shape.unsqueeze(1)
    found = found + torch.randn(count, frames, COEFFICIENTS, generator=generator)
    return (found - found.mean(1, keepdim=True)) / found.std(1, keepdim=True), classes


def spectrogram_batches(updates: int, size: int = 16) -> Batches:
    """New samples for every update."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        yield spectrograms(size, generator)


class Last(nn.Module):
    """A linear layer on the last hidden values of a recurrence."""

    def __init__(self, recurrence: nn.RNNBase) -> None:
        super().__init__()
        self.recurrence, self.head = recurrence, nn.Linear(WIDTH, CLASSES)

    def forward(self, samples: Tensor) -> Tensor:
        scores: Tensor = self.head(self.recurrence(samples)[0][:, -1])
        return scores


def lenet(kind: type[nn.Sequential]) -> nn.Sequential:
    """LeNet-5 with the padding that pictures of 8 x 8 need."""
    return kind(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def convolutions(width: int = 64) -> nn.Sequential:
    """A small network in the manner of VGG."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * width, CLASSES)),
    )


def train(
    run: Run,
    build: Callable[[], nn.Module],
    batches: Callable[[], Batches],
    tests: tuple[Tensor, Tensor],
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> Run:
    """`run` with its results. Runs of the same seed begin with the same weights and see the same samples."""
    torch.manual_seed(0)
    model = build().to(DTYPE)
    stepper = optimizer(model.parameters())
    losses, spent = [], 0.0
    for samples, classes in batches():
        start = time.process_time()
        loss = nn.functional.cross_entropy(model(samples.to(DTYPE)), classes)
        stepper.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()
        spent += time.process_time() - start
        losses.append(loss.item())
    with torch.no_grad():
        scores = model(tests[0].to(DTYPE))
    test_loss = nn.functional.cross_entropy(scores, tests[1]).item()
    return Run(run.name, run.backward, losses, test_loss, accuracy_of(scores, tests[1]), spent)


def accuracy_of(scores: Tensor, classes: Tensor) -> float:
    """The share of samples whose class has the highest score."""
    return (scores.argmax(1) == classes).double().mean().item()


def curves(epochs: int, updates: int) -> Iterator[Run]:
    """LeNet-5 on the digits, and recurrences on spectrograms; PyTorch's backward first."""
    pictures, classes, *tests = digits()
    for kind in (nn.Sequential, ScanSequential):
        yield train(
            Run("LeNet-5", kind.__name__),
            lambda kind=kind: lenet(kind),  # type: ignore[misc]
            lambda: batches_of(pictures, classes, 64, epochs),
            (tests[0], tests[1]),
            lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        )
    held = spectrograms(200, torch.Generator().manual_seed(2))
    plain: dict[str, tuple[type[nn.RNNBase], type[nn.RNNBase]]] = {
        "GRU": (nn.GRU, ScanGRU),
        "LSTM": (nn.LSTM, ScanLSTM),
    }
    for name, (torchs, ours) in plain.items():
        for method in ("PyTorch", "linear", "blelloch", "chunked") if name == "GRU" else ("PyTorch", "blelloch"):
            options = {} if method == "PyTorch" else {"method": method}
            kind_of: type[nn.RNNBase] = torchs if method == "PyTorch" else ours
            yield train(
                Run(name, method),
                lambda k=kind_of, o=options: Last(k(COEFFICIENTS, WIDTH, batch_first=True, **o)),  # type: ignore[misc]
                lambda: spectrogram_batches(updates),
                held,
                lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
            )


def pruning(epochs: int) -> Iterator[tuple[str, float, int]]:
    """What was done, the accuracy on the test set, and how many weights of convolutions and linear layers are left."""
    pictures, classes, *tests = digits()
    torch.manual_seed(0)
    model = convolutions()
    weights = [layer.weight for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    masks = [torch.ones_like(weight) for weight in weights]

    def fit() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for _ in range(epochs):
            for samples, own in batches_of(pictures, classes, 64, 1):
                loss = nn.functional.cross_entropy(model(samples), own)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                prune()
            schedule.step()

    @torch.no_grad()
    def prune() -> None:
        for weight, mask in zip(weights, masks, strict=True):
            weight.mul_(mask)

    def result(name: str) -> tuple[str, float, int]:
        with torch.no_grad():
            return name, accuracy_of(model(tests[0]), tests[1]), sum(int(mask.sum()) for mask in masks)

    fit()
    yield result("trained")
    # The smallest of all layers together: "class-blind" in See and others, 2016.
    every = torch.cat([weight.detach().abs().flatten() for weight in weights])
    least = every.kthvalue(int(PRUNED * len(every))).values
    masks = [(weight.detach().abs() > least).to(weight.dtype) for weight in weights]
    prune()
    yield result("pruned")
    fit()
    yield result("trained again")


def table(runs: Sequence[Run]) -> list[str]:
    """Rows of Markdown; each run is compared with the first of its name."""
    rows = [
        "| model | backward | loss, first 10 updates | last 10 | on the test set | accuracy | largest difference at an "
        "update | processor seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        first = next(one for one in runs if one.name == run.name)
        far = "" if run is first else f"{farthest(run, first):.1e}"
        start, end = (sum(part) / AVERAGED for part in (run.losses[:AVERAGED], run.losses[-AVERAGED:]))
        rows.append(
            f"| {run.name} | {run.backward} | {start:.4f} | {end:.4f} | {run.test_loss:.4f} | {run.accuracy:.3f} | "
            f"{far} | {run.seconds:.0f} |"
        )
    return rows


def farthest(run: Run, other: Run) -> float:
    """The largest difference between the losses of an update."""
    return max(abs(one - two) for one, two in zip(run.losses, other.losses, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains models by PyTorch's backward and by scan.")
    parser.add_argument("--results", type=Path, default=ROOT / "studies/results/scan_curves.md")
    parser.add_argument("--epochs", type=int, default=12, help="of LeNet-5, and of each training around the pruning")
    parser.add_argument("--updates", type=int, default=200, help="of the recurrences")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[Run] = []
    for run in curves(options.epochs, options.updates):
        runs.append(run)
        print(table(runs)[-1], flush=True)
    rows = ["| convolutions on digits | accuracy | weights |", "|---|---:|---:|"]
    for name, accuracy, left in pruning(options.epochs):
        rows.append(f"| {name} | {accuracy:.3f} | {left:,} |")
        print(rows[-1], flush=True)
    options.results.parent.mkdir(exist_ok=True)
    options.results.write_text("\n".join([*table(runs), "", *rows, ""]))


if __name__ == "__main__":
    main()
