"""The sending end of an edge between processes without shared memory, over a Gloo communicator.

A send posts its tensors and returns. Gloo writes what the connection accepts at once, and its own thread writes the
rest; the tensors must stay unchanged until then. A thread of ours keeps them alive. It waits a while and then cleans up
after many messages at a time, since each wake-up takes Python's lock from the computing thread. That thread also posts
large messages, and messages of a GPU, which are copied to host memory first.
"""

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Event
from penstock.runtime.devices.communicators import Communicator, CommunicatorWork
from penstock.runtime.devices.staging import Staged, Staging, on_host
from penstock.runtime.transport.message_headers import SentKinds, contiguous_view

HEADER_BYTES = 4096
"""A header travels in a message of this size, which begins with the length of the header in eight bytes. If the header
does not fit, the rest follows in a second message.
"""
_SWEEP_SECONDS, _SWEEP_BYTES = 50e-3, 2**22
"""How long the thread collects messages before it cleans up after them, and how many bytes."""
_LARGE_BYTES = 2**20
"""From this size on, posting a message takes longer than waking the thread."""


@dataclass(slots=True, eq=False)
class _GlooSend:
    """The tensors of a message. `works` is None until they are posted, if the thread is to post them."""

    tensors: Sequence[Tensor]
    """Host tensors, which hold their values after `ready`."""
    ready: Event
    works: Sequence[CommunicatorWork] | None = None


class GlooOutbox:
    """The sending end of the edge of `kinds`. The receiver is rank `peer` of `group`, which connects the two. `staging`
    brings the tensors to the host.
    """

    def __init__(self, kinds: SentKinds, group: Communicator, peer: int, staging: Staging) -> None:
        self.error: Exception | None = None
        self._staging = staging
        self._group, self._peer = group, peer
        self._kinds = kinds
        self._sent: deque[_GlooSend] = deque()
        """Messages that may not have been sent yet, oldest first."""
        self._deferred = self._posted = 0
        """The number of messages that the thread is to post, and how many of these it has posted."""
        self._unswept = 0
        """The bytes of the messages since the thread last began to clean up."""
        self._change = threading.Condition()
        self._idle = self._flushing = self._closed = False
        self.thread = threading.Thread(target=self._run, name=f"penstock send {kinds.edge}", daemon=True)
        self.thread.start()

    def put(self, kind: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message`, with its header if it is the first of `kind`."""
        header, tensors = self._kinds.agree(kind, message)
        if header is not None:
            self._put(on_host(_pages(header)))
        self._put(self._staging.to_host([tensor for tensor in tensors if tensor.nbytes]))

    def flushed(self, seconds: float) -> bool:
        """Blocks until everything has been sent, or for `seconds`. Returns whether it has been sent."""
        with self._change:
            self._flushing = True
            self._change.notify_all()
            return self._change.wait_for(lambda: not self._sent, seconds)

    def join(self, seconds: float) -> bool:
        """Ends the thread after everything has been sent. Blocks until it has ended, or for `seconds`. Returns whether
        it has ended.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def _put(self, staged: Staged) -> None:
        if self.error is not None:
            return
        tensors, ready = staged
        sent = _GlooSend(tensors, ready)
        size = sum([tensor.nbytes for tensor in tensors])
        if size < _LARGE_BYTES and self._deferred == self._posted and ready.query():
            try:
                sent.works = self._post(tensors)
            except Exception as error:
                self._fail(error)
                return
        else:
            self._deferred += 1
        # Without the lock: the thread may hold it while it waits for Python's own.
        self._sent.append(sent)
        # Also without it: if both threads write at once, the next sweep comes a message early or late.
        self._unswept += size
        if self._idle or sent.works is None or self._unswept > _SWEEP_BYTES:
            with self._change:
                self._change.notify_all()

    def _post(self, tensors: Sequence[Tensor]) -> Sequence[CommunicatorWork]:
        return [self._group.send([contiguous_view(tensor)], self._peer, 0) for tensor in tensors]

    def _fail(self, error: Exception) -> None:
        """Stops sending because of `error`."""
        with self._change:
            self.error = error
            self._sent.clear()
            self._closed = True
            self._change.notify_all()

    def _run(self) -> None:
        try:
            self._staging.enter_thread()
            while self._sweep():
                pass
        except Exception as error:
            self._fail(error)

    def _sweep(self) -> bool:
        """Posts the messages that were left to the thread, and waits until they and all earlier ones have been sent.
        Returns False at the end.
        """
        with self._change:
            self._idle = True
            self._change.wait_for(lambda: self._sent or self._closed)
            self._idle = False
            if not self._sent:
                return False
            self._change.wait_for(self._is_due, timeout=_SWEEP_SECONDS)
            self._unswept = 0
        messages = list(self._sent)
        for message in messages:
            if message.works is None:
                message.ready.synchronize()
                message.works = self._post(message.tensors)
                self._posted += 1
        for message in messages:
            for work in message.works or ():
                work.wait()
            if self.error is not None:
                return False
            self._sent.popleft()
        with self._change:
            self._flushing = self._flushing and bool(self._sent)
            self._change.notify_all()
        return True

    def _is_due(self) -> bool:
        """Whether the thread should not wait for more messages."""
        return self._deferred > self._posted or self._unswept > _SWEEP_BYTES or self._flushing or self._closed


def _pages(header: bytes) -> list[Tensor]:
    """Puts `header` into one message or two."""
    framed = len(header).to_bytes(8, "little") + header
    first, rest = framed[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), framed[HEADER_BYTES:]
    return [torch.frombuffer(bytearray(page), dtype=torch.uint8) for page in (first, rest) if page]
