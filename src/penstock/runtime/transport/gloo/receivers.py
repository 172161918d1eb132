"""The receiving end of an edge between processes without shared memory, over a Gloo communicator.

A receive is posted to Gloo when it is posted here, as soon as its kind is known. Gloo writes directly into the tensors
of the message. The waiter first spins on the memory where the last bytes will be written, after storing a sentinel
there, and yields the core to Gloo's thread in between: waking a thread takes longer than most messages take. After a
while a thread waits in its stead, since a wait inside Gloo cannot be interrupted when another rank fails.

The thread waits for messages one by one, in the order in which they arrive. A waiter must not wait behind a later
message: that message may be sent only after the earlier one has been used.

Tensors of a GPU pass through host memory, since Gloo sends from there. The thread then waits for all messages from the
start, and starts to copy each to the device as soon as it has arrived.
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

from penstock.errors import TransportError
from penstock.runtime.collectives.timeouts import SpinPolicy, Timeout
from penstock.runtime.devices.communicators import Communicator, CommunicatorWork
from penstock.runtime.devices.staging import Staged, Staging
from penstock.runtime.transport.gloo.senders import HEADER_BYTES
from penstock.runtime.transport.message_headers import (
    MOST_HEADER_BYTES,
    ReceivedKinds,
    Specs,
    assemble,
    contiguous_view,
)
from penstock.runtime.transport.pending_receives import PendingResult, PostedReceive
from penstock.runtime.transport.transport import PendingMessage

_POSTED_AHEAD, _POSTED_AHEAD_BYTES = 2, 2**18
"""Gloo always has at least this many receives of an edge posted (one in use and one on its way), and more while their
bytes are few. A message whose receive is posted is sent without asking the receiver first. Until it has arrived, the
sender keeps its memory.
"""
_UNREAD = 8
"""This many messages may arrive without being waited for before the oldest are delivered anyway."""
_SENTINEL = 0x7FF4_9E57_0C4B_ED1D
"""The value that is stored where the last bytes of a message will be written. If a message ends with this value, its
arrival is not seen there, and a thread waits for it.
"""
_SENTINEL_BYTES = 8
_LOOKS = 16
"""How often `poll` looks at the sentinel before a thread waits for the message. Of a message that has not come yet the
engine asks once or twice, and each wake-up of the thread takes Python's lock from the computing thread.
"""
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


class _Arrival:
    """Receives into `tensors` that have been posted to Gloo, from rank `peer` of `group`."""

    __slots__ = ("_error", "_tail", "_works")

    def __init__(self, group: Communicator, peer: int, tensors: Sequence[Tensor]) -> None:
        large = [tensor for tensor in tensors if tensor.nbytes >= _SENTINEL_BYTES]
        self._tail: ctypes.c_uint64 | None = None
        if large:
            # Tensors that are sent after this one are a few bytes each, which arrive immediately after it.
            self._tail = ctypes.c_uint64.from_address(large[-1].data_ptr() + large[-1].nbytes - _SENTINEL_BYTES)
            self._tail.value = _SENTINEL
        self._works: list[CommunicatorWork] = []
        self._error: Exception | None = None
        """An error of a broken connection is raised to the waiter, and not when the receive is posted."""
        try:
            self._works += [group.recv([tensor], peer, 0) for tensor in tensors]
        except Exception as error:
            self._error = error

    def has_arrived(self) -> bool:
        """Whether the message is known to have arrived: its sentinel is overwritten, or it has no bytes."""
        return not self._works or (self._tail is not None and self._tail.value != _SENTINEL)

    def wait(self) -> None:
        """Blocks until Gloo has received all tensors. It waits only once for each: a second wait would never return."""
        if self._error is not None:
            raise self._error
        works, self._works = self._works, []
        for work in works:
            work.wait()


class _GlooReceive(PostedReceive):
    """A receive that has been posted here."""

    __slots__ = ("arrival", "bytes", "looks", "result", "specs", "staged", "tensors")

    def __init__(self, inbox: "GlooInbox", kind: Hashable) -> None:
        super().__init__(inbox, kind)
        self.arrival: _Arrival | None = None
        """Set when the receive is posted to Gloo, which requires that its kind is known."""
        self.specs: Specs = ()
        self.tensors: Sequence[Tensor] = ()
        """Host tensors, one for each spec that is not None."""
        self.staged: Staged | None = None
        """Device tensors, if the thread has started to copy them."""
        self.bytes = self.looks = 0
        """The size of the message, and how often `poll` has looked for it."""
        self.result: PendingResult | None = None
        """Set if the thread waits for the message."""


class GlooInbox:
    """The receiving end of the edge of `kinds`. The sender is rank `peer` of `group`, which connects the two. `staging`
    brings the tensors to the device.
    """

    def __init__(
        self, kinds: ReceivedKinds, group: Communicator, peer: int, staging: Staging, timeout: Timeout
    ) -> None:
        self._kinds, self._edge = kinds, kinds.edge
        self._group, self._peer = group, peer
        self._staging = staging
        self._timeout = timeout
        self._spin_policy = SpinPolicy()
        self._unposted: deque[_GlooReceive] = deque()
        """Receives that are not posted to Gloo yet, oldest first."""
        self._header: PendingResult | None = None
        """The header for the oldest unposted receive. The thread waits for it even if no receive is waited for, since
        the sender must be able to send what it has queued.
        """
        self._pending: dict[_GlooReceive, None] = {}
        """Receives that are posted to Gloo, oldest first. This keeps the memory that Gloo will write to."""
        self._pending_bytes = 0
        self._lock = threading.RLock()
        """Held, briefly, to change any of these attributes."""
        self._waits: queue.SimpleQueue[tuple[_Arrival, PendingResult, Callable[[], None] | None] | None] = (
            queue.SimpleQueue()
        )
        """What the thread waits for (a message or a header), the result to complete, and what to do in between."""
        self.thread: threading.Thread | None = None

    def post(self, kind: Hashable) -> PendingMessage:
        """Posts the receive of the next message, which is of `kind`."""
        receive = _GlooReceive(self, kind)
        with self._lock:
            self._unposted.append(receive)
            self._post_to_gloo()
            while len(self._pending) > _UNREAD and self._has_arrived(oldest := next(iter(self._pending))):
                self._deliver(oldest)
        return receive

    def poll(self, receive: _GlooReceive) -> bool:
        """Delivers the message of `receive` if it has arrived. Returns whether it has been delivered."""
        with self._lock:
            if receive.message is None and receive.arrival is not None:
                receive.looks += 1
                if receive.looks > _LOOKS and not receive.arrival.has_arrived():
                    # The message may have arrived without being seen.
                    self._hand_over_to_thread(receive)
                if self._has_arrived(receive):
                    self._deliver(receive)
        return receive.message is not None

    def wait(self, receive: _GlooReceive) -> None:
        """Blocks until the message of `receive` is delivered."""
        while receive.arrival is None:
            with self._lock:
                self._post_to_gloo(receive)
                header = self._header
            if receive.arrival is None and header is not None:
                header.wait()
        if receive.result is None and not self._spin(receive.arrival):
            with self._lock:
                self._hand_over_to_thread(receive)
        if receive.result is not None:
            receive.result.wait()
        with self._lock:
            if receive.message is None:
                self._deliver(receive)

    def join(self, seconds: float) -> bool:
        """Blocks until all posted receives are done, or for `seconds`. Returns False if a message may still come."""
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                if self._unposted:
                    self._post_to_gloo(self._unposted[-1])
                if not self._unposted or time.monotonic() > deadline:
                    self._hand_over_to_thread()
                    break
            time.sleep(0.01)
        if self.thread is not None:
            self._waits.put(None)
            self.thread.join(max(0.0, deadline - time.monotonic()))
        return not self._unposted and (self.thread is None or not self.thread.is_alive())

    def _post_to_gloo(self, wanted: _GlooReceive | None = None) -> None:
        """Posts the next receives to Gloo: as many as it should have, or all up to `wanted`. Stops at a kind that is
        not known yet, after posting the receive of its header.
        """
        while self._unposted and self._header is None:
            receive = self._unposted[0]
            specs = self._kinds.specs(receive.kind)
            if specs is None:
                # The messages before the header.
                self._hand_over_to_thread()
                page = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                self._header = self._start(_Arrival(self._group, self._peer, [page]), partial(self._take_header, page))
                return
            size = sum([spec.nbytes for spec in specs if spec is not None])
            full = len(self._pending) >= _POSTED_AHEAD and self._pending_bytes + size > _POSTED_AHEAD_BYTES
            if full and (wanted is None or wanted.arrival is not None):
                return
            known = [spec for spec in specs if spec is not None]
            receive.specs = specs
            receive.tensors = [self._staging.host_memory(spec.layout) for spec in known]
            buffers = [contiguous_view(tensor) for tensor in receive.tensors if tensor.nbytes]
            receive.arrival = _Arrival(self._group, self._peer, buffers)
            receive.bytes = size
            self._pending[receive] = None
            self._pending_bytes += size
            self._unposted.popleft()
            if self._staging.separate_memory:
                self._hand_over_to_thread()

    def _take_header(self, page: Tensor) -> None:
        """Reads the header of the oldest unposted receive; `page` has arrived."""
        text = page.numpy().tobytes()
        size = int.from_bytes(text[:8], "little")
        if size > MOST_HEADER_BYTES:
            raise TransportError(
                f"{self._edge}: expected a header of at most {MOST_HEADER_BYTES} bytes, found the length {size}. "
                "The ranks make different calls, so that one reads what was sent for something else: call the same "
                "methods of the Pipeline on every rank, in the same order"
            )
        if size > HEADER_BYTES - 8:
            rest = torch.empty(size - HEADER_BYTES + 8, dtype=torch.uint8)
            _Arrival(self._group, self._peer, [rest]).wait()
            text += rest.numpy().tobytes()
        with self._lock:
            self._kinds.read(self._unposted[0].kind, text[8 : 8 + size])
            self._header = None
            self._post_to_gloo()

    def _spin(self, arrival: _Arrival) -> bool:
        """Spins for a while. Returns whether the message has arrived."""
        deadline = self._spin_policy.deadline()
        while not arrival.has_arrived():
            if time.perf_counter() > deadline:
                return self._spin_policy.update(False)
            # Gloo's thread may need this core to write the message.
            _yield_core()
        return self._spin_policy.update(True)

    def _has_arrived(self, receive: _GlooReceive) -> bool:
        """Whether `_deliver` would return at once."""
        if receive.result is not None:
            return receive.result.ready()
        return receive.arrival is not None and receive.arrival.has_arrived()

    def _deliver(self, receive: _GlooReceive) -> None:
        """Assembles the message of `receive`, which has arrived."""
        assert receive.arrival is not None
        if receive.result is not None:
            receive.result.wait()
        else:
            try:
                receive.arrival.wait()
            except Exception as error:
                raise self._timeout.connection_error(str(self._edge), (self._edge.source,), error) from error
        arrived = self._staging.wait_for(receive.staged or self._staging.to_device(receive.tensors))
        receive.message = assemble(receive.specs, arrived)
        receive.tensors, receive.staged = (), None
        del self._pending[receive]
        self._pending_bytes -= receive.bytes
        self._post_to_gloo()

    def _hand_over_to_thread(self, last: _GlooReceive | None = None) -> None:
        """Makes the thread wait for all receives that are posted to Gloo, or for those up to `last`."""
        for receive in self._pending:
            if receive.result is None and receive.arrival is not None:
                then = partial(self._stage, receive) if self._staging.separate_memory else None
                receive.result = self._start(receive.arrival, then)
            if receive is last:
                return

    def _stage(self, receive: _GlooReceive) -> None:
        """Starts to copy the message of `receive` to the device."""
        receive.staged = self._staging.to_device(receive.tensors)

    def _start(self, arrival: _Arrival, then: Callable[[], None] | None) -> PendingResult:
        """Makes the thread wait for `arrival` and then call `then`. Returns the result that it will complete."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name=f"penstock receive {self._edge}", daemon=True)
            self.thread.start()
        result = PendingResult(str(self._edge), (self._edge.source,), self._timeout, self._staging)
        self._waits.put((arrival, result, then))
        return result

    def _run(self) -> None:
        self._staging.enter_thread()
        while (item := self._waits.get()) is not None:
            arrival, result, then = item
            try:
                arrival.wait()
                if then is not None:
                    then()
                result.complete()
            except Exception as error:
                result.complete(error=error)
            # Otherwise these references would keep the message alive until the next one arrives.
            del item, arrival, result, then
