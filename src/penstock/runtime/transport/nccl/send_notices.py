"""What senders say of the messages that GPUs send each other, through the store at which the processes met.

The first message of a form brings a header: what its tensors look like. That is told for as long as a pipeline lives.

In the first steps, and for a while after a new form, senders also say of every message that it is on its way, and
receivers tell NCCL of receives whose messages are. There a host may stand still at any computation until all that its
device has been told is done: CUDA may wait for the device when it loads a kernel at its first use, and so do compilers
and an allocator that runs short. A device is done when its sends have been received; so no rank may wait for that with
a receive untold whose message is on its way. Each rank first says what it sends, and then looks for what others have
said, before it computes; and it computes only when all that it has received is there. Of ranks that stand still in a
circle, each with a send that the next one has not received, the last one to look has seen all that the others said. So
there is no such circle. Sums over replicas begin when they are waited for, and not within a backward: there a rank that
stands still would wait for the last backward of another replica, which may wait for what this rank is yet to send.

Later, receives are told of when they are wanted: a host that has all kernels at hand waits for no device.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from penstock.runtime.transport.transport import Edge

__all__ = ["SendNotices", "Whiteboard"]

SETTLED_PARTS = 2
"""So many parts of the schedule after a new form, the one that brings it included, everything has run with it."""


class Whiteboard(Protocol):
    """As a store of ``torch.distributed``."""

    def set(self, key: str, value: str, /) -> None:
        """Writes."""

    def get(self, key: str, /) -> bytes:
        """Reads, and waits for what is not there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether they are there."""


class SendNotices:
    """What this process says and is told in `store`. `ranks`: how many processes there are."""

    def __init__(self, store: Whiteboard, ranks: int) -> None:
        self._store = store
        self._readers: list[Callable[[], None]] = []
        self._part = 0
        # A rank's first backward may come as many parts after its first forward as there are stages.
        self._careful_until = ranks + SETTLED_PARTS

    @property
    def careful(self) -> bool:
        """Whether every message is told of."""
        return self._part <= self._careful_until

    def begin(self) -> None:
        """A part of the schedule begins."""
        self._part += 1

    def read_by(self, look: Callable[[], None]) -> None:
        """Has `look` called whenever this process looks for what others have said."""
        self._readers.append(look)

    def sent(self, edge: Edge, number: int, header: bytes | None) -> None:
        """The `number`-th message of `edge` is on its way. `header`: of a new form."""
        if header is not None:
            self._take_care()
        if header is not None or self.careful:
            # A store that is gone has gone with its process: the communicators will say so.
            with suppress(RuntimeError):
                self._store.set(_key(edge, number), (header or b"").hex())
            self.look()

    def look(self) -> bool:
        """Tells NCCL of all receives whose messages are known to be on their way. False: that does not end a wait."""
        if self.careful:
            for look in self._readers:
                look()
        return False

    def has(self, edge: Edge, number: int) -> bool:
        """Whether the `number`-th message of `edge` is known to be on its way. False where nobody says so."""
        return self.careful and self._is_written(_key(edge, number))

    def header(self, edge: Edge, number: int) -> bytes | None:
        """What that message looks like, whose form is new; None if it is not on its way yet."""
        key = _key(edge, number)
        if not self._is_written(key):
            return None
        self._take_care()
        return bytes.fromhex(self._store.get(key).decode())

    def _is_written(self, key: str) -> bool:
        with suppress(RuntimeError):
            return self._store.check([key])
        return False

    def _take_care(self) -> None:
        """A form is new."""
        self._careful_until = max(self._careful_until, self._part + SETTLED_PARTS - 1)


def _key(edge: Edge, number: int) -> str:
    return f"message {number} of {edge}"
