"""The two ends of an edge between processes that share no memory: a Gloo communicator, and a thread at either end.

The threads post and wait, so that the compute thread does neither: a send is a queue entry, a receive is there before
it is asked for, and a wait can be broken off when another rank has failed (a blocked Gloo wait cannot).

Tensors of a GPU pass through host memory, since the communicators are Gloo's.
"""

import queue
import threading
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.forms import SentForms, Specs, read_header
from penstock.runtime.patience import POLL_SECONDS, Patience
from penstock.runtime.transport import Edge, Message, Ticket

__all__ = ["GlooInbox", "GlooOutbox", "Receipt"]


class Receipt:
    """A message from `peers` on its way, which a thread will `leave` here."""

    __slots__ = ("_empty", "_error", "_message", "_patience", "_peers", "_place", "form")

    def __init__(self, place: str, peers: Sequence[int], patience: Patience, form: Hashable = None) -> None:
        self.form = form
        self._place, self._peers, self._patience = place, peers, patience
        self._message: Message = ()
        self._error: Exception | None = None
        # Held until the message is there. An event does the same with a lock of its own for every waiter.
        self._empty = threading.Lock()
        self._empty.acquire()

    def leave(self, message: Message = (), error: Exception | None = None) -> None:
        """Called once, with what has come or why nothing will."""
        self._message, self._error = message, error
        self._empty.release()

    def ready(self) -> bool:
        return not self._empty.locked()

    def wait(self) -> Message:
        if self._empty.locked():
            deadline = self._patience.deadline()
            while not self._empty.acquire(timeout=POLL_SECONDS):
                self._patience.check(deadline, self._place, self._peers)
            # For who asks again.
            self._empty.release()
        if self._error is not None:
            raise self._patience.broken(self._place, self._peers, self._error)
        return self._message


class GlooOutbox:
    """The sending end of `edge`, over the communicator `group` of its two ranks."""

    def __init__(self, edge: Edge, group: dist.ProcessGroup) -> None:
        self.error: Exception | None = None
        self._edge = edge
        self._group = group
        self._forms = SentForms(edge)
        self._messages: queue.SimpleQueue[list[Tensor] | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock send {edge}", daemon=True)
        self._thread.start()

    def put(self, form: Hashable, message: Sequence[Tensor | None]) -> None:
        """Queues `message`, with its header if it is the first of `form`."""
        header, tensors = self._forms.agree(form, message)
        if header is not None:
            payload = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            self._messages.put([torch.tensor([payload.numel()]), payload])
        self._messages.put([tensor.detach() for tensor in tensors])

    def flushed(self, seconds: float) -> bool:
        """Waits so long until everything queued so far has been sent; whether it has."""
        sent = threading.Event()
        self._messages.put(sent)
        return sent.wait(seconds)

    def close(self) -> None:
        """Ends the thread after everything queued has been sent."""
        self._messages.put(None)

    def join(self, seconds: float) -> bool:
        """Waits so long for the end; whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._messages.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._send(item)
            except Exception as error:
                self.error = error
                return
            # What has been sent is not kept alive until the next message.
            del item

    def _send(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            # Its numbers follow each other in memory, in whatever order of dimensions.
            numbers = tensor.cpu().as_strided((tensor.numel(),), (1,))
            work = dist.isend(numbers, dst=self._edge.target, group=self._group)
            assert work is not None
            work.wait()


class GlooInbox:
    """The receiving end of `edge`, for tensors on `device`."""

    def __init__(self, edge: Edge, group: dist.ProcessGroup, device: torch.device, patience: Patience) -> None:
        self._edge = edge
        self._group = group
        self._device = device
        self._patience = patience
        self._agreed: dict[Hashable, Specs] = {}
        self._receipts: queue.SimpleQueue[Receipt | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock receive {edge}", daemon=True)
        self._thread.start()

    def post(self, form: Hashable) -> Ticket:
        """Posts the receive of the next message, which is of `form`."""
        receipt = Receipt(str(self._edge), (self._edge.source,), self._patience, form)
        self._receipts.put(receipt)
        return receipt

    def close(self) -> None:
        """Ends the thread after everything posted has come."""
        self._receipts.put(None)

    def join(self, seconds: float) -> bool:
        """Waits so long for the end; whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (receipt := self._receipts.get()) is not None:
            try:
                receipt.leave(self._receive(receipt.form))
            except Exception as error:
                receipt.leave(error=error)
            del receipt

    def _receive(self, form: Hashable) -> Message:
        if form not in self._agreed:
            size = self._fill(torch.empty(1, dtype=torch.int64))
            header = self._fill(torch.empty(int(size), dtype=torch.uint8))
            self._agreed[form] = read_header(header.numpy().tobytes())
        tensors: list[Tensor | None] = []
        for spec in self._agreed[form]:
            if spec is None:
                tensors.append(None)
                continue
            tensor = spec.empty().detach()
            self._fill(tensor.permute(spec.order))
            tensors.append(tensor.to(self._device).requires_grad_(spec.requires_grad))
        return tuple(tensors)

    def _fill(self, tensor: Tensor) -> Tensor:
        work = dist.irecv(tensor, src=self._edge.source, group=self._group)
        assert work is not None
        work.wait()
        return tensor
