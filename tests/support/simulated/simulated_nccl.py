"""Communicators between ranks of a simulated device: as NCCL's, work in streams that waits for the other rank.

Each rank has one stream in a communicator. What it is told to send or to receive begins when the stream that told it
has come so far, and when all is done that the communicator was told before; it ends when the other rank has come to the
same message. So a send waits for its receive, and whatever comes behind it in the communicator waits, too.
"""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from support.simulated.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream

__all__ = ["SimulatedCommunicator", "SimulatedEnd"]


@dataclass(eq=False)
class _Meeting:
    """Of a send and its receive."""

    sender: SimulatedEvent
    """The sender has come there."""
    done: SimulatedEvent
    source: list[object] = field(default_factory=list)
    """What is sent, without holding it."""


@dataclass(eq=False)
class _Work:
    device: SimulatedDevice
    event: SimulatedEvent

    def is_completed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.device.wait(self.device.current(), self.event)


class SimulatedCommunicator:
    """Between any ranks of `device`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.meetings: defaultdict[tuple[int, int, int], _Meeting] = defaultdict(
            lambda: _Meeting(SimulatedEvent(device), SimulatedEvent(device))
        )
        """By sender, receiver and number."""
        self.meeting = threading.Lock()
        self.streams: defaultdict[int, SimulatedStream] = defaultdict(device.stream)
        """By rank."""
        self.aborted = False
        self.others: list[SimulatedCommunicator] = []
        """Whose end an abort waits for: those that keep the device busy as well."""

    def end(self, rank: int) -> "SimulatedEnd":
        """That of `rank`."""
        return SimulatedEnd(self, rank)

    def abort(self) -> None:
        """Nobody waits for anybody any more; what was to come never does. Waits until the device is at nothing that
        another communicator of its waits for, as NCCL does.
        """
        self.aborted = True
        for meeting in self.meetings.values():
            meeting.sender.passed = meeting.done.passed = True
        while not all(other.aborted for other in self.others):
            time.sleep(1e-3)


class SimulatedEnd:
    """As a backend of ``torch.distributed``."""

    supports_coalescing = False

    def __init__(self, whole: SimulatedCommunicator, rank: int) -> None:
        self._whole, self._rank = whole, rank
        self._numbers: defaultdict[tuple[int, int], int] = defaultdict(int)

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int, /) -> _Work:
        (tensor,) = tensors
        meeting, device, stream = self._begin(self._rank, dst_rank)
        meeting.source.append(device.memory(tensor))
        device.pass_by(stream, meeting.sender)
        device.wait(stream, meeting.done)
        return _Work(device, device.record(stream))

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int, /) -> _Work:
        (tensor,) = tensors
        meeting, device, stream = self._begin(src_rank, self._rank)
        given = device.memory(tensor)
        device.wait(stream, meeting.sender)

        def copy() -> None:
            if meeting.source:
                given[:] = meeting.source[0]  # type: ignore[call-overload]

        device.do(stream, copy)
        device.pass_by(stream, meeting.done)
        return _Work(device, device.record(stream))

    def _begin(self, source: int, target: int) -> tuple[_Meeting, SimulatedDevice, SimulatedStream]:
        device, stream = self._whole.device, self._whole.streams[self._rank]
        device.wait(stream, device.record(device.current()))
        number = self._numbers[source, target]
        self._numbers[source, target] += 1
        # Two ranks, each in a thread of its own, may be the first ones there.
        with self._whole.meeting:
            return self._whole.meetings[source, target, number], device, stream
