"""Runs the programs of the ranks that live in this process: one after the other, or several in turn."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from penstock.runtime.devices.streams import Streams
from penstock.runtime.engine.worker import Worker
from penstock.scheduling.actions import Action
from penstock.scheduling.arrivals import longest_wait

__all__ = ["run_programs"]


def run_programs(
    workers: Sequence[Worker],
    programs: Mapping[int, Sequence[Action]],
    streams: Streams,
    aside: Callable[[], None] | None = None,
) -> None:
    """Has every worker carry out its rank's program. Several take turns: one action each, whoever need not wait, and
    each in the stream that it has among `streams`.

    `aside` is something to do where one alone is most likely to wait.
    """
    if len(workers) == 1:
        (worker,) = workers
        program = programs[worker.rank]
        idle = longest_wait(program) if aside else None
        for place, action in enumerate(program):
            if aside and place == idle:
                aside()
            worker.execute(action)
        return
    queues = [(worker, deque(programs[worker.rank])) for worker in workers]
    while any(queue for _, queue in queues):
        progress = False
        for worker, queue in queues:
            with streams.on(worker.rank):
                # To ask may take computing, too: what a rank gives to a sum before it waits for it.
                if queue and worker.ready(queue[0]):
                    worker.execute(queue.popleft())
                    progress = True
        # The verifier has proved that some rank can always go on.
        assert progress, "deadlock in a verified schedule"
