"""Trains a small GPT on Python's own sources by the Trainer of Lightning."""

import argparse
import time
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
starts = torch.randint(len(text) - 64, (options.steps, 16), generator=torch.Generator().manual_seed(1))
rows = text[starts[..., None] + torch.arange(65)]
loader = torch.utils.data.DataLoader([(batch[:, :-1], batch[:, 1:]) for batch in rows], batch_size=None)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        heads = self.joined(self.first(x)).view(*x.shape[:2], 3, 4, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def loss_of(scores, target):
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Plain(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        loss = loss_of(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class PrintLosses(lightning.Callback):
    begun = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        loss = float(trainer.callback_metrics["loss"])
        print(f"loss {loss:.9f}, {time.perf_counter() - self.begun:.3f} s", flush=True)
        self.begun = time.perf_counter()


torch.manual_seed(0)
blocks = [Block(options.width) for _ in range(4)]
model = nn.Sequential(nn.Embedding(256, options.width), *blocks, nn.Linear(options.width, 256)).double()
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    log_every_n_steps=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[PrintLosses()],
)
trainer.fit(Plain(model), loader)
