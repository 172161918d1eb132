"""Measures the links between the ranks, through the transport that carries the pipeline's own messages.

So the numbers hold for the runtime with its queues, threads and copies from and to a GPU. One rank of a pair drives and
the other one answers. A message of n bytes and the smallest possible answer to it take ``2 * latency + n / bandwidth``
seconds, in theory and nearly so on a machine:

  latency    half the median seconds of the smallest message and its answer
  bandwidth  the value with the smallest sum of relative errors of that formula, over the median seconds of messages of
             64 KiB to 4 MiB. So a size has weight as far as its seconds come from its bytes and not from the latency.

The clocks of two ranks are never compared. The two directions of a pair are measured separately, since they may differ.
Then both ranks of a pair send at once. If that is slower, its bandwidth counts for both directions: neighbour stages
send to each other all the time, and connections between hosts take time of cores that both directions share.

Then all ranks at once measure the way to the memory or the directory that offloads go to, through the store that they
use: ranks of one host share it.

What messages and actions cost the ranks themselves is measured on CPUs, in `message_costs.py` and `action_costs.py`:
the former by each pair after its links, the latter by all ranks at the same time, since those of one host train at the
same time.

A host takes part in one pair at a time, since pairs that share cores or a network card slow each other down. Pairs of
different hosts are measured at once. So p ranks on hosts of their own take p - 1 rounds (p, if p is odd), and p ranks
on one host p (p - 1) / 2, of about half a second each on CPUs (more on slow links), 0.1 s on GPUs, or 1 s if NCCL
connects them. Each pair has connections of its own, which end with its round.
"""

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.arguments import check_arguments
from penstock.capturing.initialization import read_device
from penstock.errors import ProfileError
from penstock.profiling.action_costs import measure_action_seconds, measure_message_costs
from penstock.progress import progress_line
from penstock.runtime.assembly.pipeline_options import OFFLOAD_TO
from penstock.runtime.collectives.agreements import gather_results
from penstock.runtime.collectives.timeouts import check_timeout
from penstock.runtime.devices.accelerators import accelerator_of
from penstock.runtime.devices.host_stores import HOST, make_host_store
from penstock.runtime.devices.local_devices import local_device
from penstock.runtime.devices.staging import layout_of, staging_for
from penstock.runtime.transport.connections import arrange
from penstock.runtime.transport.transport import Channel, Edge, PendingMessage, Transport
from penstock.runtime.transport.worlds import World, join_world
from penstock.values.clusters import Cluster
from penstock.values.link_tables import FREE, LinkMatrix, MessageCosts

RankPair: TypeAlias = tuple[int, int]
"""Two ranks, the lower one first."""

SIZES = (2**16, 2**18, 2**20, 2**22)
"""The sizes of the measured messages in bytes: those between stages."""
_SMALLEST = 8
"""The bytes of the smallest message that a receiver sees arrive without a thread, as it sees those between stages."""
_MOST_CALLS = 50
"""The number of messages in one series, whose median is taken."""
_SERIES_SECONDS = 0.05
"""A series of messages on a slow link is shortened to about this time, but to at least `_FEWEST_CALLS`."""
_FEWEST_CALLS = 3
_LONGEST_SECONDS = 0.2
"""Larger messages than those that take so long are not measured."""
_HOST_BYTES, _HOST_CALLS = 2**25, 5
"""What goes to the host at once, and how often."""
_SEGMENTS = 100
"""More segments than those that a transport between GPUs treats as first steps, which are slower."""


