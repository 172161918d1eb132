"""What records work of a device, so that the host can have it done again by one call.

A recording has the device do the same operations on the same memory: what it reads is put there before, and what it
makes lies there until it is done again. Which memory may be overwritten when is decided where recordings are used,
which is tested with a recorder that the CPU stands in for; here is only what cannot run without a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["GRAPH_CAPTURERS", "CudaGraphCapturer", "GraphCapturer", "Pool", "Work"]

Pool: TypeAlias = Any
"""Memory that recordings take theirs from."""
Work: TypeAlias = Callable[[], Sequence[Tensor]]
"""Makes tensors on the device, and reads nothing on the host."""


class GraphCapturer(Protocol):
    """Records work of one device."""

    def aside(self) -> AbstractContextManager[None]:
        """Where work runs before it is recorded, so that nothing is compiled or chosen while it is. After all that this
        thread did before, and before all that follows.
        """

    def pool(self) -> Pool:
        """New memory. Recordings that share it overwrite what the others keep there for themselves."""

    def record(self, work: Work, pool: Pool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """What `work` returns, whose numbers come when it is done again; and what does it again, in the stream that
        the thread is in then.
        """


class CudaGraphCapturer:
    """CUDA graphs, through ``torch.cuda``.

    Not by ``torch.cuda.make_graphed_callables``. It waits for the whole device, and so for messages that NCCL is yet to
    receive from a peer that may wait for this rank; it forbids threads beside this one what they do for messages; and
    it gives the gradients of weights in memory of the graph, which autograd takes for ``.grad`` as it is, so that the
    next microbatch overwrites them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Libraries keep memory for each stream that they work on. On a stream that nothing else works on they take it
        # while work is recorded, from its pool, which nobody empties for them.
        self._warming, self._recording = (
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        )

    def aside(self) -> AbstractContextManager[None]:
        return self._on(self._warming)

    def pool(self) -> Pool:
        return torch.cuda.graph_pool_handle()

    def record(self, work: Work, pool: Pool) -> tuple[Sequence[Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with self._on(self._recording):
            # Only this thread is held to what can be recorded: those that carry messages go on.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = work()
            except BaseException:
                # Ending what is broken is an error, too, that says less.
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


GRAPH_CAPTURERS: dict[str, Callable[[torch.device], GraphCapturer]] = {"cuda": CudaGraphCapturer}
"""By the type of a device."""
