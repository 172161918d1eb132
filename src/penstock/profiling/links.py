"""Measures the links between the ranks, through the transport that carries the pipeline's own messages.

So the numbers hold for what the runtime does: queues, threads, copies from and to a GPU, and all. One rank of a pair
drives and the other one answers. A message of n bytes and the smallest possible answer to it take, in theory and nearly
so on a machine, ``2 * latency + n / bandwidth`` seconds:

  latency    half the median seconds of the smallest message and its answer
  bandwidth  the one with the least sum of relative errors of that formula, over the median seconds of messages of 64
             KiB to 4 MiB. So a size counts as far as its bytes, and not the latency, make its seconds.

The clocks of two ranks are never compared. The two directions of a pair are measured apart, since they may differ.

A host takes part in one pair at a time, since pairs that share cores or a network card slow each other down; pairs of
different hosts are measured at once. So p ranks on hosts of their own take p - 1 rounds (p, if p is odd), and p ranks
on one host p (p - 1) / 2, of about 0.1 s each, or 1 s where NCCL connects them. Each pair has connections of its own,
which end with its round.
"""

import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ProfileError
from penstock.progress import progress_line
from penstock.runtime.devices.accelerators import accelerator_of
from penstock.runtime.devices.local_devices import local_device
from penstock.runtime.transport.collective_errors import gather_results
from penstock.runtime.transport.connection_rounds import arrange
from penstock.runtime.transport.transport import Edge, PendingMessage, Transport
from penstock.runtime.transport.worlds import World, join_world
from penstock.values.clusters import Cluster

__all__ = ["arrange_rounds", "fit_link", "measure_links", "probe"]

Pair: TypeAlias = tuple[int, int]
"""Two ranks, the lower one first."""

SIZES = (2**16, 2**18, 2**20, 2**22)
"""In bytes: what stages send each other."""
SMALLEST = 1
MOST_CALLS = 50
"""In one series, for its median."""
SERIES_SECONDS = 0.05
"""A series of messages on a slow link is cut short, to no less than `FEWEST_CALLS`, to take about this long."""
FEWEST_CALLS = 3
PARTS = 100
"""More than the first ones, in which a transport between GPUs takes more care than time."""


def probe(
    *, device: torch.device | str | None = None, progress: bool | None = None, timeout_seconds: float = 60.0
) -> Cluster:
    """The cluster that this process group runs on: latency and bandwidth between all ranks, both ways. Collective.

    Works under ``torchrun`` or in an initialized ``torch.distributed`` group, and returns the same cluster on every
    rank. `device`: where this rank's tensors are (default: its GPU if there are GPUs, else the CPU). ``memory_bytes``
    is the total memory of the smallest GPU, divided by the ranks that share it; None on CPUs, where the memory is the
    host's and how much of it a rank may take is yours to say. `progress` shows a line on rank 0's stderr; None shows it
    on a terminal.

    Raises `ProfileError` in a single process or for an unknown device, and `TransportError` if a rank fails or does
    not answer for `timeout_seconds`.
    """
    joined = dist.is_available() and dist.is_initialized()
    world = join_world()
    try:
        return measure_links(world, device, progress, timeout_seconds)
    except BaseException as error:
        world.report("while it probed the links", error)
        raise
    finally:
        world.leave()
        if not joined and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def measure_links(
    world: World, device: torch.device | str | None = None, progress: bool | None = None, timeout_seconds: float = 60.0
) -> Cluster:
    """The cluster of the processes of `world`; everything else as for `probe`. Collective."""
    ranks = world.processes
    if ranks == 1:
        raise ProfileError(
            "a probe measures the links between processes, and this process is alone: start one for each device, as in "
            "`torchrun --nproc-per-node 2 --no-python penstock probe -o cluster.yaml`"
        )
    homes = gather_results(world, "while it looked for its device", lambda: _home(device))
    mine: dict[Pair, tuple[float, float]] = {}
    rounds = arrange_rounds([home.host for home in homes])
    for pairs in progress_line(rounds, str, "probing", progress if world.rank == 0 else False):
        # Connections of their own: all of them at once would be too many for a GPU's memory and streams.
        edges = [Edge(*ends, "probe") for pair in pairs for ends in (pair, pair[::-1])]
        transport = world.connect(edges, homes[world.rank].device, timeout_seconds)
        for pair in pairs:
            if world.rank in pair:
                mine.update(
                    _measure(pair, _Side(transport, homes[world.rank].device, world.rank, sum(pair) - world.rank))
                )
        transport.close()
        # Nobody begins the next round before all have ended this one.
        world.gather(None)
    links = {pair: numbers for part in world.gather(mine) for pair, numbers in part.items()}
    latency, bandwidth = (
        [[links[a, b][number] if a != b else 0.0 for b in range(ranks)] for a in range(ranks)] for number in range(2)
    )
    return Cluster.from_matrix(bandwidth, _least_memory(homes), latency)


