"""Pipelines in the processes of the pool that send as GPUs do: through the host, or from device to device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
import tardy_backend
from carrying import sharing_memory
from penstock.errors import PenstockError
from stream_races import RacingDevice, on_streams
from training import Case, Outcome, run_pipeline

__all__ = ["fail_directly", "probe_directly", "run_directly", "run_over_gloo", "stall_directly"]


@contextmanager
def _on_device(backend: str = "") -> Iterator[None]:
    """The CPU computes on streams and sends by `backend`."""
    with sharing_memory(False), on_streams(RacingDevice(backend)):
        yield


def run_over_gloo(case: Case) -> Outcome:
    """The run by `Pipeline`, whose messages pass through the host."""
    with _on_device():
        return run_pipeline(case)


def run_directly(case: Case) -> tuple[Outcome, int]:
    """The run by `Pipeline`, whose messages go from device to device, and how many of them this rank sent."""
    tardy_backend.register()
    before = tardy_backend.messages()
    with _on_device(tardy_backend.BACKEND):
        return run_pipeline(case), tardy_backend.messages() - before


def probe_directly() -> tuple[penstock.Cluster, int]:
    """What a probe finds from device to device, and how many messages it took."""
    tardy_backend.register()
    before = tardy_backend.messages()
    with _on_device(tardy_backend.BACKEND):
        return penstock.probe(device="cpu", progress=False), tardy_backend.messages() - before


def _train(failing: int, wrong: float, timeout_seconds: float) -> str:
    """What a rank says that trains with another one, whose loss or layer goes wrong in the second step: fails, or
    takes `wrong` seconds.
    """
    calls = 0

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += torch.distributed.get_rank() == failing and not torch.compiler.is_exporting()
            if calls == 7:
                calls += 1
                time.sleep(wrong)
                if not wrong:
                    raise ValueError("the layer is broken")
            return super().forward(x)

    tardy_backend.register()
    torch.manual_seed(0)
    layers = [Layer(4, 4), Layer(4, 4)]
    with _on_device(tardy_backend.BACKEND):
        try:
            pipe = penstock.Pipeline(
                nn.Sequential(*layers),
                sample=(torch.randn(2, 4),),
                loss_fn=F.mse_loss,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                microbatches=4,
                timeout_seconds=timeout_seconds,
            )
            for _ in range(6):
                float(pipe.step(torch.randn(8, 4), torch.randn(8, 4)).loss)
        except (PenstockError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing went wrong"


def fail_directly(failing: int) -> str:
    """What this rank says when the layer of `failing` raises an error."""
    return _train(failing, 0.0, 60.0)


def stall_directly(failing: int) -> str:
    """What this rank says when the layer of `failing` takes longer than the other one waits."""
    return _train(failing, 7.0, 3.0)
