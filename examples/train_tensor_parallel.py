"""Trains a small transformer whose pipeline stages are split over several processes by PyTorch's own parallelism.

Two stages of two processes each, with the heads and hidden units of a block split over both (tensor parallelism),

    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py

or with its weights sharded over two replicas of the stage (FSDP2):

    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py --sharded

The losses are those of a single process: ``python examples/train_tensor_parallel.py``.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock

LETTERS, LENGTH, WIDTH, HEADS = 26, 16, 64, 4


class Block(nn.Module):
    """Attention and a two-layer perceptron. Head sizes are fixed and their number is not: a process may hold some."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        seen = self.norm(x)
        wide = [part(seen) for part in (self.query, self.key, self.value)]
        query, key, value = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in wide)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


def split(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Megatron's layers: columns, then rows. The output of a block is whole on every process."""
    styles = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    styles |= {name: RowwiseParallel() for name in ("out", "down")}  # type: ignore[misc]
    for layer in stage.layers:  # layer.body is the model's own module
        if isinstance(layer.body, Block):
            parallelize_module(layer.body, mesh["tp"], styles)  # type: ignore[arg-type]


def shard(stage: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2: every replica of the stage holds a shard of the weights and gathers those of a block when it runs."""
    for layer in stage.layers:
        if isinstance(layer.body, Block):  # the pipeline sums the gradients of parameters that are not sharded
            fully_shard(layer.body, mesh=mesh["dp"])


def main() -> None:
    """Trains and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharded", action="store_true", help="two replicas that share their weights")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)  # every process builds the same model and reads the same batches
    model = nn.Sequential(
        nn.Embedding(LETTERS, WIDTH),
        *(Block() for _ in range(4)),
        nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * WIDTH, LETTERS)),
    )
    batches = torch.randint(LETTERS, (options.steps, 32, LENGTH))  # the task: name the third letter
    together = "RANK" in os.environ
    stages = [penstock.Stage(0, 3, (0, 1)), penstock.Stage(3, 7, (2, 3))]
    alone = penstock.Plan.of_cuts((0, 3, 7), 2, microbatches=4)
    tensor_parallel = 1 if options.sharded else 2
    pipe = penstock.Pipeline(
        model,
        sample=(batches[0, :8],),
        loss_fn=F.cross_entropy,
        # Some parameters are DTensors and some are not: PyTorch cannot step both at once, as it would on a GPU.
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, foreach=False),
        plan=penstock.Plan(tuple(stages), microbatches=4, tensor_parallel=tensor_parallel) if together else alone,
        parallelize=(shard if options.sharded else split) if together else None,
    )
    for step, x in enumerate(batches):
        loss = float(pipe.step(x, x[:, 2]).loss)
        if pipe.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    pipe.drain()


if __name__ == "__main__":
    main()
