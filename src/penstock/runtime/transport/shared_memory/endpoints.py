"""The two ends of an edge between processes that share memory: a ring, and a bell for who sleeps beside it.

A send copies its tensors into the ring and rings the bell; a wait looks at the ring for a while, then sleeps until the
bell rings, and copies what has come into tensors of its own. There is no thread in between, but for messages that find
no room: the receiver has enough to do then, and a thread moves them up when it has read some.

The bell is a pair of connected sockets. When a process ends, in whatever way, its end is closed, and the other one
learns of it at once. What was written before can still be read.

Laws of this file:
  1. A send never waits.
  2. Messages are read in the order in which their receives were posted, whoever waits for which of them.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from penstock.runtime.transport.message_headers import SentForms, Specs, read_header
from penstock.runtime.transport.pending_receives import PostedReceive
from penstock.runtime.transport.shared_memory.handshake import LocalPeers
from penstock.runtime.transport.shared_memory.ring_buffers import RingReader, RingWriter
from penstock.runtime.transport.timeouts import POLL_SECONDS, SpinPolicy, Timeout
from penstock.runtime.transport.transport import Edge, PendingMessage

__all__ = ["Flusher", "SharedInbox", "SharedOutbox"]

LOOKS = 50
"""So often it looks before it lets other threads of its process run."""
PUSH_SECONDS = 200e-6
"""How often the thread looks for room. The receiver has a message to work on, so there is no haste."""
UNREAD = 8
"""Receives that may be posted and not waited for before they are read anyway: nobody need read every loss."""
_CLOSED = ConnectionError("it was closed by the other end")


class SharedOutbox:
    """The sending end of `edge`, whose other end is `met`; collective with that end."""

    def __init__(self, edge: Edge, met: LocalPeers, pusher: "Flusher") -> None:
        self.error: Exception | None = None
        self._forms = SentForms(edge)
        self._pusher = pusher
        self._ring = RingWriter()
        self._bell, there = socket.socketpair()
        met.give(edge.target, [self._ring.descriptor, there.fileno()])
        there.close()
        self._bell.setblocking(False)
        self._waiting: deque[list[Tensor]] = deque()
        """Records that found no room, oldest first."""
        self._writing = threading.Lock()

    def put(self, form: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message`, with its header if it is the first of `form`."""
        header, tensors = self._forms.agree(form, message)
        with self._writing:
            if header is not None:
                self._waiting.append([torch.frombuffer(bytearray(header), dtype=torch.uint8)])
            self._waiting.append(tensors)
            self._write()
            if not self._waiting:
                return
        self._pusher.add(self)

    def push(self) -> bool:
        """Sends what had to wait, as far as there is room now; whether nothing is left."""
        with self._writing:
            self._write()
            return not self._waiting

    def flushed(self, seconds: float) -> bool:
        """Waits so long until everything is where its receiver can read it; whether it is."""
        deadline = time.monotonic() + seconds
        while not self.push():
            if self.error is not None or time.monotonic() > deadline:
                return False
            time.sleep(PUSH_SECONDS)
        return True

    def close(self) -> None:
        """Nothing is sent any more, but for what had to wait."""

    def join(self, seconds: float) -> bool:
        """Waits so long until everything has been sent, and hangs up; whether it has."""
        sent = self.flushed(seconds) or self.error is not None
        self._bell.close()
        return sent

    def _write(self) -> None:
        wrote = False
        while self._waiting and self._ring.write([(t.data_ptr(), t.nbytes) for t in self._waiting[0]]):
            self._waiting.popleft()
            wrote = True
        # Where there is no room, perhaps nobody is there to make it.
        if self._waiting or (wrote and self._ring.asleep()):
            try:
                self._bell.send(b".")
            except BlockingIOError:
                # It has been rung often enough.
                pass
            except OSError as error:
                self.error = error
                # Nobody is there to read.
                self._waiting.clear()


