"""Jobs on batches for the processes of the pool."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

import penstock
from penstock.data import Batches, loader, shapes_of
from support import models

__all__ = ["make_batches", "train_where_read"]


def make_batches(reads: bool) -> Batches:
    """Batches of 12 samples, and a last one of fewer."""
    batches = models.LAYERED.batches
    dataset = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    return loader(dataset, 12, shuffle=True, seed=1, reads=reads)


def train_where_read(schedule: str) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """Two epochs in which the first rank has the inputs, the last one the target, and the others shapes."""
    subject, rank, last = models.LAYERED, dist.get_rank(), dist.get_world_size() - 1
    pipe = penstock.Pipeline(
        subject.build(),
        sample=subject.sample,
        loss_fn=subject.loss_fn,
        optimizer=models.momentum,
        schedule=schedule,
        microbatches=3,
    )
    batches = make_batches(reads=rank in (0, last))
    losses = []
    for _ in range(2):
        for x, y in batches:
            losses.append(pipe.step(x if rank == 0 else shapes_of(x), y if rank == last else None).loss)
    pipe.drain()
    state = pipe.state_dict()["model"]
    pipe.close()
    return tuple(float(loss) for loss in losses), state
