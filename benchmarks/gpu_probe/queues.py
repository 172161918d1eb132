"""Finds streams that a device holds up without need: ``python benchmarks/gpu_probe/queues.py NAME --found FILE``.

CUDA feeds all streams of a process through some hardware queues: CUDA_DEVICE_MAX_CONNECTIONS, which the caller sets,
and which NAME only names. What stands behind a kernel that spins, or behind a wait for one, waits with it if it is in
the same queue.
"""

import time
from collections.abc import Callable, Sequence

import torch

from gpu_probe.probe import Notes, Spinner, new_stream, parser_of

__all__: list[str] = []

STREAMS = (4, 8, 12, 16, 24, 32)
SPIN_SECONDS = 0.25
LOOK_SECONDS = 0.05
"""Tiny kernels that nothing holds up are done long before, and the spin is not."""

Block = Callable[[torch.cuda.Stream], torch.cuda.Event]


def held_up(streams: Sequence[torch.cuda.Stream], block: Block) -> int | None:
    """How many of the others' kernels are not done while the first stream is blocked; None if the spin was over before
    anybody looked.
    """
    numbers = [torch.zeros(8, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    over = block(streams[0])
    done = []
    for stream, number in zip(streams[1:], numbers[1:], strict=True):
        with torch.cuda.stream(stream):
            number.add_(1)
            event = torch.cuda.Event()
            event.record()
            done.append(event)
    time.sleep(LOOK_SECONDS)
    held = sum(not event.query() for event in done)
    was_over = over.query()
    torch.cuda.synchronize()
    return None if was_over else held


def note_pool(notes: Notes, priority: int) -> list[torch.cuda.Stream]:
    """After how many streams the first one comes again; returns those before."""
    streams = [torch.cuda.Stream(priority=priority) for _ in range(100)]
    handles = [stream.cuda_stream for stream in streams]
    again = next((place for place in range(1, 100) if handles[place] == handles[0]), None)
    notes.add("pool", priority=priority, repeats_after=again, different=len(set(handles)))
    return streams[: again or len(streams)]


def main() -> None:
    options = parser_of(__doc__, ("unset", "8", "32")).parse_args()
    notes = Notes(options.found)
    spinner = Spinner()
    torch.zeros(8, device="cuda").add_(1)
    aside = torch.cuda.ExternalStream(new_stream())

    def spin(stream: torch.cuda.Stream) -> torch.cuda.Event:
        return spinner.spin(stream, SPIN_SECONDS)

    def wait(stream: torch.cuda.Stream) -> torch.cuda.Event:
        """As a stream that computes waits for a message, here of a stream that is in none of the pools."""
        over = spinner.spin(aside, SPIN_SECONDS)
        stream.wait_event(over)
        with torch.cuda.stream(stream):
            ended = torch.cuda.Event()
            ended.record()
        return ended

    for priority in (0, -1):
        streams = note_pool(notes, priority)
        blocks: tuple[tuple[str, Block], ...] = (("spins", spin), ("waits", wait))
        for name, block in blocks:
            for count in STREAMS:
                if count <= len(streams):
                    held = held_up(streams[:count], block)
                    notes.add(
                        "queue",
                        connections=options.name,
                        priority=priority,
                        first=name,
                        streams=count,
                        held=held,
                    )


if __name__ == "__main__":
    main()