def arrange_rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """All pairs of ranks in rounds, so that a host is in no two pairs of a round; ``hosts[rank]`` is a rank's host.

    The pairs come in the order of a tournament (the circle method), in which all ranks play at once, and each goes to
    the first round in which its hosts are free.
    """
    seats = len(hosts) + len(hosts) % 2
    pairs = []
    for turn in range(seats - 1):
        circle = [0, *(1 + (turn + seat) % (seats - 1) for seat in range(seats - 1))]
        for one, other in zip(circle[: seats // 2], reversed(circle[seats // 2 :]), strict=True):
            if max(one, other) < len(hosts):
                pairs.append((min(one, other), max(one, other)))
    return arrange(pairs, lambda pair: [hosts[rank] for rank in pair])


def fit_link(smallest: Sequence[float], series: Sequence[tuple[int, Sequence[float]]]) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second, from seconds there and back.

    `smallest`: of the smallest message; `series`: (bytes, seconds of messages of that size, answered by the smallest).
    """
    round_trip = median(smallest)
    points = [(size, median(seconds)) for size, seconds in series]
    # The x that makes sum(abs(round_trip + size * x - seconds) / seconds) least: a weighted median.
    votes = sorted(((seconds - round_trip) / size, size / seconds) for size, seconds in points)
    half = sum(weight for _, weight in votes) / 2
    heard = accumulate(weight for _, weight in votes)
    seconds_per_byte = next(vote for (vote, _), so_far in zip(votes, heard, strict=True) if so_far >= half)
    # Noise can make large messages seem faster than the smallest: the link is then too fast to be measured.
    return round_trip / 2, 1 / max(seconds_per_byte, 1e-15)


def _measure(pair: Pair, side: "_Side") -> dict[Pair, tuple[float, float]]:
    """What this rank, a side of `pair`, measures: the link from it to its partner. First the lower rank drives."""
    result: dict[Pair, tuple[float, float]] = {}
    for driver in pair:
        if driver == side.rank:
            result[side.rank, side.partner] = side.drive()
        else:
            side.answer()
    return result


@dataclass(frozen=True, slots=True)
class _Side:
    """This rank's end of the two links that join it and its partner."""

    transport: Transport
    device: torch.device
    rank: int
    partner: int

    def drive(self) -> tuple[float, float]:
        """Measures the link to the partner, who must `answer` meanwhile."""
        smallest = self._series(SMALLEST)
        series = [(size, self._series(size)) for size in SIZES]
        self._send("order", torch.zeros(2, dtype=torch.int64, device=self.device))
        return fit_link(smallest, series)

    def answer(self) -> None:
        """Answers the partner's messages until an order of none comes."""
        while True:
            size, calls = (int(number) for number in self._receive("order"))
            if calls == 0:
                return
            self._begin()
            ticket = self._post(f"{size} bytes")
            answer = torch.zeros(SMALLEST, dtype=torch.uint8, device=self.device)
            for call in range(calls):
                message = ticket.wait()
                if call + 1 < calls:
                    ticket = self._post(f"{size} bytes")
                self._send("answer", answer)
                del message

    def _series(self, size: int) -> list[float]:
        """Seconds there and back of messages of `size` bytes."""
        # The first message brings its form along, and finds cold caches: it only says how many can be afforded.
        (pilot,) = self._exchange(size, 1)
        calls = min(MOST_CALLS, max(FEWEST_CALLS, int(SERIES_SECONDS / max(pilot, 1e-9))))
        return self._exchange(size, 1 + calls)[1:]

    def _exchange(self, size: int, calls: int) -> list[float]:
        self._send("order", torch.tensor([size, calls], device=self.device))
        self._begin()
        payload = torch.zeros(size, dtype=torch.uint8, device=self.device)
        seconds = []
        for _ in range(calls):
            ticket = self._post("answer")
            self._settle()
            start = time.perf_counter()
            self._send(f"{size} bytes", payload)
            ticket.wait()
            self._settle()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _begin(self) -> None:
        """A series is like many parts of a schedule: the transport takes its messages for those of late steps, but for
        the first one of a size.
        """
        for _ in range(PARTS):
            self.transport.begin()

    def _settle(self) -> None:
        """Waits for the device: a message may have come only for what it computes next. Not for all of it: it may be
        at a receive whose message will come when this rank has gone on.
        """
        accelerator = accelerator_of(self.device)
        if accelerator is not None:
            accelerator.mark().synchronize()

    def _send(self, form: str, tensor: Tensor) -> None:
        self.transport.send(Edge(self.rank, self.partner, "probe"), form, (tensor,))

    def _post(self, form: str) -> PendingMessage:
        return self.transport.post(Edge(self.partner, self.rank, "probe"), form)

    def _receive(self, form: str) -> list[float]:
        (tensor,) = self._post(form).wait()
        assert tensor is not None
        return list(tensor.tolist())


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a rank lives."""

    host: str
    device: torch.device
    memory_bytes: float | None


def _home(device: torch.device | str | None) -> _Home:
    place = _place(device)
    memory = float(torch.cuda.get_device_properties(place).total_memory) if place.type == "cuda" else None
    return _Home(socket.gethostname(), place, memory)


def _least_memory(homes: Sequence[_Home]) -> float | None:
    """Of the rank with the least share of its device; None if a device has no memory of its own."""
    users = Counter((home.host, home.device) for home in homes)
    shares = [home.memory_bytes / users[home.host, home.device] for home in homes if home.memory_bytes is not None]
    return min(shares) if len(shares) == len(homes) else None


def _place(device: torch.device | str | None) -> torch.device:
    if device is None:
        return local_device()
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ProfileError(
            f"device={str(device)!r}: expected cpu, cuda or cuda:N that is there, found: {error}"
        ) from error
