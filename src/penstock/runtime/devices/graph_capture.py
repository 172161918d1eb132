"""Captures work of a device as a graph, so that one call of the host replays it.

A replay repeats the same operations on the same memory: its inputs are copied there first, and its outputs stay there
until the next replay. This file holds what needs a real GPU. When memory may be overwritten is decided by the callers,
which are tested with a capturer that simulates graphs on the CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["GRAPH_CAPTURERS", "GraphCapturer", "GraphPool", "GraphWork"]

GraphPool: TypeAlias = Any
"""A memory pool that captured graphs allocate from."""
GraphWork: TypeAlias = Callable[[], Sequence[Tensor]]
"""Work to capture: launches work on the device, returns the tensors that it makes, and must not synchronize."""


class GraphCapturer(Protocol):
    """Captures the work of one device."""

    def warm_up(self) -> AbstractContextManager[None]:
        """Returns a context manager for runs of the work before its capture, so that nothing is compiled or selected
        during the capture. The runs are ordered after all earlier work of this thread, and before all later work.
        """

    def pool(self) -> GraphPool:
        """Makes a new memory pool. Graphs that share a pool overwrite each other's internal memory."""

    def capture(self, work: GraphWork, pool: GraphPool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Captures `work`. Returns its outputs, which hold numbers after a replay, and a function that replays it in
        the current stream of the thread.
        """


class _CudaGraphCapturer:
    """Captures CUDA graphs, through ``torch.cuda``.

    It does not use ``torch.cuda.make_graphed_callables``, for three reasons. That function synchronizes the whole
    device, and so waits for pending NCCL receives from a peer that may itself wait for this rank. It forbids other
    threads the CUDA calls that messages need. And it returns the gradients of weights in the graph's own memory, which
    autograd uses as ``.grad`` without a copy, so that the next microbatch overwrites them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Libraries allocate a workspace for each stream that they run on. On a stream that is used for nothing else,
        # this happens during the capture and from the graph's pool, which is never emptied.
        self._warming, self._capturing = (
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        )

    def warm_up(self) -> AbstractContextManager[None]:
        return self._on(self._warming)

    def pool(self) -> GraphPool:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: GraphWork, pool: GraphPool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with self._on(self._capturing):
            # With this mode the restrictions of a capture hold only for this thread. Threads that carry messages
            # continue.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = work()
            except BaseException:
                # Ending a broken capture raises as well, with a less informative error.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return results, graph.replay

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


GRAPH_CAPTURERS: dict[str, Callable[[torch.device], GraphCapturer]] = {"cuda": _CudaGraphCapturer}
"""Constructors of graph capturers, by device type."""
