"""What calls of CUDA cost the host, in microseconds: ``python benchmarks/gpu_probe/costs.py --found FILE``.

The device is idle before each batch of calls, so that the host never waits for a place in a queue. Of the batches the
median counts.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from gpu_probe.probe import Notes, parser_of

__all__: list[str] = []

BATCHES, CALLS = 25, 40
MANY = 300
"""As many tensors as a model of medium size has parameters."""


def microseconds(call: Callable[[], object], calls: int = CALLS, batches: int = BATCHES) -> tuple[float, float]:
    """The microseconds of a call: the median over batches, and the least."""
    for _ in range(3):
        call()
    found = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found), min(found)


def note_cost(notes: Notes, name: str, call: Callable[[], object], calls: int = CALLS, batches: int = BATCHES) -> None:
    """Measures `call` and notes what it costs, or why it cannot be called."""
    try:
        median, least = microseconds(call, calls, batches)
    except RuntimeError as error:
        notes.add("cost", name=name, reason=str(error).partition("\n")[0])
    else:
        notes.add("cost", name=name, microseconds=round(median, 2), least_microseconds=round(least, 2))


def note_events_and_streams(notes: Notes) -> None:
    """What Penstock calls once or more for each action."""
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.cuda.Event()
    timing = torch.cuda.Event(enable_timing=True)
    timing.record()

    def enter() -> None:
        with torch.cuda.stream(other):
            pass

    note_cost(notes, "nothing", lambda: None)
    note_cost(notes, "event made, recorded", lambda: torch.cuda.Event().record(stream))
    note_cost(notes, "timing event made, recorded", lambda: torch.cuda.Event(enable_timing=True).record(stream))
    note_cost(notes, "event recorded again", lambda: event.record(stream))
    note_cost(notes, "timing event recorded again", lambda: timing.record(stream))
    note_cost(notes, "event queried", event.query)
    note_cost(notes, "stream waits for event", lambda: other.wait_event(event))
    note_cost(notes, "current stream", torch.cuda.current_stream)
    note_cost(notes, "stream entered, left", enter)
    note_cost(notes, "stream of the pool", torch.cuda.Stream)


def note_kernels(notes: Notes) -> None:
    """One launch, many, and as many tensors in few launches."""
    tiny = torch.zeros(8, device="cuda")
    tensors = [torch.zeros(64, device="cuda") for _ in range(MANY)]
    scale = torch.ones((), device="cuda")

    def each(work: Callable[[torch.Tensor], object]) -> Callable[[], None]:
        def call() -> None:
            for tensor in tensors:
                work(tensor)

        return call

    note_cost(notes, "kernel (add_)", lambda: tiny.add_(1))
    note_cost(notes, f"{MANY} add_", each(lambda tensor: tensor.add_(1)), 1)
    note_cost(notes, "_foreach_add_", lambda: torch._foreach_add_(tensors, 1), 1)
    note_cost(notes, f"{MANY} mul_ by a tensor", each(lambda tensor: tensor.mul_(scale)), 1)
    note_cost(notes, "_foreach_mul_ by a tensor", lambda: torch._foreach_mul_(tensors, scale), 1)
    note_cost(notes, f"{MANY} norms", each(lambda tensor: torch.linalg.vector_norm(tensor)), 1)
    note_cost(notes, "_foreach_norm", lambda: torch._foreach_norm(tensors), 1)


def note_memory(notes: Notes) -> None:
    """Host memory that the device can read, new and out of PyTorch's cache."""
    kept: list[torch.Tensor] = []

    def keep(size: int) -> None:
        kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))

    for kilobytes in (4, 1024, 16384):
        size = kilobytes * 1024
        name = f"pinned {kilobytes} KiB"
        note_cost(notes, f"{name}, new", partial(keep, size), 1, 5)
        kept.clear()
        note_cost(notes, f"{name}, cached", partial(torch.empty, size, dtype=torch.uint8, pin_memory=True))
    note_cost(notes, "record_stream", _record_stream())


def _record_stream() -> Callable[[], object]:
    stream = torch.cuda.Stream()

    def call() -> None:
        torch.empty(64, device="cuda").record_stream(stream)

    return call


def main() -> None:
    notes = Notes(parser_of(__doc__, ()).parse_args().found)
    note_events_and_streams(notes)
    note_kernels(notes)
    note_memory(notes)


if __name__ == "__main__":
    main()