class SharedInbox:
    """The receiving end of `edge`, whose other end is `met`; collective with that end."""

    def __init__(self, edge: Edge, met: LocalPeers, timeout: Timeout) -> None:
        self._edge = edge
        self._patience = timeout
        # Who spins on a core that another process of the pipeline needs keeps that one from sending.
        self._spins = met.processes <= len(os.sched_getaffinity(0))
        self._looking = SpinPolicy()
        ring, bell = met.take(edge.source, 2)
        self._ring = RingReader(ring)
        self._bell = socket.socket(fileno=bell)
        self._bell.setblocking(False)
        self._closed = False
        """Whether the other end has hung up."""
        self._sleep = select.poll()
        self._sleep.register(self._bell, select.POLLIN)
        self._agreed: dict[Hashable, Specs] = {}
        self._posted: deque[PostedReceive] = deque()
        """Receives whose messages have not been read, oldest first."""
        self._reading = threading.Lock()

    def post(self, form: Hashable) -> PendingMessage:
        """Posts the receive of the next message, which is of `form`."""
        ticket = PostedReceive(self, form)
        self._posted.append(ticket)
        # Another thread that reads may be waiting for a message that this one is to bring about.
        if len(self._posted) > UNREAD and self._reading.acquire(blocking=False):
            try:
                while len(self._posted) > UNREAD and self._ring.filled():
                    self._read()
            finally:
                self._reading.release()
        return ticket

    def bring(self, ticket: PostedReceive) -> bool:
        """Reads up to the message of `ticket`, as far as it has come; whether it has."""
        if self._reading.acquire(blocking=False):
            try:
                while ticket.message is None and self._ring.filled():
                    self._read()
            finally:
                self._reading.release()
        return ticket.message is not None

    def await_(self, ticket: PostedReceive) -> None:
        """Reads up to the message of `ticket`."""
        with self._reading:
            while ticket.message is None:
                if not self._ring.filled():
                    self._wait()
                self._read()

    def close(self) -> None:
        """Nothing is posted any more."""

    def join(self, seconds: float) -> bool:
        """Waits so long for everything posted, and hangs up; False if it may still come."""
        deadline = time.monotonic() + seconds
        # A thread of the user's may wait for a loss.
        if not self._reading.acquire(timeout=max(seconds, 0.0)):
            return False
        try:
            while self._posted and (self._ring.filled() or (not self._closed and time.monotonic() < deadline)):
                if self._ring.filled():
                    self._read()
                else:
                    self._nap(0.01)
        finally:
            self._reading.release()
        self._bell.close()
        return self._closed or not self._posted

    def _wait(self) -> None:
        """Until there is a record."""
        if self._spins and self._spin():
            return
        filled = self._ring.filled
        place, peers = str(self._edge), (self._edge.source,)
        deadline = self._patience.deadline()
        while not filled():
            if not self._nap(POLL_SECONDS):
                self._patience.check(deadline, place, peers)
            elif self._closed and not filled():
                raise self._patience.broken(place, peers, _CLOSED)

    def _spin(self) -> bool:
        """Looks for a record for a while; whether there is one."""
        filled, until = self._ring.filled, self._looking.until()
        while time.perf_counter() < until:
            for _ in range(LOOKS):
                if filled():
                    return self._looking.learn(True)
            # Lets other threads of this process run.
            self._sleep.poll(0)
        return self._looking.learn(False)

    def _nap(self, seconds: float) -> bool:
        """Sleeps until the bell rings or the other end hangs up, or for so long; False if nothing happened."""
        try:
            if self._ring.lie_down() and not self._sleep.poll(seconds * 1e3):
                return False
        finally:
            self._ring.rise()
        try:
            self._closed = not self._bell.recv(4096)
        except BlockingIOError:
            # A record came in time.
            pass
        except OSError:
            self._closed = True
        return True

    def _read(self) -> None:
        """Reads the next message, which is there, for the oldest receive."""
        ticket = self._posted[0]
        specs = self._agreed.get(ticket.form)
        if specs is None:
            header = bytearray(self._ring.size())
            place = torch.frombuffer(header, dtype=torch.uint8)
            self._ring.read([(place.data_ptr(), len(header))])
            specs = self._agreed[ticket.form] = read_header(bytes(header))
            # The message itself was written after its header.
            while not self._ring.filled():
                self._wait()
        tensors, pieces = [], []
        for spec in specs:
            tensor = None
            if spec is not None:
                tensor = spec.empty()
                pieces.append((tensor.data_ptr(), spec.bytes))
            tensors.append(tensor)
        self._ring.read(pieces)
        ticket.message = tuple(tensors)
        self._posted.popleft()


class Flusher:
    """Moves up what has found no room, beside the computation."""

    def __init__(self) -> None:
        self._outboxes: dict[SharedOutbox, None] = {}
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, outbox: SharedOutbox) -> None:
        """Moves up what `outbox` has left."""
        with self._change:
            self._outboxes[outbox] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock push", daemon=True)
                self._thread.start()
            self._change.notify()

    def close(self) -> None:
        """Ends the thread."""
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._outboxes and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                outboxes = list(self._outboxes)
                self._outboxes.clear()
            left = [outbox for outbox in outboxes if not outbox.push()]
            with self._change:
                self._outboxes.update(dict.fromkeys(left))
            time.sleep(PUSH_SECONDS)
