"""The transport over ``torch.distributed``.

Every directed edge has a communicator and a thread of its own at either end. The threads post and wait, so that the
compute thread does neither: a send is a queue entry, a receive is there before it is asked for, and a wait can be
broken off when another rank has failed (a blocked Gloo wait cannot).

Shapes, types and what requires a gradient travel ahead of the first message of a form and are remembered at both ends;
later messages of that form are the bare tensors.

Tensors of a GPU pass through host memory, since the communicators are Gloo's.
"""

import atexit
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.failures import FailureBoard
from penstock.runtime.group_sums import GroupSum
from penstock.runtime.transport import Edge, Message, Ticket

__all__ = ["ProcessGroup"]

_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class _Spec:
    """What a receiver must know of a tensor before it comes; one for each entry of a message."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] = field(compare=False)
    """The dimensions from the outermost to the innermost in memory. It is kept, since what a layer computes may depend
    on it: dropout draws its mask in the order of memory, so that one process and many would differ.
    """

    @classmethod
    def of(cls, tensor: Tensor) -> "_Spec":
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad, tuple(order))

    def flatten(self, tensor: Tensor) -> Tensor:
        """`tensor` as it travels."""
        return tensor.detach().permute(self.order)

    def empty(self) -> tuple[Tensor, Tensor]:
        """A tensor like this, on the CPU, and the view of it to receive into."""
        flat = torch.empty([self.shape[dimension] for dimension in self.order], dtype=self.dtype)
        return flat.permute([self.order.index(dimension) for dimension in range(len(self.order))]), flat


_Specs = tuple[_Spec | None, ...]


@dataclass(slots=True)
class _Receipt:
    """A receive on its way. Filled by the edge's thread."""

    place: str
    peers: Sequence[int]
    """Whom it comes from."""
    board: FailureBoard
    timeout_seconds: float
    form: Hashable = None
    done: threading.Event = field(default_factory=threading.Event)
    message: Message = ()
    error: Exception | None = None

    def ready(self) -> bool:
        return self.done.is_set()

    def wait(self) -> Message:
        deadline = time.monotonic() + self.timeout_seconds
        while not self.done.wait(_POLL_SECONDS):
            self.board.check()
            if time.monotonic() > deadline:
                self.board.failed = True
                raise TransportError(
                    f"nothing came from {_named(self.peers)} for {self.timeout_seconds:g} s ({self.place}). It "
                    "hangs, is stopped, or has left the training loop earlier than this rank: look at its log, or "
                    "pass a larger timeout_seconds= if its work may take that long"
                )
        if self.error is not None:
            raise _broken(self.board, self.place, self.peers, self.error)
        return self.message


