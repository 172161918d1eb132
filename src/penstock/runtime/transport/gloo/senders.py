"""The sending end of an edge between processes that share no memory, over a Gloo communicator.

A send posts its tensors and returns. Gloo writes what the connection takes at once, and its own thread the rest; what
is posted must stay as it is until then. A thread of ours keeps it, and looks after it a while later for many messages
at a time, since whoever is woken takes Python's lock from the computing thread. Large messages, and those of a GPU,
which are copied to host memory first, are posted by that thread, too.
"""

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Event
from penstock.runtime.devices.communicators import Communicator, Work
from penstock.runtime.devices.staging import Staged, Staging, on_host
from penstock.runtime.transport.message_headers import SentForms
from penstock.runtime.transport.transport import Edge

__all__ = ["HEADER_BYTES", "GlooOutbox"]

HEADER_BYTES = 4096
"""A header travels in a message of so many bytes, the first eight of which say how long it is; what finds no room
there follows in a second one."""
SWEEP_SECONDS = 5e-3
"""How long the thread waits for more before it looks after what has been sent."""
_LARGE_BYTES = 2**20
"""From here on posting takes longer than waking the thread up."""


@dataclass(slots=True, eq=False)
class _Sent:
    """The tensors of a message, and what Gloo says of each; nothing yet if the thread is to post them."""

    tensors: Sequence[Tensor]
    """On the host, from `there` on."""
    there: Event
    works: Sequence[Work] | None = None


class GlooOutbox:
    """The sending end of `edge`, for tensors that `staging` brings. The receiver is the rank `peer` of `group`, which
    has these two.
    """

    def __init__(self, edge: Edge, group: Communicator, peer: int, staging: Staging) -> None:
        self.error: Exception | None = None
        self._staging = staging
        self._group, self._peer = group, peer
        self._forms = SentForms(edge)
        self._sent: deque[_Sent] = deque()
        """What has not left for sure, oldest first."""
        self._left = self._posted = 0
        """How many messages were left to the thread to post, and how many of these it has posted."""
        self._change = threading.Condition()
        self._idle = self._hurried = self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"penstock send {edge}", daemon=True)
        self._thread.start()

    def put(self, form: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message`, with its header if it is the first of `form`."""
        header, tensors = self._forms.agree(form, message)
        if header is not None:
            self._put(on_host(_pages(header)))
        self._put(self._staging.to_host([tensor for tensor in tensors if tensor.nbytes]))

    def flushed(self, seconds: float) -> bool:
        """Waits so long until everything has left; whether it has."""
        with self._change:
            self._hurried = True
            self._change.notify_all()
            return self._change.wait_for(lambda: not self._sent, seconds)

    def close(self) -> None:
        """Ends the thread after everything has left."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def join(self, seconds: float) -> bool:
        """Waits so long for the end; whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _put(self, staged: Staged) -> None:
        if self.error is not None:
            return
        tensors, there = staged
        sent = _Sent(tensors, there)
        small = sum([tensor.nbytes for tensor in tensors]) < _LARGE_BYTES
        if small and self._left == self._posted and there.query():
            try:
                sent.works = self._post(tensors)
            except Exception as error:
                self._fail(error)
                return
        else:
            self._left += 1
        # Without a lock, which the thread might be holding while it waits for Python's.
        self._sent.append(sent)
        if self._idle or sent.works is None:
            with self._change:
                self._change.notify_all()

    def _post(self, tensors: Sequence[Tensor]) -> Sequence[Work]:
        return [self._group.send([_numbers(tensor)], self._peer, 0) for tensor in tensors]

    def _fail(self, error: Exception) -> None:
        """Nothing leaves any more."""
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
        """Posts what is left to the thread, and waits until that and all before it has left; False at the end."""
        with self._change:
            self._idle = True
            self._change.wait_for(lambda: self._sent or self._closed)
            self._idle = False
            if not self._sent:
                return False
            self._change.wait_for(
                lambda: self._left > self._posted or self._hurried or self._closed, timeout=SWEEP_SECONDS
            )
        messages = list(self._sent)
        for message in messages:
            if message.works is None:
                message.there.synchronize()
                message.works = self._post(message.tensors)
                self._posted += 1
        for message in messages:
            for work in message.works or ():
                work.wait()
            if self.error is not None:
                return False
            self._sent.popleft()
        with self._change:
            self._hurried = self._hurried and bool(self._sent)
            self._change.notify_all()
        return True


def _numbers(tensor: Tensor) -> Tensor:
    """Those of `tensor`, which follow each other in memory, in whatever order of dimensions."""
    return tensor if tensor.is_contiguous() else tensor.detach().as_strided((tensor.numel(),), (1,))


def _pages(header: bytes) -> list[Tensor]:
    """`header` in one message or two."""
    framed = len(header).to_bytes(8, "little") + header
    first, rest = framed[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), framed[HEADER_BYTES:]
    return [torch.frombuffer(bytearray(page), dtype=torch.uint8) for page in (first, rest) if page]
