"""Trains a mixture of experts: each letter goes to two of four experts, which its router chooses."""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()


class Experts(nn.Module):
    """Computes with all experts and takes two of the results, so that no shape depends on values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        normed = self.norm(x)
        scores = self.router(normed)
        best, chosen = scores.topk(2)
        shares = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        results = torch.stack([expert(normed) for expert in self.experts], dim=-1)
        return x + (results @ shares[..., None]).squeeze(-1)


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, width)
        self.memory = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(3))
        self.blocks = nn.ModuleList(Experts(width) for _ in range(3))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, 256)
        x = self.letters(tokens)
        for memory, block in zip(self.memory, self.blocks, strict=True):
            x = block(memory(x)[0])
        return self.head(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
starts = torch.randint(len(text) - 32, (options.steps, 16), generator=torch.Generator().manual_seed(1))
rows = text[starts[..., None] + torch.arange(33)]

torch.manual_seed(0)
model = Mixture(options.width).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in rows:
    begun = time.perf_counter()
    loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
