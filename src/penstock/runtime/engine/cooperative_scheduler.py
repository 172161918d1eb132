"""Runs the programs of the ranks in this process: one in order, several cooperatively, action by action."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from penstock.runtime.devices.streams import Streams
from penstock.runtime.engine.worker import Worker
from penstock.scheduling.actions import Action
from penstock.scheduling.arrivals import longest_wait


def run_cooperatively(
    workers: Sequence[Worker],
    programs: Mapping[int, Sequence[Action]],
    streams: Streams,
    *,
    before_waiting: Callable[[], None] | None = None,
    while_idle: Callable[[], None] | None = None,
) -> None:
    """Runs the program of every worker. Several workers take turns: those that need not wait run one action each, in
    their streams.

    Both callbacks are called once, for a single worker: `before_waiting` when it has to wait for another rank, or at
    the end if it need not; `while_idle` where it is most likely to wait.
    """
    if len(workers) == 1:
        (worker,) = workers
        program = programs[worker.rank]
        idle = longest_wait(program) if while_idle else None
        for position, action in enumerate(program):
            if before_waiting and not worker.ready(action):
                before_waiting()
                before_waiting = None
            if while_idle and position == idle:
                while_idle()
            worker.execute(action)
        if before_waiting:
            before_waiting()
        return
    queues = [(worker, deque(programs[worker.rank])) for worker in workers]
    while any(queue for _, queue in queues):
        progress = False
        for worker, queue in queues:
            with streams.on(worker.rank):
                # `ready` may compute, too: it sends a rank's gradients to be summed.
                if queue and worker.ready(queue[0]):
                    worker.execute(queue.popleft())
                    progress = True
        # The verifier has proved that some rank can always go on.
        assert progress, "deadlock in a verified schedule"
