"""The two endpoints of an edge between processes with one GPU each, over an NCCL communicator of its own.

A send or a receive of NCCL is work of the GPU, in a stream of the communicator. It starts when the stream that was
current as it was enqueued has reached that point, and the computing stream can wait for its end. So a send is enqueued
from the computing stream, which makes the message, and a receive from a stream without work: the message arrives while
the device computes. NCCL has no tags, so order
alone matches receives with sends. Each direction has a communicator of its own. If two ranks shared one and both sent
first, each rank's receive would wait behind its own send, and both sends would wait forever.

While an operation waits for the other rank, it occupies a part of the GPU. Whatever synchronizes the whole GPU, such as
CUDA when it loads a kernel at its first use, then waits for that rank as well. So a receive is enqueued when its
message is wanted, or in the first steps when its message has been announced (see send_notices.py), and never before.

A message is received into memory of that stream. The allocator keeps it until the computing stream has used it, too.

Invariants of this file:
  1. Memory that NCCL reads is kept until it has been read, and memory that NCCL writes until the computing stream waits
     for it. Neither is kept longer. The pending work of an endpoint is the work in which a peer takes part; of
     receives, only those that the computing stream waits for.
  2. Every message has a byte at least, so that the device of a receiver waits for its sender. A stage that gets no
     gradients would otherwise run ahead without a bound, and keep all of its outputs.
  3. The host blocks in three cases. It waits for the header of the first message of a kind. It waits for its own device
     when it is some messages ahead, since enqueued work keeps its memory until it is done. And in the first steps only,
     it waits for messages, and polls announcements meanwhile.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.collectives.timeouts import Timeout
from penstock.runtime.devices.accelerators import Accelerator, Event, Layout, Stream
from penstock.runtime.devices.communicators import Communicator, CommunicatorWork, coalesce
from penstock.runtime.transport.message_headers import ReceivedKinds, SentKinds, Specs, assemble
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.nccl.watchdog import PendingWork
from penstock.runtime.transport.pending_receives import PostedReceive
from penstock.runtime.transport.transport import Edge, PendingMessage

AHEAD = 4
"""How many messages of an edge the host may be ahead of its device. With fewer, a host that pauses for a moment would
leave its device idle. With more, messages would occupy memory that the computation could use.
"""

_BYTE: Layout = (torch.Size((1,)), (1,), torch.uint8)


class EndpointOptions(NamedTuple):
    """The parts that an endpoint is made of."""

    edge: Edge
    group: Communicator
    peer: int
    """The other end's rank in `group`."""
    accelerator: Accelerator
    receiving: Stream
    """Where receives are enqueued: it has no work, and all endpoints of a rank share it, since a GPU has few."""
    notices: SendNotices
    timeout: Timeout
    check: Callable[[], None]
    """Raises if `group` was aborted."""


class _NcclEndpoint:
    """What both kinds of endpoints share. `other` is the rank of the other end."""

    def __init__(self, options: EndpointOptions, other: int) -> None:
        self.edge, self.peers = options.edge, (other,)
        self.pending = PendingWork()
        self._group, self._peer = options.group, options.peer
        self._accelerator, self._notices = options.accelerator, options.notices
        self._timeout, self._check = options.timeout, options.check
        self._byte = self._accelerator.device_memory(_BYTE, self._accelerator.current())
        """What a message without tensors sends."""

    def _enqueue(
        self, operation: Callable[[list[Tensor], int, int], CommunicatorWork], tensors: Sequence[Tensor]
    ) -> Sequence[CommunicatorWork]:
        """Enqueues `operation` for each of `tensors`, which have no gaps in memory. They are sent as bytes, since NCCL
        knows fewer dtypes than PyTorch.
        """
        rows = [tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in tensors]
        try:
            return coalesce(self._group, [partial(operation, [row], self._peer, 0) for row in rows])
        except RuntimeError as error:
            if any(tensor.device.type == "cpu" for tensor in tensors):
                raise PenstockError(
                    f"a tensor on the CPU is among the messages {self.edge}: expected tensors on the GPU, which NCCL "
                    "can send. Move it there in the layer that makes it: .to(x.device)"
                ) from error
            raise self._timeout.connection_error(str(self.edge), self.peers, error) from error


