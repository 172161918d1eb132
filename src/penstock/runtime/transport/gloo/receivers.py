"""The receiving end of an edge between processes that share no memory, over a Gloo communicator.

A receive is posted to Gloo when it is posted here, as soon as its form is known, and what comes is written into the
tensors that the message will be. Whoever waits first looks at the memory that the last bytes go to, which were marked
before, and lets Gloo's thread have the core in between: to be woken takes longer than most messages do. After a while a
thread waits in his place, since a wait of Gloo's cannot be broken off when another rank fails.

The thread waits for one message after the other, so it is given them in the order in which they come: who waits for
one must not wait for a later one, which may be sent only when the first one has been heard of.

Tensors of a GPU pass through host memory, since the communicators are Gloo's; the thread waits for them from the start
and has them copied to the device as soon as they have come.
"""

import ctypes
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.runtime.devices.communicators import Communicator, Work
from penstock.runtime.devices.staging import Staged, Staging
from penstock.runtime.transport.gloo.senders import HEADER_BYTES
from penstock.runtime.transport.message_headers import Spec, Specs, read_header
from penstock.runtime.transport.pending_receives import PendingResult, PostedReceive
from penstock.runtime.transport.timeouts import SpinPolicy, Timeout
from penstock.runtime.transport.transport import Edge, PendingMessage

__all__ = ["GlooInbox"]

OPEN, OPEN_BYTES = 2, 2**18
"""Gloo knows of so many receives of an edge at least, one in use and one on its way, and of more while they are small:
what it knows of comes without asking back, and until it has come it is held by the sender."""
UNREAD = 8
"""So many messages may have come without being asked for before they are put together anyway."""
_MARK = 0x7FF4_9E57_0C4B_ED1D
"""Stands where the last bytes of a message will be written; a message that ends with it is waited for by a thread."""
_MARK_BYTES = 8
_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))


class _Arrival:
    """Tensors that Gloo writes what it receives into, from rank `peer` of `group`."""

    __slots__ = ("_error", "_mark", "_works")

    def __init__(self, group: Communicator, peer: int, tensors: Sequence[Tensor]) -> None:
        marked = [tensor for tensor in tensors if tensor.nbytes >= _MARK_BYTES]
        self._mark: ctypes.c_uint64 | None = None
        if marked:
            # What is sent after the last of these is some bytes, which come at once.
            self._mark = ctypes.c_uint64.from_address(marked[-1].data_ptr() + marked[-1].nbytes - _MARK_BYTES)
            self._mark.value = _MARK
        self._works: list[Work] = []
        self._error: Exception | None = None
        """A connection that has broken is the matter of who waits, not of who posts."""
        try:
            self._works += [group.recv([tensor], peer, 0) for tensor in tensors]
        except Exception as error:
            self._error = error

    def seen(self) -> bool:
        """Whether it has come, as far as can be seen."""
        return not self._works or (self._mark is not None and self._mark.value != _MARK)

    def settle(self) -> None:
        """Waits for Gloo. Once: waiting again would never end."""
        if self._error is not None:
            raise self._error
        works, self._works = self._works, []
        for work in works:
            work.wait()


class _Posted(PostedReceive):
    """A receive that has been posted here."""

    __slots__ = ("arrival", "bytes", "receipt", "specs", "staged", "tensors")

    def __init__(self, inbox: "GlooInbox", form: Hashable) -> None:
        super().__init__(inbox, form)
        self.arrival: _Arrival | None = None
        """Once Gloo knows of it, which takes knowing its form."""
        self.specs: Specs = ()
        self.tensors: Sequence[Tensor] = ()
        """On the host, one for each of its specs that is not None."""
        self.staged: Staged | None = None
        """On the device, if a thread has seen to that."""
        self.bytes = 0
        self.receipt: PendingResult | None = None
        """If a thread waits for it."""


