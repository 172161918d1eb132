"""The two endpoints of an edge between processes that share memory: a ring buffer, and a doorbell to wake its reader.

A send copies its tensors into the ring and rings the doorbell. A wait spins on the ring for a while, then sleeps until
the doorbell rings, and copies the message into tensors of its own. No thread takes part, except for messages that do
not fit into the ring. The receiver then has enough to do, and a thread of the sender writes them when it has read some.

The doorbell is a pipe. When a process ends, in whatever way, its end is closed, and the other process sees that at
once. Messages that were written before can still be read.

Invariants of this file:
  1. A send does not block.
  2. Messages are read in the order in which their receives were posted, whichever of them is waited for.
"""

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from io import FileIO

import torch
from torch import Tensor

from penstock.runtime.collectives.timeouts import POLL_SECONDS, SpinPolicy, Timeout
from penstock.runtime.transport.message_headers import ReceivedKinds, SentKinds, assemble
from penstock.runtime.transport.pending_receives import PostedReceive
from penstock.runtime.transport.shared_memory.local_peers import LocalPeers
from penstock.runtime.transport.shared_memory.ring_buffers import Piece, RingReader, RingWriter
from penstock.runtime.transport.transport import PendingMessage

_SPINS_PER_YIELD = 50
"""How often a waiter looks before it lets other threads of its process run."""
_FLUSH_SECONDS = 200e-6
"""How often the thread looks for room. The receiver has messages to work on meanwhile."""
_UNREAD = 8
"""This many receives may be posted without being waited for before their messages are read anyway: not every loss is
ever read.
"""
_CLOSED = ConnectionError("it was closed by the other end")


