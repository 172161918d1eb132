"""Profiles of layers that tensor-parallel processes share, and the plans that are made from them."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock
from penstock.capturing.chain import StageModule
from penstock.planning import plan
from penstock.values import Cluster, Plan, Profile
from support.processes import Pool
from support.training import train_by_loop

NUMBER = 8
"""Bytes of a number of type float64."""


WIDTH, BLOCKS, SAMPLES = 16, 3, 8


class _Block(nn.Module):
    """Two products, whose inner dimension the processes share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 4 * WIDTH)
        self.shrink = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(torch.relu(self.grow(self.norm(x))))


def _spread(stage: StageModule, mesh: DeviceMesh) -> None:
    for block in stage.blocks.values():
        parallelize_module(block, mesh["tp"], {"grow": ColwiseParallel(), "shrink": RowwiseParallel()})


def _options() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": nn.Sequential(*(_Block() for _ in range(BLOCKS))).double(),
        "sample": (torch.randn(SAMPLES, WIDTH, dtype=torch.float64),),
        "loss_fn": F.mse_loss,
        "optimizer": _plain,
    }


def _plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def measure_spread_layers() -> tuple[Profile, Profile]:
    """The profile of the layers on all processes, and that of the layers on this one alone."""
    processes = dist.get_world_size()
    spread: dict[str, Any] = {"stages": 1, "microbatches": 1, "tensor_parallel": processes, "parallelize": _spread}
    with penstock.Pipeline(**_options(), **spread) as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
        shared = pipe.measure(iterations=3)
        after = pipe.state_dict()["model"]
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    options = _options()
    return shared, penstock.profile(options["model"], options["sample"], iterations=3)


def train_with_the_chosen_plan(memory_bytes: float, steps: int) -> tuple[Plan, list[float], dict[str, Tensor]]:
    """Plans with both profiles of rank 0 for devices with little memory, and trains; the losses and the weights."""
    both: list[Any] = [measure_spread_layers()]
    dist.broadcast_object_list(both)
    shared, single = both[0]
    chosen = plan([single, shared], Cluster.uniform(dist.get_world_size(), 1e9, memory_bytes), microbatches=1)
    torch.manual_seed(1)
    batches = [torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64) for _ in range(steps)]
    with penstock.Pipeline(**_options(), plan=chosen, parallelize=_spread) as pipe:
        losses = [float(pipe.step(inputs, targets).loss) for inputs, targets in batches]
        return chosen, losses, dict(pipe.state_dict()["model"])


def train_alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """A plain loop over the same batches."""
    torch.manual_seed(1)
    batches = [tuple(torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64)) for _ in range(steps)]
    found = train_by_loop(_options()["model"], batches, F.mse_loss, _plain)
    return list(found.losses), found.state


def test_a_process_holds_its_part_of_every_layer(pool: Pool) -> None:
    """The inner dimension is halved, in the weights of both products and in the first bias."""
    halved, kept = 2 * 4 * WIDTH * WIDTH + 4 * WIDTH, 3 * WIDTH
    for shared, single in pool.run(2, measure_spread_layers):
        assert (shared.tensor_parallel, single.tensor_parallel) == (2, 1)
        assert len(shared.layers) == len(single.layers) == BLOCKS
        for part, whole in zip(shared.layers, single.layers, strict=True):
            assert part.name == whole.name
            assert part.forward_seconds > 0
            assert part.backward_seconds > 0
            assert whole.parameter_bytes == NUMBER * (halved + kept)
            assert part.parameter_bytes == NUMBER * (halved / 2 + kept)
            assert part.cut_bytes == whole.cut_bytes
            # The activations of the inner dimension are halved as well.
            assert part.saved_bytes < whole.saved_bytes
            assert part.workspace_bytes < whole.workspace_bytes


def test_a_plan_of_both_profiles_trains_with_tensor_parallelism(pool: Pool) -> None:
    """A block needs 69 kB, of which a quarter are weights: a device holds less than two, or half of three."""
    outcomes = pool.run(2, train_with_the_chosen_plan, 132e3, 3)
    losses, state = train_alone(3)

    for chosen, found, weights in outcomes:
        assert chosen.tensor_parallel == 2
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        for name, tensor in state.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-10, atol=1e-12)
