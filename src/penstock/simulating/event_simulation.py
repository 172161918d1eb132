"""The event simulation: computes when every instruction of every rank starts and stops.

Nothing here is random and no clock is read: every start is the latest of the times that it waits for.

Rules of the simulation:
  1. A rank runs its instructions one after the other.
  2. A receive blocks until its message has arrived. A send does not block. On a link that blocks its ends the sender is
     busy until its message has left, and a receive takes at least as long as its message is on the link; for a share of
     that time where the link blocks for a share. Where messages take time of the ranks, a message leaves when its
     sender has handed it over, and the sender goes on when it has copied the bytes, too. The receiver copies bytes
     while they arrive, and so is late by the copying of a message that was there before; it goes on when it has taken
     the message in.
  3. A link carries one message at a time, in the order of the sends; where several ranks share it, in the order of
     their times.
  4. In an all-reduce each simulated replica waits for the end. It may start when the last of them has started its last
     backward, since gradients become ready layer by layer, and it ends no earlier than the last arrival. Without
     overlap, and over links that block their ends, it starts when the last replica has arrived. Where messages take
     time of the ranks, each replica arrives later by the time that its messages take from its computation. A rank takes
     part in one all-reduce at a time, and all-reduces do not compete with messages for links.
  5. Processes of one machine share cores, caches and memory. Where ranks share a host, every computation has an amount
     of work, its seconds when it runs alone, and while k ranks compute, each is ``slowdowns[k - 1]`` times as slow. All
     rates change at once when a computation starts or ends, so that the times are exact for this model. Nothing else
     uses the cores.
  6. A copy between a device and its host occupies no rank. Each direction carries one copy at a time, in the order of
     the row, and a copy back begins after the copy to the host has ended.
  7. An update of a streamed stage fetches and returns state and weights part by part: its copies and its computation
     run beside each other, and the rank waits for the longest of them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Action
from penstock.scheduling.placements import Placement
from penstock.simulating.assumptions import Assumptions
from penstock.simulating.instructions import (
    AWAITING_COMPUTE,
    COMPUTE,
    HOST_COPY,
    HOST_UPDATE,
    MULTICAST,
    RECEIVE,
    SEND,
    SHARED_COMPUTE,
    Copy,
    CopyKey,
    HostUpdate,
    Instructions,
    Multicast,
    ReduceInstruction,
    content_text,
)


class SharedHost:
    """Tracks the computations that run at the current time, which only moves forward."""

    def __init__(self, slowdowns: Sequence[float]) -> None:
        self._slowdowns = slowdowns
        self._work: dict[int, float] = {}
        """Remaining seconds of work, by rank."""
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._work)

    def begin(self, rank: int, work: float, seconds: float) -> None:
        """Starts `work` seconds of work on `rank` at the time `seconds`, which must not go back."""
        self._move(seconds)
        self._work[rank] = work

    def next_end(self) -> float:
        """When the next computation ends, if none starts before; infinite if there is none."""
        return self._clock + min(self._work.values()) * self._rate() if self._work else inf

    def end(self) -> tuple[int, float]:
        """Ends the computation that ends next; returns its rank and the time. Of several, that of the lowest rank."""
        seconds = self.next_end()
        rank = min(self._work, key=lambda rank: (self._work[rank], rank))
        self._move(seconds)
        del self._work[rank]
        return rank, seconds

    def _move(self, seconds: float) -> None:
        done = (seconds - self._clock) / self._rate() if self._work else 0.0
        for rank in self._work:
            self._work[rank] = max(0.0, self._work[rank] - done)
        self._clock = seconds

    def _rate(self) -> float:
        """Seconds per second of work; for more ranks than were measured, in proportion to the last."""
        busy, known = len(self._work), len(self._slowdowns)
        return self._slowdowns[busy - 1] if busy <= known else self._slowdowns[-1] * busy / known


@dataclass(slots=True, eq=False)
class Track:
    """The progress of one rank through its instructions, and the times of those that have run."""

    rank: int
    instructions: Instructions
    now: float = 0.0
    busy_seconds: float = 0.0
    """Time spent on computation."""
    message_seconds: float = 0.0
    """Time spent on messages, where they do not overlap computation."""
    starts: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    messages: list[float] = field(default_factory=list)
    """When the message of every SEND has left and that of every RECEIVE has arrived, in the order of the row."""
    ring_free: float = 0.0
    copied: dict[CopyKey, float] = field(default_factory=dict)
    """When each copy between the device and its host has ended."""
    host_free: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """When the link from the host is free, and the one to it."""
    issued: dict[int, float] = field(default_factory=dict)
    """When the rank came to each of these copies, by its place in the row."""
    host_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """How long copies occupied each of the two."""


class EventSimulation:
    """Plays tracks to their end."""

    def __init__(
        self, tracks: Sequence[Track], placement: Placement, assumptions: Assumptions, links: int, edges: int
    ) -> None:
        self.tracks = tracks
        self.reduce_seconds: dict[int, list[float]] = {}
        """By stage: the seconds of all its all-reduces, and of these the seconds after the last replica had arrived."""
        self.link_seconds = [0.0] * links
        """How long messages occupied each link."""
        self._of_rank = {track.rank: track for track in tracks}
        self._placement = placement
        self._assumptions = assumptions
        self._queues: list[deque[tuple[float, int]]] = [deque() for _ in range(edges)]
        self._free = [0.0] * links
        self._waiting: dict[int, Track] = {}
        self._open_reduces: dict[tuple[int, int], dict[int, tuple[float, float]]] = {}
        """By stage and version: when each replica that has arrived may begin, and has handled its messages."""
        self._closed_reduces: dict[int, tuple[float, float]] = {}
        self._ready: list[tuple[float, int]] = []
        self._host = SharedHost(assumptions.slowdowns)
        self._clock = 0.0

    def play(self, rows: Mapping[int, Sequence[Action]]) -> None:
        """Plays all tracks to their end. `rows` has their actions, for errors.

        Raises `ScheduleError` if a message never arrives.
        """
        self._ready = [(0.0, track.rank) for track in self.tracks]
        advance = self._advance
        while self._ready or self._host:
            if self._host and (not self._ready or self._host.next_end() <= self._ready[0][0]):
                rank = self._end_shared()
            else:
                self._clock, rank = heappop(self._ready)
            advance(self._of_rank[rank], rows)
        if any(len(track.stops) < len(track.instructions.kinds) for track in self.tracks):
            raise self._stuck(rows)

    def _advance(self, track: Track, rows: Mapping[int, Sequence[Action]]) -> None:
        """Continues `track` until it must wait."""
        starts, stops, messages = track.starts, track.stops, track.messages
        queues, free, carried = self._queues, self._free, self.link_seconds
        waiting, ordered = self._waiting, self._assumptions.shared_nic
        now, busy = track.now, 0.0
        kinds, details, contents = track.instructions.kinds, track.instructions.details, track.instructions.contents
        for index in range(len(stops), len(kinds)):
            code, what = kinds[index], details[index]
            if code == COMPUTE:
                starts.append(now)
                now += what
                stops.append(now)
                busy += what
            elif code == SEND:
                if ordered and self._ready and self._ready[0] < (now, track.rank):
                    heappush(self._ready, (now, track.rank))
                    break
                edge, link, seconds, latency, handling, copying, blocking, legs = what
                now += handling
                if link >= 0:
                    start = now if free[link] < now else free[link]
                    left = free[link] = start + seconds
                    carried[link] += seconds
                else:
                    start, left = self._occupy(legs, now)
                arrival = left + latency
                queues[edge].append((arrival, contents[len(messages)]))
                starts.append(start)
                stops.append(arrival)
                messages.append(left)
                if blocking:
                    now = left if blocking == 1 else now + blocking * (left - now)
                    track.message_seconds += blocking * seconds
                now += copying
                track.message_seconds += handling + copying
                if edge in waiting:
                    self._wake(waiting.pop(edge), arrival)
            elif code == RECEIVE:
                queue = queues[what[0]]
                if not queue:
                    waiting[what[0]] = track
                    break
                arrival, found = queue.popleft()
                if found != contents[len(messages)]:
                    raise self._mismatch(rows[track.rank][index], track.rank, found)
                starts.append(now)
                _, _, seconds, _, handling, copying, blocking, _ = what
                blocked = blocking * seconds
                now += blocked + copying
                now = (arrival if arrival > now else now) + handling
                track.message_seconds += blocked + handling + copying
                stops.append(now)
                messages.append(arrival)
            else:
                track.now = now
                if not self._has_done(track, code, what):
                    break
                now = track.now
        track.now, track.busy_seconds = now, track.busy_seconds + busy

    def _has_done(self, track: Track, code: int, what: Any) -> bool:
        """Runs an instruction that is rare, or slow to simulate anyway; False if `track` must wait."""
        now = track.now
        if code == MULTICAST:
            if self._assumptions.shared_nic and self._ready and self._ready[0] < (now, track.rank):
                heappush(self._ready, (now, track.rank))
                return False
            track.now = self._multicast(track, what, now)
            return True
        if code == HOST_COPY:
            _copy(track, what)
            return True
        if code == HOST_UPDATE:
            _update_on_host(track, what)
            return True
        if code == AWAITING_COMPUTE:
            what, awaited = what
            now = track.now = max(now, *(track.copied.get(key, 0.0) for key in awaited))
            if not self._assumptions.slowdowns:
                track.starts.append(now)
                track.now += what
                track.stops.append(track.now)
                track.busy_seconds += what
                return True
            code = SHARED_COMPUTE
        if code == SHARED_COMPUTE:
            self._begin_shared(track, what, now)
            return False
        if not self._join_reduce(track, what):
            return False
        track.starts.append(now)
        track.now = self._closed_reduces.pop(track.rank)[1]
        track.stops.append(track.now)
        return True

    def _begin_shared(self, track: Track, work: float, now: float) -> None:
        """Starts a computation at `now`, or tries again then: computations that end before change its speed."""
        if now > self._clock:
            heappush(self._ready, (now, track.rank))
        else:
            self._host.begin(track.rank, work, now)
            track.starts.append(now)

    def _end_shared(self) -> int:
        """Ends the computation that ends next, and returns its rank."""
        rank, self._clock = self._host.end()
        track = self._of_rank[rank]
        track.now = self._clock
        track.busy_seconds += track.now - track.starts[-1]
        track.stops.append(track.now)
        return rank

    def _wake(self, track: Track, arrival: float) -> None:
        heappush(self._ready, (max(track.now, arrival), track.rank))

    def _occupy(self, legs: Sequence[tuple[int, float]], now: float) -> tuple[float, float]:
        """Sends a message over several links at once; returns when the first leg starts and when the last has left."""
        free = self._free
        start, left = inf, now
        for link, seconds in legs:
            begin = max(now, free[link])
            free[link] = begin + seconds
            self.link_seconds[link] += seconds
            start, left = min(start, begin), max(left, free[link])
        return start, left

    def _multicast(self, track: Track, message: Multicast, now: float) -> float:
        """Sends one message to several ranks, one after the other; returns when `track` continues."""
        track.starts.append(now)
        stop = now
        for path in message.paths:
            now += path.handling_seconds
            _, left = self._occupy(path.legs, now)
            arrival = left + path.latency_seconds
            self._queues[path.edge].append((arrival, message.content))
            stop = max(stop, arrival)
            now = (left if path.blocking == 1 else now + path.blocking * (left - now)) + path.copying_seconds
            blocked = path.blocking * path.seconds
            track.message_seconds += blocked + path.handling_seconds + path.copying_seconds
            if path.edge in self._waiting:
                self._wake(self._waiting.pop(path.edge), arrival)
        track.stops.append(stop)
        return now

    def _join_reduce(self, track: Track, reduce: ReduceInstruction) -> bool:
        """Whether the all-reduce that `track` has reached is over; the last replica to arrive wakes the others."""
        if track.rank in self._closed_reduces:
            return True
        stage, version, seconds = reduce.stage, reduce.version, reduce.seconds
        track.message_seconds += reduce.handling_seconds
        begun = handled = track.now + reduce.handling_seconds
        if reduce.backward >= 0 and reduce.blocking < 1:
            first = track.starts[reduce.backward]
            begun = first + reduce.blocking * (handled - first)
        arrived = self._open_reduces.setdefault((stage, version), {})
        arrived[track.rank] = max(begun, track.ring_free), handled
        members = [rank for rank in self._placement.stages[stage] if rank in self._of_rank]
        if len(arrived) < len(members):
            return False
        del self._open_reduces[stage, version]
        latest = max(handled for _, handled in arrived.values())
        end = max(latest, max(begun for begun, _ in arrived.values()) + seconds)
        spent = self.reduce_seconds.setdefault(stage, [0.0, 0.0])
        spent[0] += seconds
        spent[1] += end - latest
        for rank in members:
            self._of_rank[rank].ring_free = end
            self._closed_reduces[rank] = latest, end
            if rank != track.rank:
                heappush(self._ready, (end, rank))
        return True

    def _mismatch(self, action: Action, rank: int, found: int) -> ScheduleError:
        text = content_text(found, len(self._placement.stages))
        return ScheduleError(
            f"rank {rank}: expected the message of {action} to be next on the link to it, found that of {text}: "
            "receive in the order of the sends"
        )

    def _stuck(self, rows: Mapping[int, Sequence[Action]]) -> ScheduleError:
        reasons = []
        for track in self.tracks:
            index = len(track.stops)
            if index < len(track.instructions.kinds):
                action = rows[track.rank][index]
                code = track.instructions.kinds[index]
                cause = "a message that is never sent" if code == RECEIVE else "replicas that never reach it"
                reasons.append(f"rank {track.rank} waits in {action} (its action {index}) for {cause}")
        return ScheduleError(
            f"the schedule cannot run: {'; '.join(reasons)}. Put the sends before the receives that need them; "
            "penstock.verify shows the rows"
        )


def _copy(track: Track, copy: Copy) -> None:
    """Runs a copy between the device and its host beside the computation."""
    stage, microbatch, leaves = copy.key
    before = 0.0 if leaves else track.copied.get((stage, microbatch, True), 0.0)
    # Weights that leave are not copied.
    free = track.host_free[leaves] if copy.seconds else 0.0
    start = max(track.now, free, before)
    track.issued[len(track.starts)] = track.now
    track.copied[copy.key] = start + copy.seconds
    track.host_free[leaves] = max(track.host_free[leaves], start + copy.seconds)
    track.host_seconds[leaves] += copy.seconds
    track.starts.append(start)
    track.stops.append(start + copy.seconds)


def _update_on_host(track: Track, update: HostUpdate) -> None:
    """Runs an update of a stage whose state and weights are on the host, when the gradients are there."""
    start = max(track.now, track.host_free[0], track.copied.get(update.gradients, 0.0))
    back = max(start, track.host_free[1]) + update.returning
    track.host_free[:] = start + update.fetching, back
    track.now = max(start + update.seconds, start + update.fetching, back)
    track.host_seconds[0] += update.fetching
    track.host_seconds[1] += update.returning
    track.busy_seconds += update.seconds
    track.starts.append(start)
    track.stops.append(track.now)
