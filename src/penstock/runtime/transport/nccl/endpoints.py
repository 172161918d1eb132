"""The two ends of an edge between processes with a GPU each, over an NCCL communicator of its own.

What NCCL is told to send or to receive is work of the GPU, in a stream of the communicator: it begins when the stream
that computes has come to where it was told, and the stream that computes goes on when it is done. NCCL knows no tags,
so that order is all that matches a receive with a send, and what two ranks send each other would wait for each other if
both directions shared a communicator.

While it waits for the other rank, a message keeps some of the GPU busy, and whatever waits for the whole GPU, such as
CUDA where it loads a kernel at its first use, waits for that rank as well. So NCCL is told of a receive when the
message is wanted, or in the first steps when it is known to be on its way (see send_notices.py), and never before.

A message is received into memory of the computing stream, which is the one that uses it and drops it.

Laws of this file:
  1. What NCCL reads is kept until it has been read; what it writes, until the computing stream waits for it; neither
     any longer. What is underway is what a peer has a part in: of receives, those that the computing stream waits for.
  2. The host waits for what the first message of a form will look like, which its sender tells, and where it is some
     messages ahead of its own device, since what the device has been told keeps its memory until it is done. It waits
     for messages in the first steps only, and looks for what others have said meanwhile.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Accelerator, Event
from penstock.runtime.devices.communicators import Communicator, Work, together
from penstock.runtime.transport.message_headers import SentForms, Specs, read_header
from penstock.runtime.transport.nccl.send_notices import SendNotices
from penstock.runtime.transport.nccl.watchdog import PendingWork
from penstock.runtime.transport.pending_receives import PostedReceive
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import Edge, PendingMessage

__all__ = ["EndpointOptions", "NcclInbox", "NcclOutbox"]

AHEAD = 4
"""Messages of an edge that the host is ahead of its device at most. Fewer, and a host that pauses for a moment keeps
its device waiting; more, and more messages lie in memory that the computation could use."""


class EndpointOptions(NamedTuple):
    """What an end of an edge is made of."""

    edge: Edge
    group: Communicator
    peer: int
    """The other end's rank in `group`."""
    accelerator: Accelerator
    notices: SendNotices
    timeout: Timeout
    check: Callable[[], None]
    """Raises why `group` was aborted, if it was."""


