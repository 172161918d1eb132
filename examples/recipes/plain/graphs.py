"""Trains a graph neural network to find how many triangles a random graph has."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:  # (B, N, C), (B, N, N) -> (B, N, C)
        return nodes + F.relu(self.norm(self.own(nodes) + edges @ self.others(nodes)))


class GraphNetwork(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(1, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(6))
        self.head = nn.Linear(width, 1)

    def forward(self, edges: Tensor) -> Tensor:  # (B, N, N) -> (B,)
        nodes = self.enter(edges.sum(-1, keepdim=True))
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.head(nodes.mean(1)).squeeze(-1)


generator = torch.Generator().manual_seed(1)
upper = torch.rand(options.steps, 32, 24, 24, dtype=torch.float64, generator=generator).lt(0.2).double().triu(1)
edges = upper + upper.mT
triangles = (edges @ edges @ edges).diagonal(dim1=-2, dim2=-1).sum(-1) / 60

torch.manual_seed(0)
model = GraphNetwork(options.width).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for x, y in zip(edges, triangles, strict=True):
    begun = time.perf_counter()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
