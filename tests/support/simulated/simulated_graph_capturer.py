"""A graph capturer for the CPU, whose replays use the same memory again, as CUDA graphs do.

A replay runs the captured code again, and then writes its results into the tensors that the capture returned. Before
the first replay these hold no usable values, and each replay overwrites results that have not been used.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.devices.graph_capture import GRAPH_CAPTURERS, GraphPool, GraphWork

__all__ = ["GRAPHED", "SimulatedGraphCapturer", "simulated_graph_capture"]

GRAPHED = {"mode": "reduce-overhead", "backend": "aot_eager"}
"""Values of `compile=` that give the numbers of autograd."""


@dataclass(eq=False)
class SimulatedGraphCapturer:
    """A `GraphCapturer`."""

    warm_ups: int = 0
    """How often something ran in `warm_up`, however many times in a row."""
    captures: int = 0
    replays: int = 0

    def warm_up(self) -> AbstractContextManager[None]:
        self.warm_ups += 1
        return nullcontext()

    def pool(self) -> GraphPool:
        return None

    def capture(self, work: GraphWork, pool: GraphPool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        self.captures += 1
        results = work()
        for result in results:
            # Autograd may have saved the result; its saved values are not what is lost.
            result.data = torch.full_like(result, float("nan") if result.is_floating_point() else 1)

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for result, new in zip(results, work(), strict=True):
                    result.data.copy_(new)

        return results, replay


@contextmanager
def simulated_graph_capture() -> Iterator[list[SimulatedGraphCapturer]]:
    """Gives the CPU a graph capturer for the duration of a block. Yields the capturers that have been made."""
    made: list[SimulatedGraphCapturer] = []

    def make(device: torch.device) -> SimulatedGraphCapturer:
        made.append(SimulatedGraphCapturer())
        return made[-1]

    GRAPH_CAPTURERS["cpu"] = make
    try:
        yield made
    finally:
        del GRAPH_CAPTURERS["cpu"]
