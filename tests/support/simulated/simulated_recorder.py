"""A recorder of work for the CPU: what it records is done again in the same memory, as CUDA graphs do it.

Doing work again runs its code again, and then writes what it returns into the tensors that it returned first. Before
that nothing can be read in them, and afterwards an earlier result that nobody has used is lost.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.devices.graph_capture import GRAPH_CAPTURERS, Pool, Work

__all__ = ["GRAPHED", "SimulatedRecorder", "recording"]

GRAPHED = {"mode": "reduce-overhead", "backend": "aot_eager"}
"""For `compile=`: with the numbers of autograd."""


@dataclass(eq=False)
class SimulatedRecorder:
    """A `GraphCapturer`."""

    warm_ups: int = 0
    """How often something ran aside, however many times in a row."""
    recordings: int = 0
    replays: int = 0

    def aside(self) -> AbstractContextManager[None]:
        self.warm_ups += 1
        return nullcontext()

    def pool(self) -> Pool:
        return None

    def record(self, work: Work, pool: Pool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        self.recordings += 1
        results = work()
        for result in results:
            # Autograd may have saved it; what it saved is not what is lost.
            result.data = torch.full_like(result, float("nan") if result.is_floating_point() else 1)

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for result, new in zip(results, work(), strict=True):
                    result.data.copy_(new)

        return results, replay


@contextmanager
def recording() -> Iterator[list[SimulatedRecorder]]:
    """In its body the CPU has recorders: those that have been made."""
    made: list[SimulatedRecorder] = []

    def make(device: torch.device) -> SimulatedRecorder:
        made.append(SimulatedRecorder())
        return made[-1]

    GRAPH_CAPTURERS["cpu"] = make
    try:
        yield made
    finally:
        del GRAPH_CAPTURERS["cpu"]
