"""Notices of messages between GPUs, which senders write to the store that connects the processes.

The first message of a kind needs a header, the layout of its tensors. Its sender writes the header to the store, at any
time in the life of a pipeline.

In the first steps, and for a while after each new kind, senders also announce every message in the store, and a
receiver enqueues a receive with NCCL as soon as its message is announced. This prevents deadlocks. In these steps a
host may block, at any computation, until its device has done all enqueued work: CUDA may synchronize the device when it
loads a kernel at its first use, and so may a compiler, or an allocator that runs short of memory. The work of a device
includes its sends, which are done when they have been received. So a rank must not block like this while a message to
it has been sent whose receive it has not enqueued.

Therefore each rank announces its sends, then polls the announcements of the others, and then computes; and it computes
only when all messages that it waited for have arrived. Suppose that some ranks block in a circle, each with a send that
the next rank has not received. Then the rank that polled last has seen the announcements of all the others, so it has
enqueued the receive of the message to it. So there is no such circle.

Tensor-parallel members of a rank wait for each other at every computation, so a circle may go through several members.
Therefore a member polls when all members of its rank have announced their part of a message: of two ranks that send to
each other, all members of one then enqueue their receives.

Sums over replicas start in these steps when they are waited for, and not within a backward. A rank that blocks within a
backward would otherwise wait for the last backward of another replica, which may wait for a message that this rank has
yet to send.

After these steps, a receive is enqueued when its message is wanted: a host that has loaded all kernels does not block
on its device.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from penstock.runtime.collectives.store_gathers import delete_keys
from penstock.runtime.collectives.store_watch import StoreUnreachable, StoreWatch
from penstock.runtime.collectives.timeouts import POLL_SECONDS, Timeout
from penstock.runtime.transport.transport import Edge

_SETTLED_SEGMENTS = 2
"""After this many segments of the schedule with a new kind, including the first, all work has run with it."""


class SendNotices:
    """Writes and reads the notices of this process through `watch`, under keys that begin with `prefix`. `ranks`: the
    number of processes. `timeout`: for a notice to be written, and for the other `members` of this rank, the processes
    that hold it together.
    """

    def __init__(
        self, watch: StoreWatch, ranks: int, prefix: str, timeout: Timeout, members: Sequence[int] = ()
    ) -> None:
        self._watch, self._prefix, self._timeout = watch, prefix, timeout
        self._members, self._turn = members, 0
        self._first_segments = ranks + _SETTLED_SEGMENTS
        self._subscribers: list[Callable[[], None]] = []
        self._obsolete: list[str] = []
        """The keys of messages whose receives were enqueued in this segment."""
        self._segment = 0
        # A rank's first backward may come as many segments after its first forward as there are stages.
        self._announcing_until = self._first_segments

    @property
    def announcing(self) -> bool:
        """Whether every message is announced."""
        return self._segment <= self._announcing_until

    def begin_segment(self) -> None:
        """Begins a segment of the schedule (a step or a drain)."""
        self._segment += 1
        # Not in the segment itself: a message may be enqueued, since it is wanted, before its notice is written.
        if self._obsolete:
            self._watch.submit(partial(delete_keys, keys=self._obsolete))
            self._obsolete = []

    def subscribe(self, poll: Callable[[], None]) -> None:
        """Makes `poll` of this object call `poll`."""
        self._subscribers.append(poll)

    def release(self) -> None:
        """Forgets the subscribers."""
        self._subscribers.clear()

    def announce(self, edge: Edge, number: int, header: bytes | None) -> None:
        """Announces the `number`-th message of `edge`, which has been sent. `header`: if its kind is new."""
        if header is not None:
            self._announce_for_a_while()
        if header is not None or self.announcing:
            key, text = self._key(edge, number), (header or b"").hex()
            # If the store is gone, its process has ended. The communicators report that.
            with suppress(StoreUnreachable):
                self._watch.ask(lambda store: store.set(key, text), self._timeout.timeout_seconds)
            # Of later steps the members need not agree which have new kinds.
            if len(self._members) > 1 and self._segment <= self._first_segments:
                self._await_members(edge)
            self.poll()

    def _await_members(self, edge: Edge) -> None:
        """Waits until all members of this rank have announced as many messages as this one."""
        size, before, key = len(self._members), self._turn_key(self._turn - 1), self._turn_key(self._turn)

        def all_there() -> bool:
            return (
                self._watch.ask(lambda store: store.add(key, 0), self._timeout.timeout_seconds) >= size or self.poll()
            )

        with suppress(StoreUnreachable):
            self._watch.ask(lambda store: store.add(key, 1), self._timeout.timeout_seconds)
            self._timeout.wait_for(all_there, str(edge), [peer for peer in self._members if peer != edge.source])
        # All members have come further than the turn before.
        if edge.source == self._members[0] and self._turn:
            self._watch.submit(partial(delete_keys, keys=[before]))
        self._turn += 1

    def _turn_key(self, turn: int) -> str:
        return f"{self._prefix}turn {turn} of {self._members[0]}"

    def poll(self) -> bool:
        """Enqueues all receives whose messages have been announced. Returns False, for conditions that end with it."""
        if self.announcing:
            for poll in self._subscribers:
                poll()
        return False

    def enqueued(self, edge: Edge, number: int) -> None:
        """Called when the receive of the `number`-th message of `edge` is enqueued: its notice is not read any more."""
        if self.announcing:
            self._obsolete.append(self._key(edge, number))

    def is_announced(self, edge: Edge, number: int) -> bool:
        """Whether the `number`-th message of `edge` has been announced. False after the first steps."""
        return self.announcing and self._read(edge, number) is not None

    def header(self, edge: Edge, number: int) -> bytes | None:
        """The header of the `number`-th message of `edge`, whose kind is new; None if it is not announced yet."""
        text = self._read(edge, number)
        if text is None:
            return None
        self._announce_for_a_while()
        return bytes.fromhex(text.decode())

    def _read(self, edge: Edge, number: int) -> bytes | None:
        """The notice of the `number`-th message of `edge`; None while there is none, or the store does not answer."""
        key = self._key(edge, number)
        with suppress(StoreUnreachable):
            return self._watch.ask(lambda store: store.get(key) if store.check([key]) else None, POLL_SECONDS)
        return None

    def _key(self, edge: Edge, number: int) -> str:
        return f"{self._prefix}message {number} of {edge}"

    def _announce_for_a_while(self) -> None:
        """Announces every message for a while, because a kind is new."""
        self._announcing_until = max(self._announcing_until, self._segment + _SETTLED_SEGMENTS - 1)