def probe(
    *,
    device: torch.device | str | None = None,
    offload_to: str | Path = HOST,
    progress: bool | None = None,
    timeout_seconds: float = 60.0,
) -> Cluster:
    """Measures the cluster that this process group runs on: latency and bandwidth between all ranks, both ways, the
    bandwidth to what offloads go to, and on CPUs what messages and actions take from the ranks themselves. Collective.

    Works under ``torchrun`` or in an initialized ``torch.distributed`` group, and returns the same cluster on every
    rank. `device`: where this rank's tensors are (default: its GPU if there are GPUs, else the CPU). ``memory_bytes``
    is the total memory of the smallest GPU, divided by the ranks that share it. It is None on CPUs, where the memory is
    the host's and you decide how much of it a rank may take. `offload_to`: as in `Pipeline`; on CPUs ``host_bandwidth``
    is None without a directory, since nothing is saved there. `progress` shows a line on rank 0's stderr; None shows it
    on a terminal.

    Raises `ProfileError` in a single process or for an unknown device, and `TransportError` if a rank fails or does not
    answer for `timeout_seconds`.
    """
    check_arguments("probe", {"offload_to": OFFLOAD_TO}, ProfileError, offload_to=offload_to)
    joined = dist.is_available() and dist.is_initialized()
    world = join_world(check_timeout(timeout_seconds))
    try:
        return measure_links(world, device, offload_to, progress=progress, timeout_seconds=timeout_seconds)
    except BaseException as error:
        world.report("while it probed the links", error)
        raise
    finally:
        world.leave()
        if not joined and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def measure_links(
    world: World,
    device: torch.device | str | None = None,
    offload_to: str | Path = HOST,
    *,
    progress: bool | None = None,
    timeout_seconds: float = 60.0,
) -> Cluster:
    """Measures the cluster of the processes of `world`; everything else as for `probe`. Collective."""
    ranks = world.processes
    if ranks == 1:
        raise ProfileError(
            "a probe measures the links between processes, and this process is alone: start one for each device, as in "
            "`torchrun --nproc-per-node 2 --no-python penstock probe -o cluster.yaml`"
        )
    found = gather_results(world, "while it looked for its device", lambda: (*_locate(device),))
    locations = [_RankLocation(*each) for each in found]
    own = torch.device(locations[world.rank].device)
    mine: dict[RankPair, _Link] = {}
    hosts_compute = all(torch.device(location.device).type == "cpu" for location in locations)
    rounds = arrange_rounds([location.host for location in locations])
    for pairs in progress_line(rounds, str, "probing", progress if world.rank == 0 else False):
        # Each round makes its own connections: all of them at once would need too much of a GPU's memory and streams.
        edges = [Edge(*way, Channel.PROBE) for pair in pairs for way in (pair, pair[::-1])]
        transport = world.connect(edges, own, timeout_seconds)
        for pair in pairs:
            if world.rank in pair:
                side = _Side(transport, own, world.rank, sum(pair) - world.rank)
                mine.update(_measure(pair, side, hosts_compute))
        transport.close()
        # All processes end this round before any begins the next.
        world.gather(None, "between two rounds of a probe")
    actions = gather_results(
        world, "while it measured its actions", lambda: measure_action_seconds() if hosts_compute else (0.0, 0.0)
    )
    hosts = gather_results(
        world, "while it measured the way to its host", lambda: measure_host_bandwidth(own, offload_to)
    )
    links: list[Any] = [[[*pair], [*link]] for pair, link in mine.items()]
    measured = [{tuple(pair): link for pair, link in found} for found in world.gather(links, "after a probe")]
    action, step = (median(own) for own in zip(*actions, strict=True))
    cluster = replace(_cluster(measured, action, _least_memory(locations)), step_seconds=step)
    known = [bandwidth for bandwidth in hosts if bandwidth is not None]
    return replace(cluster, host_bandwidth=min(known) if len(known) == ranks else None)


def _cluster(
    measured: Sequence[Mapping[RankPair, Sequence[float]]], action: float, memory_bytes: float | None
) -> Cluster:
    """The cluster of what every rank has measured: of the links from it, and of messages at its end."""
    every = range(len(measured))

    def rows(number: int) -> list[list[float]]:
        return [[measured[a][a, b][number] if a != b else 0.0 for b in every] for a in every]

    def costs(a: int, b: int) -> MessageCosts:
        """The mean of the two ends."""
        if a == b:
            return FREE
        return MessageCosts(*(mean([measured[a][a, b][number], measured[b][b, a][number]]) for number in (2, 3)))

    links = LinkMatrix(
        tuple(map(tuple, rows(1))), tuple(map(tuple, rows(0))), tuple(tuple(costs(a, b) for b in every) for a in every)
    )
    return Cluster(links, memory_bytes, action)