class ProcessGroup:
    """Messages between the ranks of the default process group, along `edges`, and sums over `groups` of them.

    Collective: every rank of the group must build it with the same edges and groups in the same order.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        rank: int,
        device: torch.device,
        board: FailureBoard,
        timeout_seconds: float,
        groups: Iterable[tuple[int, ...]] = (),
    ) -> None:
        self._board = board
        self._timeout_seconds = timeout_seconds
        self._outboxes: dict[Edge, _Outbox] = {}
        self._inboxes: dict[Edge, _Inbox] = {}
        for edge in edges:
            group = dist.new_group(
                [edge.source, edge.target], backend="gloo", timeout=timedelta(seconds=timeout_seconds + 60)
            )
            if edge.source == rank:
                self._outboxes[edge] = _Outbox(edge, group)
            elif edge.target == rank:
                self._inboxes[edge] = _Inbox(edge, group, device)
        self._sums: dict[tuple[int, ...], GroupSum] = {}
        for ranks in groups:
            group = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=timeout_seconds + 60))
            if rank in ranks:
                self._sums[ranks] = GroupSum(ranks, group, device)
        atexit.register(self._leave)

    def send(self, edge: Edge, form: Hashable, message: Sequence[Tensor | None]) -> None:
        outbox = self._outboxes[edge]
        if outbox.error is not None:
            raise _broken(self._board, str(edge), (edge.target,), outbox.error)
        outbox.put(form, message)

    def post(self, edge: Edge, form: Hashable) -> Ticket:
        receipt = _Receipt(str(edge), (edge.source,), self._board, self._timeout_seconds, form)
        self._inboxes[edge].receipts.put(receipt)
        return receipt

    def reduce(self, group: tuple[int, ...], rank: int, form: Hashable, tensor: Tensor) -> Ticket:
        others = [other for other in group if other != rank]
        receipt = _Receipt(f"the sum over ranks {list(group)}", others, self._board, self._timeout_seconds)
        self._sums[group].put(form, tensor, receipt)
        return receipt

    def flush(self) -> None:
        for edge, outbox in self._outboxes.items():
            sent = outbox.mark()
            while not sent.wait(_POLL_SECONDS):
                self._board.check()
                if outbox.error is not None:
                    raise _broken(self._board, str(edge), (edge.target,), outbox.error)

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._end()

    def _leave(self) -> None:
        """At the end of the process: delivers what was sent, and leaves no thread to the interpreter's ruin.

        A thread that Gloo wakes while the interpreter shuts down aborts the process. One that still waits for a message
        now does so because of a failure, so the process ends here and says so by its exit code.
        """
        if not self._end():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _end(self) -> bool:
        """Ends the threads; False if some still wait for a peer."""
        seconds = 0.5 if self._board.failed else 60.0
        ends: list[_Outbox | _Inbox | GroupSum]
        ends = [*self._outboxes.values(), *self._inboxes.values(), *self._sums.values()]
        for end in ends:
            end.close()
        deadline = time.monotonic() + seconds
        for end in ends:
            end.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(end.thread.is_alive() for end in ends)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "one of the ranks " + ", ".join(map(str, ranks))


def _broken(board: FailureBoard, place: str, peers: Sequence[int], error: Exception) -> Exception:
    """The error for a connection that one of `peers` has broken; raises the cause instead if a rank tells it."""
    if isinstance(error, TransportError):
        return error
    # A broken connection is often noticed before its cause has been written down.
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        board.check()
        time.sleep(0.05)
    board.failed = True
    result = TransportError(
        f"{_named(peers)} closed its connection to this rank ({place}). It was probably killed (out of memory?) or "
        f"left the training loop earlier: look at its log. Gloo says: {error}"
    )
    result.__cause__ = error
    return result


class _Outbox:
    """The sending end of an edge."""

    def __init__(self, edge: Edge, group: dist.ProcessGroup) -> None:
        self.error: Exception | None = None
        self._edge = edge
        self._group = group
        self._agreed: dict[Hashable, _Specs] = {}
        self._messages: queue.SimpleQueue[tuple[bytes | None, list[Tensor]] | threading.Event | None]
        self._messages = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"penstock send {edge}", daemon=True)
        self.thread.start()

    def put(self, form: Hashable, message: Sequence[Tensor | None]) -> None:
        """Queues `message`, with its header if it is the first of `form`."""
        header = None
        specs = tuple(None if t is None else _Spec.of(t) for t in message)
        agreed = self._agreed.setdefault(form, specs)
        if agreed is specs:
            header = pickle.dumps(specs)
        elif agreed != specs:
            raise TransportError(
                f"{self._edge}: microbatches of the same input shapes must make tensors of the same shapes. Agreed at "
                f"the first one: {_describe(agreed)}; now: {_describe(specs)}. The model's shapes or used outputs "
                "depend on its data: make them depend on the input shapes only"
            )
        pairs = zip(agreed, message, strict=True)
        self._messages.put((header, [spec.flatten(t) for spec, t in pairs if spec is not None and t is not None]))

    def mark(self) -> threading.Event:
        """An event that is set when everything queued so far has been sent."""
        sent = threading.Event()
        self._messages.put(sent)
        return sent

    def close(self) -> None:
        """Ends the thread after everything queued has been sent."""
        self._messages.put(None)

    def _run(self) -> None:
        while (item := self._messages.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            header, tensors = item
            try:
                if header is not None:
                    payload = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                    self._send(torch.tensor([payload.numel()]))
                    self._send(payload)
                for tensor in tensors:
                    self._send(tensor)
            except Exception as error:
                self.error = error
                return
            # What has been sent is not kept alive until the next message.
            del item, tensors

    def _send(self, tensor: Tensor) -> None:
        work = dist.isend(tensor.cpu().contiguous(), dst=self._edge.target, group=self._group)
        assert work is not None
        work.wait()


class _Inbox:
    """The receiving end of an edge."""

    def __init__(self, edge: Edge, group: dist.ProcessGroup, device: torch.device) -> None:
        self.receipts: queue.SimpleQueue[_Receipt | None] = queue.SimpleQueue()
        self._edge = edge
        self._group = group
        self._device = device
        self._agreed: dict[Hashable, _Specs] = {}
        self.thread = threading.Thread(target=self._run, name=f"penstock receive {edge}", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends the thread after everything posted has come."""
        self.receipts.put(None)

    def _run(self) -> None:
        while (receipt := self.receipts.get()) is not None:
            try:
                receipt.message = self._receive(receipt.form)
            except Exception as error:
                receipt.error = error
            receipt.done.set()
            del receipt

    def _receive(self, form: Hashable) -> Message:
        if form not in self._agreed:
            size = self._fill(torch.empty(1, dtype=torch.int64))
            header = self._fill(torch.empty(int(size), dtype=torch.uint8))
            self._agreed[form] = pickle.loads(header.numpy().tobytes())
        tensors: list[Tensor | None] = []
        for spec in self._agreed[form]:
            if spec is None:
                tensors.append(None)
                continue
            tensor, flat = spec.empty()
            self._fill(flat)
            tensors.append(tensor.to(self._device).requires_grad_(spec.requires_grad))
        return tuple(tensors)

    def _fill(self, tensor: Tensor) -> Tensor:
        work = dist.irecv(tensor, src=self._edge.source, group=self._group)
        assert work is not None
        work.wait()
        return tensor


def _describe(specs: _Specs) -> str:
    parts = ["none" if spec is None else f"{tuple(spec.shape)} {spec.dtype}" for spec in specs]
    return "[" + ", ".join(parts) + "]"
