# %% [markdown]
# # Stale weights, and what to do about them
#
# `2bw` and `pipedream` never let the pipe run empty: there is no bubble, and gradients are taken at older weights
# than those that they change. `reference_train` computes what a schedule makes of a training, in one process and
# without a pipeline.

# %%
import torch
import torch.nn.functional as F
from torch import nn

import penstock


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2))


inputs = torch.randn(40, 32, 8, generator=torch.Generator().manual_seed(1))
batches = [(x, (x[:, 0] > 0).long()) for x in inputs]


def train(schedule, rate, hooks=()):
    result = penstock.reference_train(
        make_model(),
        batches,
        sample=(batches[0][0][:8],),
        loss_fn=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=rate, momentum=0.9),
        schedule=schedule,
        microbatches=4,
        stages=4,
        update_hooks=list(hooks),
    )
    return sum(map(float, result.losses[-10:])) / 10


# %% [markdown]
# The mean loss of the last ten steps. The higher the rate of learning, the more a delay of one update costs;
# `WeightPrediction` lets forwards read where the weights will be when the gradient comes back, and wins a part of it
# again.

# %%
for rate in (0.05, 0.2):
    fresh, stale = train("1f1b-flush", rate), train("2bw", rate)
    predicted = train("2bw", rate, [penstock.WeightPrediction()])
    print(f"rate {rate}: fresh {fresh:.3f}, 2bw {stale:.3f}, 2bw with prediction {predicted:.3f}")

# %% [markdown]
# A lower rate, a warm-up and an average of the weights help, too. If the numbers have to be those of one device, take
# a schedule that flushes.
