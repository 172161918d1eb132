"""Pipelines in the processes of the pool that send as GPUs do: through the host, or from device to device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, permutations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError
from penstock.runtime.transport.transport import Channel, Edge
from penstock.runtime.transport.worlds import join_world
from support.simulated import tardy_backend
from support.simulated.stream_races import RacingDevice, on_streams
from support.training import Outcome
from support.trainings import Training, run_training
from support.transport_selection import sharing_memory


@contextmanager
def _on_device(tardy: bool = False) -> Iterator[None]:
    """Makes the CPU a device with streams, which sends from device to device if it is `tardy`."""
    with sharing_memory(False), on_streams(RacingDevice(tardy)):
        yield


def run_on_device(training: Training, tardy: bool) -> tuple[list[Outcome], int]:
    """With messages through the host, or from device to device. Also returns how many of these this rank sent."""
    before = tardy_backend.messages()
    with _on_device(tardy):
        return run_training(training, ""), tardy_backend.messages() - before


def count_streams(tardy: bool) -> int:
    """The number of streams that a rank takes if it sends to all others, and sums with all and with each."""
    ranks = dist.get_world_size()
    edges = [
        Edge(*pair, channel) for channel in (Channel.STAGES, Channel.REPORTS) for pair in permutations(range(ranks), 2)
    ]
    groups = [tuple(range(ranks)), *combinations(range(ranks), 2)]
    device = RacingDevice(tardy)
    with sharing_memory(False), on_streams(device):
        transport = join_world().connect(edges, torch.device("cpu"), 60.0, groups)
        for edge in edges:
            if dist.get_rank() == edge.source:
                transport.send(edge, "kind", (torch.ones(3),))
        for edge in edges:
            if dist.get_rank() == edge.target:
                transport.post(edge, "kind").wait()
        transport.close()
    return len(device.streams)


def probe_directly() -> tuple[penstock.Cluster, int]:
    """The result of a probe from device to device, and its number of messages."""
    before = tardy_backend.messages()
    with _on_device(tardy=True):
        return penstock.probe(device="cpu", progress=False), tardy_backend.messages() - before


def _train(failing: int, wrong: float, timeout_seconds: float) -> str:
    """Trains with another rank, whose layer goes wrong in the second step: it raises, or takes `wrong` seconds. Returns
    this rank's error.
    """
    calls = 0

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += dist.get_rank() == failing and not torch.compiler.is_exporting()
            if calls == 7:
                calls += 1
                time.sleep(wrong)
                if not wrong:
                    raise ValueError("the layer is broken")
            return super().forward(x)

    torch.manual_seed(0)
    layers = [Layer(4, 4), Layer(4, 4)]
    with _on_device(tardy=True):
        try:
            pipe = penstock.Pipeline(
                nn.Sequential(*layers),
                sample=(torch.randn(2, 4),),
                loss_fn=F.mse_loss,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                microbatches=4,
                timeout_seconds=timeout_seconds,
                # It would run into the broken layer, and go on.
                check="off",
            )
            for _ in range(6):
                float(pipe.step(torch.randn(8, 4), torch.randn(8, 4)).loss)
        except (PenstockError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing went wrong"


def fail_directly(failing: int) -> str:
    """The error of this rank when the layer of `failing` raises."""
    return _train(failing, 0.0, 60.0)


def stall_directly(failing: int) -> str:
    """The error of this rank when the layer of `failing` takes longer than the other rank waits."""
    return _train(failing, 16.0, 12.0)
