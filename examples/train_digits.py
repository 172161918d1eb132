"""Trains a small residual network on the 8 x 8 pictures of digits that come with scikit-learn.

BatchNorm, dropout and skip connections, none of them written for a pipeline. One process with all stages:

    python examples/train_digits.py --config configs/digits.yaml --stages 2

Two processes with a stage each:

    torchrun --nproc-per-node 2 examples/train_digits.py --config configs/digits.yaml
"""

import session
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import penstock


class ResidualBlock(nn.Module):
    """Two convolutions beside a skip connection."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.skip = nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C', H / stride, W / stride)
        return F.relu(self.convolutions(x) + self.skip(x))


class ResidualNetwork(nn.Module):
    """Scores of the ten digits for a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(
            [
                ResidualBlock(width, width, stride=1),
                ResidualBlock(width, 2 * width, stride=2),
                ResidualBlock(2 * width, 2 * width, stride=1),
            ]
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * width, 10))

    def forward(self, pictures: Tensor) -> Tensor:  # (B, 1, 8, 8) -> (B, 10)
        x = self.stem(pictures)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures (N, 1, 8, 8) and digits (N,) to train on, then those to test with: every fifth one."""
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.5
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 4
    return pictures[~test], labels[~test], pictures[test], labels[test]


def accuracy(pipe: penstock.Pipeline, pictures: Tensor, labels: Tensor) -> float:
    """The share of `pictures` that are classified correctly. Every rank must call it."""
    return float((pipe.predict(pictures).argmax(dim=1).cpu() == labels).float().mean())


def train(
    pipe: penstock.Pipeline, pictures: Tensor, labels: Tensor, expected: penstock.Timeline, options: session.Options
) -> None:
    """`options.steps` random minibatches, with a progress bar on rank 0."""
    generator = torch.Generator().manual_seed(options.seed)
    bar = tqdm(range(options.steps), desc="train", unit="step", disable=pipe.rank != 0, mininterval=1.0)
    for step in bar:
        drawn = torch.randint(len(labels), (options.batch_size,), generator=generator)
        result = pipe.step(pictures[drawn], labels[drawn])
        if step % 20 == 19:
            bar.set_postfix(loss=f"{float(result.loss):.3f}", refresh=False)
    session.compare(pipe, expected)
    pipe.drain()


def main() -> None:
    parser = session.option_parser("Trains a small residual network on scikit-learn's digits.")
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    options = session.read_options(parser)
    pictures, labels, test_pictures, test_labels = read_digits()

    session.join_processes()
    torch.manual_seed(options.seed)
    model = ResidualNetwork(options.width)
    sample = (pictures[: options.batch_size // options.microbatches],)
    pipe, expected = session.build(model, sample, F.cross_entropy, options)
    train(pipe, pictures, labels, expected, options)
    for name, shown, wanted in (("training", pictures, labels), ("test", test_pictures, test_labels)):
        loss = float(pipe.evaluate(shown, wanted).loss)
        session.say(f"{name} set: loss {loss:.3f}, accuracy {accuracy(pipe, shown, wanted):.1%}")


if __name__ == "__main__":
    main()
