"""The two ends of an edge between processes with a GPU each, over an NCCL communicator of its own.

What NCCL is told to send or to receive is work of the GPU, in a stream of the communicator: it begins when the stream
that computes has come to where it was told, and the stream that computes goes on when it is done. The host waits for
none of it. NCCL knows no tags, so that order is all that matches a receive with a send, and what two ranks send each
other would wait for each other if both directions shared a communicator.

A message is received into memory of the computing stream, which is the one that uses it and drops it.

Laws of this file:
  1. What NCCL reads is kept until it has been read; what it writes, until the computing stream waits for it. What is
     underway is what a peer has a part in: of receives, those that the computing stream waits for.
  2. The host waits for one thing only: what the first message of a form will look like, which its sender says through
     the store at which the processes met.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from penstock.runtime.accelerators import Accelerator
from penstock.runtime.forms import SentForms, Specs, read_header
from penstock.runtime.patience import Patience
from penstock.runtime.tickets import Posted
from penstock.runtime.transport import Edge, Ticket
from penstock.runtime.watches import Underway

__all__ = ["Communicator", "Line", "NcclInbox", "NcclOutbox", "Work"]

OPEN = 2
"""NCCL knows of so many receives of an edge, one in use and one on its way; each takes the memory of a message."""


class Work(Protocol):
    """What a GPU has been told to do."""

    def is_completed(self) -> bool:
        """Whether it is done."""

    def wait(self) -> Any:
        """Has the stream of this thread wait for it."""


class Communicator(Protocol):
    """A process's end of a communicator: as a ``torch.distributed.ProcessGroup``."""

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int, /) -> Work:
        """Tells the GPU to send them."""

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int, /) -> Work:
        """Tells the GPU to receive them."""


class _Headers:
    """What the sender of `edge` says of each form, one after the other."""

    def __init__(self, store: Store, edge: Edge) -> None:
        self._store, self._name = store, f"header {edge}"
        self._number = 0

    def tell(self, header: bytes) -> None:
        self._store.set(self._key(), header.hex())
        self._number += 1

    def ask(self) -> bytes | None:
        """The next one; None if it has not been told."""
        key = self._key()
        if not self._store.check([key]):
            return None
        self._number += 1
        return bytes.fromhex(self._store.get(key).decode())

    def _key(self) -> str:
        return f"{self._name} {self._number}"


class Line(NamedTuple):
    """What an end of an edge is made of."""

    edge: Edge
    group: Communicator
    peer: int
    """The other end's rank in `group`."""
    store: Store
    patience: Patience
    check: Callable[[], None]
    """Raises why `group` was aborted, if it was."""


class _End:
    """What both ends have; `other` is the rank of the other one."""

    def __init__(self, line: Line, other: int) -> None:
        self.edge, self.peers = line.edge, (other,)
        self.underway = Underway()
        self._group, self._peer = line.group, line.peer
        self._headers = _Headers(line.store, line.edge)
        self._patience, self._check = line.patience, line.check

    def close(self) -> None:
        """What is underway goes on."""

    def join(self, seconds: float) -> bool:
        """Waits so long until nothing is underway; whether that is so."""
        return self.underway.finished(seconds)

    def _tell(self, what: Callable[[list[Tensor], int, int], Work], tensor: Tensor) -> Work:
        """Tells the GPU to do `what` with `tensor`, which leaves no gaps in memory: as bytes, since NCCL knows fewer
        types of numbers than PyTorch.
        """
        try:
            return what([tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)], self._peer, 0)
        except RuntimeError as error:
            raise self._patience.broken(str(self.edge), self.peers, error) from error