class GlooInbox:
    """The receiving end of `edge`, for tensors that `staging` takes further. The sender is the rank `peer` of `group`,
    which has these two.
    """

    def __init__(self, edge: Edge, group: Communicator, peer: int, staging: Staging, timeout: Timeout) -> None:
        self._edge = edge
        self._group, self._peer = group, peer
        self._staging = staging
        self._patience = timeout
        self._looking = SpinPolicy()
        self._agreed: dict[Hashable, Specs] = {}
        self._unposted: deque[_Posted] = deque()
        """Receives that Gloo does not know of yet, oldest first."""
        self._header: PendingResult | None = None
        """That of the oldest of these, which a thread waits for: the sender must get rid of what nobody asks for."""
        self._pending: dict[_Posted, None] = {}
        """Receives that Gloo knows of, oldest first. What Gloo will write to must be kept."""
        self._pending_bytes = 0
        self._working = threading.RLock()
        """Held to change any of these, and never for long."""
        self._waits: queue.SimpleQueue[tuple[_Arrival, PendingResult, Callable[[], None] | None] | None] = (
            queue.SimpleQueue()
        )
        """What the thread waits for, a message or a header, and what it does then."""
        self._thread: threading.Thread | None = None

    def post(self, form: Hashable) -> PendingMessage:
        """Posts the receive of the next message, which is of `form`."""
        ticket = _Posted(self, form)
        with self._working:
            self._unposted.append(ticket)
            self._arm()
            while len(self._pending) > UNREAD and self._is_there(oldest := next(iter(self._pending))):
                self._finish(oldest)
        return ticket

    def bring(self, ticket: _Posted) -> bool:
        """Whether the message of `ticket` has come."""
        with self._working:
            if ticket.message is None and ticket.arrival is not None:
                if not ticket.arrival.seen():
                    # Some that have come cannot be seen.
                    self._hand_over(ticket)
                if self._is_there(ticket):
                    self._finish(ticket)
        return ticket.message is not None

    def await_(self, ticket: _Posted) -> None:
        """Waits for the message of `ticket`."""
        while ticket.arrival is None:
            with self._working:
                self._arm(ticket)
                header = self._header
            if ticket.arrival is None and header is not None:
                header.wait()
        if ticket.receipt is None and not self._spin(ticket.arrival):
            with self._working:
                self._hand_over(ticket)
        if ticket.receipt is not None:
            ticket.receipt.wait()
        with self._working:
            if ticket.message is None:
                self._finish(ticket)

    def close(self) -> None:
        """Nothing is posted any more."""

    def join(self, seconds: float) -> bool:
        """Waits so long for everything posted; False if it may still come."""
        deadline = time.monotonic() + seconds
        while True:
            with self._working:
                if self._unposted:
                    self._arm(self._unposted[-1])
                if not self._unposted or time.monotonic() > deadline:
                    self._hand_over()
                    break
            time.sleep(0.01)
        if self._thread is not None:
            self._waits.put(None)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._unposted and (self._thread is None or not self._thread.is_alive())

    def _arm(self, wanted: _Posted | None = None) -> None:
        """Tells Gloo of the next receives, as many as it should know of, or all up to `wanted`; only of those whose
        form is known, and of the next header.
        """
        while self._unposted and self._header is None:
            ticket = self._unposted[0]
            specs = self._agreed.get(ticket.form)
            if specs is None:
                # What comes before the header.
                self._hand_over()
                page = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                self._header = self._start(_Arrival(self._group, self._peer, [page]), partial(self._take_header, page))
                return
            size = sum([spec.bytes for spec in specs if spec is not None])
            full = len(self._pending) >= OPEN and self._pending_bytes + size > OPEN_BYTES
            if full and (wanted is None or wanted.arrival is not None):
                return
            known = [spec for spec in specs if spec is not None]
            ticket.specs = specs
            ticket.tensors = [self._staging.host_memory(spec.layout) for spec in known]
            places = [_in_order(spec, tensor) for spec, tensor in zip(known, ticket.tensors, strict=True) if spec.bytes]
            ticket.arrival = _Arrival(self._group, self._peer, places)
            ticket.bytes = size
            self._pending[ticket] = None
            self._pending_bytes += size
            self._unposted.popleft()
            if self._staging.apart:
                self._hand_over()

    def _take_header(self, page: Tensor) -> None:
        """The form of the oldest receive that Gloo does not know of; `page` has come."""
        text = page.numpy().tobytes()
        size = int.from_bytes(text[:8], "little")
        if size > HEADER_BYTES - 8:
            rest = torch.empty(size - HEADER_BYTES + 8, dtype=torch.uint8)
            _Arrival(self._group, self._peer, [rest]).settle()
            text += rest.numpy().tobytes()
        with self._working:
            self._agreed[self._unposted[0].form] = read_header(text[8 : 8 + size])
            self._header = None
            self._arm()

    def _spin(self, arrival: _Arrival) -> bool:
        """Looks for it for a while; whether it has come."""
        until = self._looking.until()
        while not arrival.seen():
            if time.perf_counter() > until:
                return self._looking.learn(False)
            # Gloo's thread may need this core to write it.
            _give_way()
        return self._looking.learn(True)

    def _is_there(self, ticket: _Posted) -> bool:
        """Whether `_finish` would not wait."""
        if ticket.receipt is not None:
            return ticket.receipt.ready()
        return ticket.arrival is not None and ticket.arrival.seen()

    def _finish(self, ticket: _Posted) -> None:
        """Puts the message of `ticket` together, which has come."""
        assert ticket.arrival is not None
        if ticket.receipt is not None:
            ticket.receipt.wait()
        else:
            try:
                ticket.arrival.settle()
            except Exception as error:
                raise self._patience.broken(str(self._edge), (self._edge.source,), error) from error
        arrived = iter(self._staging.follow(ticket.staged or self._staging.to_device(ticket.tensors)))
        ticket.message = tuple(
            [None if spec is None else next(arrived).requires_grad_(spec.requires_grad) for spec in ticket.specs]
        )
        ticket.tensors, ticket.staged = (), None
        del self._pending[ticket]
        self._pending_bytes -= ticket.bytes
        self._arm()

    def _hand_over(self, last: _Posted | None = None) -> None:
        """Has the thread wait for all that Gloo knows of, or for `last` and what comes before it."""
        for ticket in self._pending:
            if ticket.receipt is None and ticket.arrival is not None:
                then = partial(self._stage, ticket) if self._staging.apart else None
                ticket.receipt = self._start(ticket.arrival, then)
            if ticket is last:
                return

    def _stage(self, ticket: _Posted) -> None:
        """Has what has come for `ticket` copied to the device."""
        ticket.staged = self._staging.to_device(ticket.tensors)

    def _start(self, arrival: _Arrival, then: Callable[[], None] | None) -> PendingResult:
        """A receipt that the thread leaves when `arrival` has come and it has done what is to be done `then`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"penstock receive {self._edge}", daemon=True)
            self._thread.start()
        receipt = PendingResult(str(self._edge), (self._edge.source,), self._patience, self._staging)
        self._waits.put((arrival, receipt, then))
        return receipt

    def _run(self) -> None:
        self._staging.enter_thread()
        while (item := self._waits.get()) is not None:
            arrival, receipt, then = item
            try:
                arrival.settle()
                if then is not None:
                    then()
                receipt.leave()
            except Exception as error:
                receipt.leave(error=error)
            # What has come is not kept alive until the next wait.
            del item, arrival, receipt, then


def _in_order(spec: Spec, tensor: Tensor) -> Tensor:
    """`tensor`, with the dimensions in their order in memory."""
    return tensor if tensor.is_contiguous() else tensor.permute(spec.order)
