"""Classifies scikit-learn's pictures of digits by a residual network with group normalization."""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=32)
options = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C, H, W)
        return F.relu(x + self.inner(x))


class Classifier(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, pictures: Tensor) -> Tensor:  # (B, 1, 8, 8) -> (B, 10)
        x = self.stem(pictures)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


digits = load_digits()
pictures = torch.tensor(digits.images)[:, None] / 16 - 0.5
labels = torch.tensor(digits.target)
drawn = torch.randint(len(labels), (options.steps, 32), generator=torch.Generator().manual_seed(1))

torch.manual_seed(0)
model = Classifier(options.width).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in drawn:
    begun = time.perf_counter()
    loss = F.cross_entropy(model(pictures[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
