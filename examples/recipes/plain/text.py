"""Trains a small GPT on Python's own sources, letter by letter."""

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
CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        heads = self.joined(self.first(x)).view(*x.shape[:2], 3, 4, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, 256)
        x = self.letters(tokens) + self.places(torch.arange(CONTEXT, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
starts = torch.randint(len(text) - CONTEXT, (options.steps, 16), generator=torch.Generator().manual_seed(1))
rows = text[starts[..., None] + torch.arange(CONTEXT + 1)]

torch.manual_seed(0)
model = GPT(options.width).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in rows:
    begun = time.perf_counter()
    loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
