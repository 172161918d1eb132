# %% [markdown]
# # A first pipeline
#
# A model that fits on one device, trained by a plain loop, and then by a pipeline of four stages in this same
# process. In one process the stages take turns: the numbers are those of four devices, the time is not.

# %%
import torch
import torch.nn.functional as F
from torch import nn

import penstock


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)), nn.Linear(32, 4)
    )


inputs = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(1))
batches = [(x, x[:, :4].argmax(-1)) for x in inputs]

# %% [markdown]
# The plain loop:

# %%
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
plain = []
for x, y in batches:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    plain.append(loss.item())

# %% [markdown]
# The pipeline takes the model, example inputs of one microbatch, the loss and what makes an optimizer. A batch of 32
# is cut into 8 microbatches of 4 samples.

# %%
pipe = penstock.Pipeline(
    make_model(),
    sample=(batches[0][0][:4],),
    loss_fn=F.cross_entropy,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    microbatches=8,
    stages=4,
)
losses = [float(pipe.step(x, y).loss) for x, y in batches]
for before, after in zip(plain, losses, strict=True):
    print(f"plain {before:.6f}  pipeline {after:.6f}")

# %% [markdown]
# The order in which the four ranks compute forwards (`F`) and backwards (`B`) of the microbatches:

# %%
print(penstock.render(pipe.schedule))