class _End:
    """What both ends have; `other` is the rank of the other one."""

    def __init__(self, line: EndpointOptions, other: int) -> None:
        self.edge, self.peers = line.edge, (other,)
        self.underway = PendingWork()
        self._group, self._peer = line.group, line.peer
        self._accelerator, self._notices = line.accelerator, line.notices
        self._patience, self._check = line.timeout, line.check

    def _tell(self, what: Callable[[list[Tensor], int, int], Work], tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Tells the GPU to do `what` with `tensors`, which leave no gaps in memory: as bytes, since NCCL knows fewer
        types of numbers than PyTorch.
        """
        rows = [tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in tensors]
        try:
            return together(self._group, [partial(what, [row], self._peer, 0) for row in rows])
        except RuntimeError as error:
            raise self._patience.broken(str(self.edge), self.peers, error) from error


class NcclOutbox(_End):
    """The sending end."""

    def __init__(self, line: EndpointOptions) -> None:
        super().__init__(line, line.edge.target)
        self.error: Exception | None = None
        """None: what goes wrong is seen where something is asked for."""
        self._forms = SentForms(line.edge)
        self._number = 0
        """Messages so far."""
        self._kept: deque[tuple[Sequence[Work], Sequence[Tensor]]] = deque()
        """What may still be read, oldest first."""
        self._told: deque[Event] = deque()
        """Where the computing stream was when it was told of the last messages."""

    def meet(self, token: Tensor) -> None:
        """Makes the connection, by sending `token`. Both ends call it."""
        self._send([token])

    def put(self, form: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message`."""
        self._check()
        self._release()
        header, tensors = self._forms.agree(form, message)
        self._send([tensor for tensor in tensors if tensor.nbytes])
        self._notices.sent(self.edge, self._number, header)
        self._number += 1
        if len(self._told) > AHEAD:
            self._told.popleft().synchronize()

    def flushed(self, seconds: float) -> bool:
        """Waits so long until everything has left; whether it has."""
        done = self.underway.finished(seconds)
        self._release()
        return done

    def close(self) -> None:
        """What is underway goes on."""

    def join(self, seconds: float) -> bool:
        """Waits so long until everything has left; whether it has."""
        return self.flushed(seconds)

    def _send(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        works = self._tell(self._group.send, tensors)
        for work in works:
            self.underway.add(work.is_completed)
        self._kept.append((works, tensors))
        self._told.append(self._accelerator.record(self._accelerator.current()))

    def _release(self) -> None:
        """Lets go of what has been read."""
        while self._kept and _are_done(self._kept[0][0]):
            works, _ = self._kept.popleft()
            for work in works:
                # PyTorch keeps what was sent until somebody waits for it, which costs nothing now.
                work.wait()


class _Posted(PostedReceive):
    """A receive that has been posted here, the `number`-th of its edge, and with NCCL once that has been told of it."""

    __slots__ = ("number", "specs", "tensors", "works")

    def __init__(self, inbox: "NcclInbox", form: Hashable, number: int) -> None:
        super().__init__(inbox, form)
        self.number = number
        self.specs: Specs = ()
        self.tensors: Sequence[Tensor] = ()
        self.works: Sequence[Work] | None = None


class NcclInbox(_End):
    """The receiving end, into memory of the device."""

    def __init__(self, line: EndpointOptions) -> None:
        super().__init__(line, line.edge.source)
        self._agreed: dict[Hashable, Specs] = {}
        self._unposted: deque[_Posted] = deque()
        """Receives that NCCL does not know of yet, oldest first."""
        self._number = 0
        """Receives so far."""
        self._notices.read_by(self.look)

    def meet(self, token: Tensor) -> None:
        """Makes the connection, by receiving `token`. Both ends call it."""
        self._follow(self._tell(self._group.recv, [token]))

    def post(self, form: Hashable) -> PendingMessage:
        """Posts the receive of the next message, which is of `form`."""
        ticket = _Posted(self, form, self._number)
        self._number += 1
        self._unposted.append(ticket)
        return ticket

    def bring(self, ticket: _Posted) -> bool:
        """Whether the message of `ticket` has come. Who asks wants it."""
        if ticket.message is None and self._is_told(ticket) and _are_done(ticket.works):
            self._finish(ticket)
        return ticket.message is not None

    def await_(self, ticket: _Posted) -> None:
        """Has the stream of this thread wait for the message of `ticket`."""
        self._patience.wait_for(partial(self._may_follow, ticket), str(self.edge), self.peers)
        self._finish(ticket)

    def look(self) -> None:
        """Tells NCCL of the receives of messages that are known to be on their way."""
        while self._unposted and self._notices.has(self.edge, self._unposted[0].number):
            if not self._open(self._unposted[0]):
                return

    def close(self) -> None:
        """Nothing is posted any more."""

    def join(self, seconds: float) -> bool:
        """Waits so long until nothing is underway; whether that is so."""
        return self.underway.finished(seconds)

    def _is_told(self, ticket: _Posted) -> bool:
        """Tells NCCL of all receives up to `ticket`, as far as their forms are known; whether it knows of `ticket`."""
        while ticket.works is None and self._open(self._unposted[0]):
            pass
        return ticket.works is not None

    def _may_follow(self, ticket: _Posted) -> bool:
        """Whether the computing stream may be told to wait for `ticket`."""
        self._check()
        told = self._is_told(ticket)
        if told and (not self._notices.careful or _are_done(ticket.works)):
            return True
        return self._notices.look()

    def _open(self, ticket: _Posted) -> bool:
        """Tells NCCL of `ticket`, the oldest that it does not know of; False if its form is not known."""
        specs = self._agreed.get(ticket.form)
        if specs is None:
            header = self._notices.header(self.edge, ticket.number)
            if header is None:
                return False
            specs = self._agreed[ticket.form] = read_header(header)
        known = [spec for spec in specs if spec is not None]
        current = self._accelerator.current()
        ticket.specs = specs
        ticket.tensors = [self._accelerator.device_memory(spec.layout, current) for spec in known]
        places = [place for spec, place in zip(known, ticket.tensors, strict=True) if spec.bytes]
        ticket.works = self._tell(self._group.recv, places) if places else ()
        self._unposted.popleft()
        return True

    def _finish(self, ticket: _Posted) -> None:
        assert ticket.works is not None
        self._follow(ticket.works)
        arrived = iter(ticket.tensors)
        ticket.message = tuple(
            [None if spec is None else next(arrived).requires_grad_(spec.requires_grad) for spec in ticket.specs]
        )
        ticket.tensors, ticket.works = (), ()

    def _follow(self, works: Sequence[Work]) -> None:
        # Before, since a wait may be the host's after all.
        tasks = [self.underway.add(work.is_completed) for work in works]
        for work in works:
            work.wait()
        if tasks:
            # A work holds the memory that it wrote to, for as long as the host has not seen that it is done.
            here = self._accelerator.record(self._accelerator.current())
            for task in tasks:
                task.is_done = here.query


def _are_done(works: Sequence[Work] | None) -> bool:
    return works is not None and all([work.is_completed() for work in works])