class SharedOutbox:
    """The sending end of the edge of `kinds`. The other end opens what `offer` returns, before `connected`."""

    def __init__(self, kinds: SentKinds) -> None:
        self.error: Exception | None = None
        self._kinds = kinds
        self._ring = RingWriter()
        listening, ringing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listening, self._doorbell = FileIO(listening, "r"), FileIO(ringing, "w")
        self._waiting: deque[list[Tensor]] = deque()
        """Frames that did not fit into the ring, oldest first."""
        self._flusher: threading.Thread | None = None
        """Writes them as soon as there is room, beside the computation; None if there are none."""
        self._writing = threading.Lock()

    def offer(self) -> tuple[int, int]:
        """The descriptors of the ring and of the end of the doorbell that the other end needs."""
        return self._ring.descriptor, self._listening.fileno()

    def connected(self) -> None:
        """Gives the other end of the doorbell away."""
        self._listening.close()

    def put(self, kind: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message`, with its header if it is the first of `kind`."""
        header, tensors = self._kinds.agree(kind, message)
        with self._writing:
            if header is not None:
                self._waiting.append([torch.frombuffer(bytearray(header), dtype=torch.uint8)])
            self._waiting.append(tensors)
            self._write()
            if self._waiting and self._flusher is None:
                name = f"penstock flush {self._kinds.edge}"
                self._flusher = threading.Thread(target=self.flushed, args=(math.inf,), name=name, daemon=True)
                self._flusher.start()

    def flush(self) -> bool:
        """Writes waiting frames as far as there is room. Returns whether none is left."""
        with self._writing:
            self._write()
            if not self._waiting:
                self._flusher = None
            return not self._waiting

    def flushed(self, seconds: float) -> bool:
        """Blocks until everything is written, or for `seconds`. Returns whether it is written."""
        deadline = time.monotonic() + seconds
        while not self.flush():
            if self.error is not None or time.monotonic() > deadline:
                return False
            time.sleep(_FLUSH_SECONDS)
        return True

    def join(self, seconds: float) -> bool:
        """Like `flushed`, and closes the doorbell."""
        sent = self.flushed(seconds) or self.error is not None
        with self._writing:
            # This ends the thread, too.
            self._waiting.clear()
        self._doorbell.close()
        return sent

    def _write(self) -> None:
        wrote = False
        while self._waiting and self._ring.write([(t.data_ptr(), t.nbytes) for t in self._waiting[0]]):
            self._waiting.popleft()
            wrote = True
        # If there is no room, the reader may have ended, which the doorbell finds out.
        if self._waiting or (wrote and self._ring.reader_sleeps()):
            try:
                # It writes nothing if the doorbell has been rung often enough.
                self._doorbell.write(b".")
            except (OSError, ValueError) as error:
                self.error = error
                # There is no reader any more.
                self._waiting.clear()


class SharedInbox:
    """The receiving end of the edge of `kinds`, whose other end has made `offer` and is one of `local_peers`. `OSError`
    if that has ended.
    """

    def __init__(self, kinds: ReceivedKinds, local_peers: LocalPeers, offer: tuple[int, int], timeout: Timeout) -> None:
        self._kinds, self._edge = kinds, kinds.edge
        self._timeout = timeout
        # Spinning on a core that another process of the pipeline needs would delay that process's sends.
        self._spins = local_peers.processes <= len(os.sched_getaffinity(0))
        self._spin_policy = SpinPolicy()
        source, (ring, doorbell) = kinds.edge.source, offer
        self._ring = RingReader(local_peers.open(source, ring, os.O_RDWR))
        self._doorbell = FileIO(local_peers.open(source, doorbell, os.O_RDONLY), "r")
        self._closed = False
        """Whether the other end has closed the doorbell."""
        self._poller = select.poll()
        self._poller.register(self._doorbell, select.POLLIN)
        self._receives: deque[PostedReceive] = deque()
        """Receives whose messages have not been read, oldest first."""
        self._reading = threading.Lock()

    def post(self, kind: Hashable) -> PendingMessage:
        """Posts the receive of the next message, which is of `kind`."""
        receive = PostedReceive(self, kind)
        self._receives.append(receive)
        # Without blocking: another thread that holds the lock may wait for a message that depends on this thread.
        if len(self._receives) > _UNREAD and self._reading.acquire(blocking=False):
            try:
                while len(self._receives) > _UNREAD and self._ring.filled():
                    self._read()
            finally:
                self._reading.release()
        return receive

    def poll(self, receive: PostedReceive) -> bool:
        """Reads the messages that have arrived, up to that of `receive`. Returns whether it has been delivered."""
        if self._reading.acquire(blocking=False):
            try:
                while receive.message is None and self._ring.filled():
                    self._read()
            finally:
                self._reading.release()
        return receive.message is not None

    def wait(self, receive: PostedReceive) -> None:
        """Blocks until the message of `receive` is delivered, reading all messages before it."""
        with self._reading:
            while receive.message is None:
                if not self._ring.filled():
                    self._wait()
                self._read()

    def join(self, seconds: float) -> bool:
        """Blocks until all posted receives are done, or for `seconds`, and closes the doorbell. Returns False if a
        message may still come.
        """
        deadline = time.monotonic() + seconds
        # A thread of the user may hold the lock while it waits for a loss.
        if not self._reading.acquire(timeout=max(seconds, 0.0)):
            return False
        try:
            while self._receives and (self._ring.filled() or (not self._closed and time.monotonic() < deadline)):
                if self._ring.filled():
                    self._read()
                else:
                    self._sleep(0.01)
        finally:
            self._reading.release()
        self._doorbell.close()
        return self._closed or not self._receives

    def _wait(self) -> None:
        """Blocks until there is a frame."""
        if self._spins and self._spin():
            return
        filled = self._ring.filled
        context, peers = str(self._edge), (self._edge.source,)
        deadline = self._timeout.deadline()
        while not filled():
            if not self._sleep(POLL_SECONDS):
                self._timeout.check(deadline, context, peers)
            elif self._closed and not filled():
                raise self._timeout.connection_error(context, peers, _CLOSED)

    def _spin(self) -> bool:
        """Spins for a while. Returns whether there is a frame."""
        filled, deadline = self._ring.filled, self._spin_policy.deadline()
        while time.perf_counter() < deadline:
            for _ in range(_SPINS_PER_YIELD):
                if filled():
                    return self._spin_policy.update(True)
            # Lets other threads of this process run.
            self._poller.poll(0)
        return self._spin_policy.update(False)

    def _sleep(self, seconds: float) -> bool:
        """Sleeps until the doorbell rings, the other end closes it, or `seconds` are over. Returns False in the last
        case.
        """
        try:
            if self._ring.mark_sleeping() and not self._poller.poll(seconds * 1e3):
                return False
        finally:
            self._ring.mark_awake()
        try:
            # None: a frame arrived before the sleep.
            self._closed = self._doorbell.read(4096) == b""
        except (OSError, ValueError):
            self._closed = True
        return True

    def _read(self) -> None:
        """Reads the next message, which has arrived, for the oldest receive."""
        receive = self._receives[0]
        specs = self._kinds.specs(receive.kind)
        if specs is None:
            header = bytearray(self._ring.size())
            buffer = torch.frombuffer(header, dtype=torch.uint8)
            self._ring.read([(buffer.data_ptr(), len(header))])
            specs = self._kinds.read(receive.kind, bytes(header))
            # The message itself is written after its header.
            while not self._ring.filled():
                self._wait()
        # Before memory for them is allocated.
        expected, tensors, pieces = 0, list[Tensor](), list[Piece]()
        for spec in specs:
            expected += 0 if spec is None else spec.nbytes
        self._ring.expect(expected)
        for spec in specs:
            if spec is not None:
                tensors.append(tensor := spec.empty())
                pieces.append((tensor.data_ptr(), spec.nbytes))
        self._ring.read(pieces)
        receive.message = assemble(specs, tensors)
        self._receives.popleft()
