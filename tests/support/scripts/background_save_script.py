"""A rank that saves without waiting and then ends: by itself ("ends"), or on rank 1 by an error ("fails").

Arguments: the directory to save to, and how it ends.
"""

import sys

import torch
from torch import nn

import penstock

directory, end = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
x, y = torch.randn(8, 256), torch.randn(8, 256)
pipe = penstock.Pipeline(
    model,
    sample=(x[:2],),
    loss_fn=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    schedule="1f1b-flush" if end == "ends" else "pipedream",
    microbatches=4 if end == "ends" else 1,
    timeout_seconds=60,
)
for _ in range(3):
    pipe.step(x, y)
pipe.save(directory, wait=False)
if end == "fails":
    if pipe.rank == 1:
        raise SystemError("this rank fails")
    for _ in range(100):
        pipe.step(x, y)
