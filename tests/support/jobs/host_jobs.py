"""Jobs for processes that are on hosts of their own."""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.torch_internals.distributed import INTERFACE
from penstock.values import Cluster


def _pipeline(timeout_seconds: float = 60.0) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.float64) for _ in range(4)))
    return penstock.Pipeline(
        model,
        (torch.ones(2, 16, dtype=torch.float64),),
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule="1f1b-flush",
        stages=2,
        microbatches=4,
        timeout_seconds=timeout_seconds,
    )


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, target = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return inputs, target


def train(steps: int = 3) -> tuple[list[float], int, str]:
    """The losses of some steps, the bytes that this host has sent, and the interface of Gloo."""
    pipe = _pipeline()
    losses = [float(pipe.step(*_batch()).loss) for _ in range(steps)]
    pipe.close()
    return losses, _sent_bytes(), os.environ.get(INTERFACE, "")


def train_until_the_link_ends(folder: str, timeout_seconds: float) -> str:
    """Trains until an error, and returns it. Rank 0 writes a file when the first steps are done."""
    pipe = _pipeline(timeout_seconds)
    try:
        for step in range(100_000):
            float(pipe.step(*_batch()).loss)
            if step == 2:
                Path(folder, f"begun-{os.environ['RANK']}").touch()
            time.sleep(0.01)
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def probe_links() -> Cluster:
    """What this rank's probe finds."""
    return penstock.probe(progress=False)


def _sent_bytes() -> int:
    """What has left this host by its link."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "link0":
            return int(numbers.split()[8])
    return 0
