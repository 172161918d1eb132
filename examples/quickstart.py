import torch
import torch.nn.functional as F
from torch import nn

import penstock

torch.manual_seed(0)  # every process builds the same model and reads the same batches
model = nn.Sequential(
    nn.Embedding(26, 64),
    *(nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, batch_first=True) for _ in range(4)),
    nn.Sequential(nn.Flatten(), nn.Linear(16 * 64, 26)),
)
batches = torch.randint(26, (60, 32, 16))  # 60 minibatches of 32 texts of 16 letters; the task: name the third

pipe = penstock.Pipeline(
    model,  # any nn.Module, whole and identical on every process
    sample=(batches[0, :8],),  # example inputs of one microbatch
    loss_fn=F.cross_entropy,  # (output, target) -> mean over the microbatch's samples
    optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    microbatches=4,
    stages=4,  # of about equal work; when left out: one for each process
)
if pipe.rank == 0:
    print(penstock.render(pipe.schedule))
for x in batches:
    result = pipe.step(x, x[:, 2])  # one training step: forward, backward, update
    loss = float(result.loss)  # valid on every process
if pipe.rank == 0:
    print(f"loss of the last minibatch: {loss:.3f}")