class NcclOutbox(_NcclEndpoint):
    """The sending end."""

    waits_between_steps = True
    """Under `pipedream` and `2bw` the next step of the other rank receives messages of this one."""

    def __init__(self, options: EndpointOptions) -> None:
        super().__init__(options, options.edge.target)
        self.error: Exception | None = None
        """Always None. Errors are found by the watchdog and raised by `check`."""
        self._kinds = SentKinds(options.edge, on_host=False)
        self._number = 0
        """The number of messages so far."""
        self._kept: deque[tuple[Sequence[CommunicatorWork], Sequence[Tensor]]] = deque()
        """Tensors that NCCL may still read, with their sends, oldest first."""
        self._enqueued: deque[Event] = deque()
        """The position of the computing stream at each of the last sends."""

    def rehearse(self, token: Tensor) -> None:
        """Connects the two ends by sending `token`. Both ends call it."""
        self._send([token])

    def put(self, kind: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message`, and announces it."""
        self._check()
        self._release()
        header, tensors = self._kinds.agree(kind, message)
        self._send([tensor for tensor in tensors if tensor.nbytes] or [self._byte])
        self._notices.announce(self.edge, self._number, header)
        self._number += 1
        if len(self._enqueued) > AHEAD:
            self._enqueued.popleft().synchronize()

    def flushed(self, seconds: float) -> bool:
        """Blocks until everything has been sent, or for `seconds`. Returns whether it has been sent."""
        done = self.pending.wait(seconds)
        self._release()
        return done

    join = flushed

    def _send(self, tensors: Sequence[Tensor]) -> None:
        works = self._enqueue(self._group.send, tensors)
        for work in works:
            self.pending.add(work.is_completed)
        self._kept.append((works, tensors))
        self._enqueued.append(self._accelerator.record_event(self._accelerator.current()))

    def _release(self) -> None:
        """Releases the tensors that have been read."""
        while self._kept and _are_done(self._kept[0][0]):
            works, _ = self._kept.popleft()
            for work in works:
                # PyTorch keeps the tensors of a send until its work is waited for. The work is done, so this does not
                # block.
                work.wait()


class _NcclReceive(PostedReceive):
    """The receive of the `number`-th message of its edge. `works` is None until it is enqueued with NCCL."""

    __slots__ = ("number", "specs", "tensors", "works")

    def __init__(self, inbox: "NcclInbox", kind: Hashable, number: int) -> None:
        super().__init__(inbox, kind)
        self.number = number
        self.specs: Specs = ()
        self.tensors: Sequence[Tensor] = ()
        self.works: Sequence[CommunicatorWork] | None = None


class NcclInbox(_NcclEndpoint):
    """The receiving end, into memory of the device."""

    waits_between_steps = False

    def __init__(self, options: EndpointOptions) -> None:
        super().__init__(options, options.edge.source)
        self._kinds = ReceivedKinds(options.edge)
        self._receiving = options.receiving
        self._unposted: deque[_NcclReceive] = deque()
        """Receives that are not enqueued yet, oldest first."""
        self._number = 0
        """The number of receives so far."""
        self._notices.subscribe(self.enqueue_announced)

    def rehearse(self, token: Tensor) -> None:
        """Connects the two ends by receiving `token`. Both ends call it."""
        self._wait_on_stream(self._enqueue(self._group.recv, [token]))

    def post(self, kind: Hashable) -> PendingMessage:
        """Posts the receive of the next message, which is of `kind`."""
        receive = _NcclReceive(self, kind, self._number)
        self._number += 1
        self._unposted.append(receive)
        return receive

    def poll(self, receive: _NcclReceive) -> bool:
        """Delivers the message of `receive` if it has arrived. Returns whether it has been delivered. Calling it means
        that the message is wanted, so its receive is enqueued.
        """
        if receive.message is None and self._enqueue_up_to(receive) and _are_done(receive.works):
            self._finish(receive)
        return receive.message is not None

    def wait(self, receive: _NcclReceive) -> None:
        """Makes the current stream wait for the message of `receive`."""
        self._timeout.wait_for(partial(self._can_wait, receive), str(self.edge), self.peers)
        self._finish(receive)

    def enqueue_announced(self) -> None:
        """Enqueues the receives of messages that have been announced."""
        while self._unposted and self._notices.is_announced(self.edge, self._unposted[0].number):
            if not self._enqueue_receive(self._unposted[0]):
                return

    def join(self, seconds: float) -> bool:
        """Blocks until nothing is pending, or for `seconds`. Returns whether nothing is pending."""
        return self.pending.wait(seconds)

    def _enqueue_up_to(self, receive: _NcclReceive) -> bool:
        """Enqueues all receives up to `receive`, as far as their kinds are known. Returns whether `receive` is
        enqueued.
        """
        while receive.works is None and self._enqueue_receive(self._unposted[0]):
            pass
        return receive.works is not None

    def _can_wait(self, receive: _NcclReceive) -> bool:
        """Whether the computing stream may now wait for `receive`. Polls announcements if not."""
        self._check()
        enqueued = self._enqueue_up_to(receive)
        if enqueued and (not self._notices.announcing or _are_done(receive.works)):
            return True
        return self._notices.poll()

    def _enqueue_receive(self, receive: _NcclReceive) -> bool:
        """Enqueues `receive`, the oldest that is not enqueued. Returns False if its kind is not known yet."""
        specs = self._kinds.specs(receive.kind)
        if specs is None:
            header = self._notices.header(self.edge, receive.number)
            if header is None:
                return False
            specs = self._kinds.read(receive.kind, header)
        known = [spec for spec in specs if spec is not None]
        receive.specs = specs
        receive.tensors = [self._accelerator.device_memory(spec.layout, self._receiving) for spec in known]
        buffers = [tensor for tensor in receive.tensors if tensor.nbytes] or [self._byte]
        with self._accelerator.on(self._receiving):
            receive.works = self._enqueue(self._group.recv, buffers)
        self._unposted.popleft()
        self._notices.enqueued(self.edge, receive.number)
        return True

    def _finish(self, receive: _NcclReceive) -> None:
        assert receive.works is not None
        self._wait_on_stream(receive.works)
        for tensor in receive.tensors:
            self._accelerator.record_stream(tensor, self._accelerator.current())
        receive.message = assemble(receive.specs, receive.tensors)
        receive.tensors, receive.works = (), ()

    def _wait_on_stream(self, works: Sequence[CommunicatorWork]) -> None:
        # Added before the wait, which may block the host after all.
        tasks = [self.pending.add(work.is_completed) for work in works]
        for work in works:
            work.wait()
        if tasks:
            # A work keeps the memory that it wrote to until the host sees that it is done. This event is passed later
            # than the work, and keeps no memory.
            here = self._accelerator.record_event(self._accelerator.current())
            for task in tasks:
                task.is_done = here.query


def _are_done(works: Sequence[CommunicatorWork] | None) -> bool:
    return works is not None and all([work.is_completed() for work in works])