def measure_host_bandwidth(device: torch.device, offload_to: str | Path) -> float | None:
    """The bytes per second from `device` to where its offloads go while as many come back; None if that is its own
    memory. `PenstockError` for a directory that cannot be used.
    """
    staging = staging_for(device)
    if offload_to == HOST and not staging.separate_memory:
        return None
    store = make_host_store(offload_to, staging)
    payload = torch.zeros(_HOST_BYTES, dtype=torch.uint8, device=device)
    homes = [store.memory(layout_of(payload)) for _ in range(2)]
    seconds = []
    # The first call fills one of them.
    for _ in range(1 + _HOST_CALLS):
        _synchronize(device)
        start = time.perf_counter()
        leaving = store.staging.to_host([payload], lambda _: homes[0], kept=True)
        coming = store.staging.back_to_device(homes[1:])
        store.wait(leaving)
        store.wait(coming)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        homes.reverse()
    store.close()
    return _HOST_BYTES / median(seconds[1:])


def arrange_rounds(hosts: Sequence[str]) -> list[list[RankPair]]:
    """Arranges all pairs of ranks in rounds, so that no host is in two pairs of a round; ``hosts[rank]`` is a rank's
    host.

    The pairs come in the order of a tournament (the circle method), in which all ranks play at once, and each goes to
    the first round in which its hosts are free.
    """
    seats = len(hosts) + len(hosts) % 2
    pairs = []
    for number in range(seats - 1):
        circle = [0, *(1 + (number + seat) % (seats - 1) for seat in range(seats - 1))]
        for one, other in zip(circle[: seats // 2], reversed(circle[seats // 2 :]), strict=True):
            if max(one, other) < len(hosts):
                pairs.append((min(one, other), max(one, other)))
    return arrange(pairs, lambda pair: [hosts[rank] for rank in pair])


def fit_link(smallest: Sequence[float], series: Sequence[tuple[int, Sequence[float]]]) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second, from round-trip seconds.

    `smallest`: of the smallest message; `series`: (bytes, seconds of messages of that size, answered by the smallest).
    """
    round_trip = median(smallest)
    points = [(size, median(seconds)) for size, seconds in series]
    # The x that minimizes sum(abs(round_trip + size * x - seconds) / seconds): a weighted median.
    votes = sorted(((seconds - round_trip) / size, size / seconds) for size, seconds in points)
    half = sum(weight for _, weight in votes) / 2
    cumulated = accumulate(weight for _, weight in votes)
    seconds_per_byte = next(vote for (vote, _), so_far in zip(votes, cumulated, strict=True) if so_far >= half)
    # Noise can make large messages seem faster than the smallest. The link is then too fast to be measured.
    return round_trip / 2, 1 / max(seconds_per_byte, 1e-15)


class _Link(NamedTuple):
    """A link from this rank to another one, and what a message costs this rank at either end of it."""

    latency_seconds: float
    bandwidth: float
    message_seconds: float
    message_seconds_per_byte: float


def _measure(pair: RankPair, side: "_Side", costs: bool) -> dict[RankPair, _Link]:
    """Measures the link from this rank to the other one of `pair`, and with `costs` what messages cost this rank. The
    lower rank drives first.
    """
    latency, bandwidth = 0.0, inf
    for driver in pair:
        if driver == side.rank:
            latency, bandwidth = side.drive()
        else:
            side.answer()
    bandwidth = min(bandwidth, side.exchange(latency, bandwidth))
    found = measure_message_costs(side, latency, bandwidth) if costs else FREE
    return {(side.rank, side.partner): _Link(latency, bandwidth, found.seconds, found.seconds_per_byte)}


@dataclass(frozen=True, slots=True)
class _Side:
    """This rank's end of the two links that join it and its partner."""

    transport: Transport
    device: torch.device
    rank: int
    partner: int

    def drive(self) -> tuple[float, float]:
        """Measures the link to the partner, which must `answer` meanwhile."""
        smallest, series = self._series(_SMALLEST), list[tuple[int, list[float]]]()
        for size in SIZES:
            # On a slow link the smaller sizes say as much as the largest one.
            if len(series) < 2 or median(series[-1][1]) * size / series[-1][0] < _LONGEST_SECONDS:
                series.append((size, self._series(size)))
        self.send("order", torch.zeros(2, dtype=torch.int64, device=self.device))
        return fit_link(smallest, series)

    def answer(self) -> None:
        """Answers the partner's messages until it orders none."""
        while True:
            size, calls = (int(number) for number in self.receive("order"))
            if calls == 0:
                return
            self._begin_late_segment()
            receive = self.post(f"{size} bytes")
            answer = torch.zeros(_SMALLEST, dtype=torch.uint8, device=self.device)
            for call in range(calls):
                message = receive.wait()
                if call + 1 < calls:
                    receive = self.post(f"{size} bytes")
                self.send("answer", answer)
                del message

    @property
    def drives(self) -> bool:
        """Whether this rank decides how the two measure."""
        return self.rank < self.partner

    def exchange(self, latency: float, bandwidth: float) -> float:
        """The bandwidth to the partner while as much comes back; it makes the same call. `latency` and `bandwidth`:
        those of the link to it while nothing comes back.
        """
        if self.drives:
            size = max(SIZES[0], min(SIZES[-2], int(_SERIES_SECONDS * bandwidth)))
            calls = min(_MOST_CALLS, max(_FEWEST_CALLS, int(_SERIES_SECONDS * bandwidth / size)))
            self.send("order", torch.tensor([size, calls], device=self.device))
        else:
            size, calls = map(int, self.receive("order"))
        # The first message carries its header and finds the partner at work.
        seconds = self._exchange(size, 1 + calls, f"{size} bytes both ways", f"{size} bytes both ways")[1:]
        return size / max(median(seconds) - latency, 1e-15 * size)

    def _series(self, size: int) -> list[float]:
        """The round-trip seconds of messages of `size` bytes."""
        # The first message carries its header and finds cold caches. It only serves to choose the number of calls.
        (pilot,) = self._answered(size, 1)
        calls = min(_MOST_CALLS, max(_FEWEST_CALLS, int(_SERIES_SECONDS / max(pilot, 1e-9))))
        return self._answered(size, 1 + calls)[1:]

    def _answered(self, size: int, calls: int) -> list[float]:
        self.send("order", torch.tensor([size, calls], device=self.device))
        return self._exchange(size, calls, f"{size} bytes", "answer")

    def _exchange(self, size: int, calls: int, sent: str, received: str) -> list[float]:
        """The seconds of each of `calls` messages of kind `sent`, with the wait for one of kind `received`."""
        self._begin_late_segment()
        payload = torch.zeros(size, dtype=torch.uint8, device=self.device)
        seconds = []
        for _ in range(calls):
            receive = self.post(received)
            _synchronize(self.device)
            start = time.perf_counter()
            self.send(sent, payload)
            receive.wait()
            _synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _begin_late_segment(self) -> None:
        """Makes the transport treat messages like those of late steps, except for the first one of a size."""
        for _ in range(_SEGMENTS):
            self.transport.begin_segment()

    def send(self, kind: str, tensor: Tensor) -> None:
        """Sends `tensor`, a message of `kind`, to the partner."""
        self.transport.send(Edge(self.rank, self.partner, Channel.PROBE), kind, (tensor,))

    def post(self, kind: str) -> PendingMessage:
        """Posts the receive of the partner's next message, which is of `kind`."""
        return self.transport.post(Edge(self.partner, self.rank, Channel.PROBE), kind)

    def receive(self, kind: str) -> list[float]:
        """Waits for the numbers in the partner's next message, which is of `kind`."""
        (tensor,) = self.post(kind).wait()
        assert tensor is not None
        return list(tensor.tolist())


def _synchronize(device: torch.device) -> None:
    """Waits for what this thread has given the device, such as a message. It does not wait for all work of the device,
    which may include a receive whose message comes only when this rank has gone on.
    """
    accelerator = accelerator_of(device)
    if accelerator is not None:
        accelerator.record_timed_event().synchronize()


class _RankLocation(NamedTuple):
    """The host and the device of a rank."""

    host: str
    device: str
    memory_bytes: float | None


def _locate(device: torch.device | str | None) -> _RankLocation:
    resolved = local_device() if device is None else read_device("probe(device=)", device, ProfileError)
    memory = float(torch.cuda.get_device_properties(resolved).total_memory) if resolved.type == "cuda" else None
    return _RankLocation(socket.gethostname(), str(resolved), memory)


def _least_memory(locations: Sequence[_RankLocation]) -> float | None:
    """The smallest share of a device that a rank has; None if a device has no memory of its own."""
    users = Counter((location.host, location.device) for location in locations)
    shares = [
        location.memory_bytes / users[location.host, location.device]
        for location in locations
        if location.memory_bytes is not None
    ]
    return min(shares) if len(shares) == len(locations) else None
