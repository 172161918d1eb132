"""Finetunes the adapters (LoRA, by peft) of a diffusion transformer on scikit-learn's pictures of digits."""

import argparse
import time

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from sklearn.datasets import load_digits
from torch import Tensor, nn

import penstock

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()


class Block(nn.Module):
    """A transformer block whose norms are scaled and shifted by the time of the noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.changes = nn.Linear(width, 4 * width)
        self.joined, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, moment: Tensor) -> Tensor:  # (B, T, C), (B, C) -> (B, T, C)
        scale, shift, again, shift_again = self.changes(moment)[:, None].chunk(4, dim=-1)
        heads = self.joined(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift).view(*x.shape[:2], 3, 4, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        x = x + self.projection(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + again) + shift_again)


class DiffusionTransformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.places, self.moment = nn.Linear(4, width), nn.Embedding(16, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.leave = nn.Linear(width, 4)

    def forward(self, patches: Tensor, time_of_noise: Tensor) -> Tensor:  # (B, 16, 4), (B, 1) -> (B, 16, 4)
        moment = F.silu(self.moment(time_of_noise))
        x = self.enter(patches) + self.places.weight
        for block in self.blocks:
            x = block(x, moment)
        return self.leave(x)


generator = torch.Generator().manual_seed(1)
pictures = torch.tensor(load_digits().images).unfold(1, 2, 2).unfold(2, 2, 2).flatten(1, 2).flatten(2) / 8 - 1
drawn = pictures[torch.randint(len(pictures), (options.steps, 32), generator=generator)]
noises = torch.randn(drawn.shape, dtype=torch.float64, generator=generator)
times = torch.rand(options.steps, 32, 1, dtype=torch.float64, generator=generator)
noisy = (1 - times[..., None]) * drawn + times[..., None] * noises

torch.manual_seed(0)
model = inject_adapter_in_model(
    LoraConfig(r=8, target_modules=["joined", "projection"]), DiffusionTransformer(options.width)
)
model = model.double()
pipe = penstock.Pipeline(
    model, (noisy[0, :8], times[0, :8]), F.mse_loss, lambda params: torch.optim.AdamW(params, lr=1e-2), microbatches=4
)
for x, t, y in zip(noisy, times, noises - drawn, strict=True):
    begun = time.perf_counter()
    loss = pipe.step((x, t), y).loss
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
