"""Communicators between ranks of a simulated device. Their operations wait for the other rank in a stream, like NCCL's.

Each rank has one stream in a communicator. An operation starts when the stream that enqueued it has reached that point,
and all earlier operations of the communicator are done. It ends when the other rank has reached the same message. So a
send waits for its receive, and everything behind it in the communicator waits as well.
"""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from support.simulated.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream


@dataclass(eq=False)
class _Meeting:
    """The meeting of a send and its receive."""

    sender: SimulatedEvent
    """The sender has reached it."""
    done: SimulatedEvent
    source: list[object] = field(default_factory=list)
    """The memory that is sent, without keeping it alive."""


@dataclass(eq=False)
class _Work:
    device: SimulatedDevice
    event: SimulatedEvent

    def is_completed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.device.wait(self.device.current(), self.event)


class SimulatedCommunicator:
    """Connects any ranks of `device`."""

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
        """The communicators whose end an abort waits for, since they keep the device busy as well."""

    def end(self, rank: int) -> "SimulatedEnd":
        """The end of `rank`."""
        return SimulatedEnd(self, rank)

    def abort(self) -> None:
        """Ends all operations; messages that have not arrived never do. Blocks until the device runs nothing that
        another of its communicators waits for, as NCCL does.
        """
        self.aborted = True
        for meeting in self.meetings.values():
            meeting.sender.passed = meeting.done.passed = True
        while not all(other.aborted for other in self.others):
            time.sleep(1e-3)


class SimulatedEnd:
    """Behaves as a backend of ``torch.distributed``."""

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
        return _Work(device, device.record_event(stream))

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
        return _Work(device, device.record_event(stream))

    def abort(self) -> None:
        self._whole.abort()

    def shutdown(self) -> None:
        """Does nothing: there is no memory to release."""

    def _begin(self, source: int, target: int) -> tuple[_Meeting, SimulatedDevice, SimulatedStream]:
        device, stream = self._whole.device, self._whole.streams[self._rank]
        device.wait(stream, device.record_event(device.current()))
        number = self._numbers[source, target]
        self._numbers[source, target] += 1
        # Two ranks, each in a thread of its own, may get here at the same time.
        with self._whole.meeting:
            return self._whole.meetings[source, target, number], device, stream