class NcclOutbox(_End):
    """The sending end."""

    def __init__(self, line: Line) -> None:
        super().__init__(line, line.edge.target)
        self.error: Exception | None = None
        """None: what goes wrong is seen where something is asked for."""
        self._forms = SentForms(line.edge)

    def meet(self, token: Tensor) -> None:
        """Makes the connection, by sending `token`. Both ends call it."""
        self._send(token)

    def put(self, form: Hashable, message: Sequence[Tensor | None]) -> None:
        """Sends `message`."""
        self._check()
        header, tensors = self._forms.agree(form, message)
        if header is not None:
            self._headers.tell(header)
        for tensor in tensors:
            if tensor.nbytes:
                self._send(tensor)

    def flushed(self, seconds: float) -> bool:
        """Waits so long until everything has left; whether it has."""
        return self.join(seconds)

    def _send(self, tensor: Tensor) -> None:
        self.underway.add(self._tell(self._group.send, tensor).is_completed, tensor)


class _Posted(Posted):
    """A receive that has been posted here, and, once its form is known, with NCCL."""

    __slots__ = ("specs", "tensors", "works")

    def __init__(self, inbox: "NcclInbox", form: Hashable) -> None:
        super().__init__(inbox, form)
        self.specs: Specs = ()
        self.tensors: Sequence[Tensor] = ()
        self.works: Sequence[Work] | None = None


class NcclInbox(_End):
    """The receiving end, into memory of `accelerator`."""

    def __init__(self, line: Line, accelerator: Accelerator) -> None:
        super().__init__(line, line.edge.source)
        self._accelerator = accelerator
        self._agreed: dict[Hashable, Specs] = {}
        self._unposted: deque[_Posted] = deque()
        """Receives that NCCL does not know of yet, oldest first."""
        self._open = 0
        """How many of those that it knows of nobody has waited for."""

    def meet(self, token: Tensor) -> None:
        """Makes the connection, by receiving `token`. Both ends call it."""
        self._follow(self._tell(self._group.recv, token))

    def post(self, form: Hashable) -> Ticket:
        """Posts the receive of the next message, which is of `form`."""
        ticket = _Posted(self, form)
        self._unposted.append(ticket)
        self._arm()
        return ticket

    def bring(self, ticket: _Posted) -> bool:
        """Whether the message of `ticket` has come."""
        if ticket.message is None:
            self._arm()
            if ticket.works is not None and all([work.is_completed() for work in ticket.works]):
                self._finish(ticket)
        return ticket.message is not None

    def await_(self, ticket: _Posted) -> None:
        """Has the stream of this thread wait for the message of `ticket`."""
        self._check()
        self._patience.wait_for(partial(self._is_posted, ticket), str(self.edge), self.peers)
        self._finish(ticket)

    def _is_posted(self, ticket: _Posted) -> bool:
        """Tells NCCL of `ticket` if its form is known; whether NCCL knows of it."""
        self._arm(ticket)
        return ticket.works is not None

    def _arm(self, wanted: _Posted | None = None) -> None:
        """Tells NCCL of the next receives: as many as it should know of, or all up to `wanted`."""
        while self._unposted and (self._open < OPEN or (wanted is not None and wanted.works is None)):
            ticket = self._unposted[0]
            specs = self._agreed.get(ticket.form)
            if specs is None:
                header = self._headers.ask()
                if header is None:
                    return
                specs = self._agreed[ticket.form] = read_header(header)
            known = [spec for spec in specs if spec is not None]
            current = self._accelerator.current()
            ticket.specs = specs
            ticket.tensors = [self._accelerator.device_memory(spec.layout, current) for spec in known]
            ticket.works = [
                self._tell(self._group.recv, place)
                for spec, place in zip(known, ticket.tensors, strict=True)
                if spec.bytes
            ]
            self._open += 1
            self._unposted.popleft()

    def _finish(self, ticket: _Posted) -> None:
        assert ticket.works is not None
        for work in ticket.works:
            self._follow(work)
        arrived = iter(ticket.tensors)
        ticket.message = tuple(
            [None if spec is None else next(arrived).requires_grad_(spec.requires_grad) for spec in ticket.specs]
        )
        ticket.tensors, ticket.works = (), ()
        self._open -= 1
        self._arm()

    def _follow(self, work: Work) -> None:
        # Before, since a wait may be the host's after all.
        self.underway.add(work.is_completed)
        work.wait()
