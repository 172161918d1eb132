"""The player: when every instruction of every rank happens.

Nothing here is random and no clock is read: every start is the latest of the times that it waits for.

Laws of this file:
  1. A rank does its instructions one after the other.
  2. A receive blocks until its message is there. A send does not block; without overlap the sender is busy until its
     message has left, and a receive takes as long as its message is on the link at least.
  3. A link carries one message at a time: in the order of the sends, and of their times where several ranks share it.
  4. An all-reduce is a meeting of all replicas that are played: each waits for the end. Without overlap it begins when
     the last has come; with overlap it may begin when the last of them has begun its last backward, since gradients
     are there layer by layer, and ends when all have come or later. A rank takes part in one all-reduce at a time, and
     these do not compete with messages for links.
  5. Where ranks share a host, a computation takes as long as `sharing` says; everything else takes none of the cores.
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
    COMPUTE,
    RECEIVE,
    SEND,
    SHARED,
    SPREAD,
    Instructions,
    Meeting,
    Way,
    content_text,
)
from penstock.simulating.shared_hosts import Sharing

__all__ = ["Player", "Track"]


@dataclass(slots=True, eq=False)
class Track:
    """One rank on its way through its instructions, and the times of those that are done."""

    rank: int
    instructions: Instructions
    now: float = 0.0
    busy_seconds: float = 0.0
    """Spent on computing."""
    talking_seconds: float = 0.0
    """Spent on messages, where they do not overlap computing."""
    starts: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    messages: list[float] = field(default_factory=list)
    """Of every SEND when the message has left, of every RECEIVE when it has arrived, in the order of the row."""
    ring_free: float = 0.0


class Player:
    """Plays tracks to their end."""

    def __init__(
        self, tracks: Sequence[Track], placement: Placement, assumptions: Assumptions, links: int, edges: int
    ) -> None:
        self.tracks = tracks
        self.reduce_seconds: dict[int, list[float]] = {}
        """By stage: seconds of all its all-reduces, and of these the seconds after the last replica had come."""
        self.link_seconds = [0.0] * links
        """Of each link, how long messages occupied it."""
        self._of_rank = {track.rank: track for track in tracks}
        self._placement = placement
        self._assumptions = assumptions
        self._queues: list[deque[tuple[float, int]]] = [deque() for _ in range(edges)]
        self._free = [0.0] * links
        self._waiting: dict[int, Track] = {}
        self._meetings: dict[tuple[int, int], dict[int, float]] = {}
        self._met: dict[int, tuple[float, float]] = {}
        self._ready: list[tuple[float, int]] = []
        self._sharing = Sharing(assumptions.slowdowns)
        self._clock = 0.0

    def play(self, rows: Mapping[int, Sequence[Action]]) -> None:
        """Until all tracks are done. `rows`: their actions, for errors. `ScheduleError` if a message does not come."""
        self._ready = [(0.0, track.rank) for track in self.tracks]
        advance = self._advance
        while self._ready or self._sharing:
            if self._sharing and (not self._ready or self._sharing.next_end() <= self._ready[0][0]):
                rank = self._end_shared()
            else:
                self._clock, rank = heappop(self._ready)
            advance(self._of_rank[rank], rows)
        if any(len(track.stops) < len(track.instructions.kinds) for track in self.tracks):
            raise self._stuck(rows)

    def _advance(self, track: Track, rows: Mapping[int, Sequence[Action]]) -> None:
        """Goes on with `track` until it must wait."""
        starts, stops, messages = track.starts, track.stops, track.messages
        queues, free, carried = self._queues, self._free, self.link_seconds
        waiting, overlap, ordered = self._waiting, self._assumptions.overlap, self._assumptions.shared_nic
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
                edge, link, seconds, latency, legs = what
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
                if not overlap:
                    now = left
                    track.talking_seconds += seconds
                if edge in waiting:
                    self._wake(waiting.pop(edge), arrival)
            elif code == RECEIVE:
                queue = queues[what[0]]
                if not queue:
                    waiting[what[0]] = track
                    break
                arrival, found = queue.popleft()
                if found != contents[len(messages)]:
                    raise self._mismatch(rows[track.rank][index], track.rank, what, found)
                starts.append(now)
                if not overlap:
                    now += what[2]
                    track.talking_seconds += what[2]
                now = arrival if arrival > now else now
                stops.append(now)
                messages.append(arrival)
            else:
                track.now = now
                if not self._has_done(track, code, what):
                    break
                now = track.now
        track.now, track.busy_seconds = now, track.busy_seconds + busy

    def _has_done(self, track: Track, code: int, what: Any) -> bool:
        """An instruction that is rare, or takes long to play anyway; False if `track` must wait."""
        now = track.now
        if code == SPREAD:
            if self._assumptions.shared_nic and self._ready and self._ready[0] < (now, track.rank):
                heappush(self._ready, (now, track.rank))
                return False
            track.now = self._spread(track, what, now)
            return True
        if code == SHARED:
            self._begin_shared(track, what, now)
            return False
        if not self._meet(track, what):
            return False
        track.starts.append(now)
        track.now = self._met.pop(track.rank)[1]
        track.stops.append(track.now)
        return True

    def _begin_shared(self, track: Track, work: float, now: float) -> None:
        """At `now`, or comes back to it then: what others do until then changes what it shares."""
        if now > self._clock:
            heappush(self._ready, (now, track.rank))
        else:
            self._sharing.begin(track.rank, work, now)
            track.starts.append(now)

    def _end_shared(self) -> int:
        """The rank whose computation is the next to end."""
        rank, self._clock = self._sharing.end()
        track = self._of_rank[rank]
        track.now = self._clock
        track.busy_seconds += track.now - track.starts[-1]
        track.stops.append(track.now)
        return rank

    def _wake(self, track: Track, arrival: float) -> None:
        heappush(self._ready, (max(track.now, arrival), track.rank))

    def _occupy(self, legs: Sequence[tuple[int, float]], now: float) -> tuple[float, float]:
        """A message over several links at once: when the first part begins, and when the last has left."""
        free = self._free
        start, left = inf, now
        for link, seconds in legs:
            begin = max(now, free[link])
            free[link] = begin + seconds
            self.link_seconds[link] += seconds
            start, left = min(start, begin), max(left, free[link])
        return start, left

    def _spread(self, track: Track, what: tuple[int, Sequence[Way]], now: float) -> float:
        """One message to several ranks, one after the other; returns when `track` goes on."""
        content, ways = what
        track.starts.append(now)
        stop = now
        for edge, _, seconds, latency, legs in ways:
            _, left = self._occupy(legs, now)
            self._queues[edge].append((left + latency, content))
            stop = max(stop, left + latency)
            if not self._assumptions.overlap:
                now = left
                track.talking_seconds += seconds
            if edge in self._waiting:
                self._wake(self._waiting.pop(edge), left + latency)
        track.stops.append(stop)
        return now

    def _meet(self, track: Track, meeting: Meeting) -> bool:
        """Whether the all-reduce that `track` has come to is over; the last one to come wakes the others."""
        if track.rank in self._met:
            return True
        stage, version, seconds = meeting.stage, meeting.version, meeting.seconds
        begun = (
            track.starts[meeting.backward] if meeting.backward >= 0 and self._assumptions.overlap_reduce else track.now
        )
        arrived = self._meetings.setdefault((stage, version), {})
        arrived[track.rank] = max(begun, track.ring_free)
        members = [rank for rank in self._placement.stages[stage] if rank in self._of_rank]
        if len(arrived) < len(members):
            return False
        del self._meetings[stage, version]
        come = max(self._of_rank[rank].now for rank in members)
        end = max(come, max(arrived.values()) + seconds)
        spent = self.reduce_seconds.setdefault(stage, [0.0, 0.0])
        spent[0] += seconds
        spent[1] += end - come
        for rank in members:
            self._of_rank[rank].ring_free = end
            self._met[rank] = come, end
            if rank != track.rank:
                heappush(self._ready, (end, rank))
        return True

    def _mismatch(self, action: Action, rank: int, way: Way, found: int) -> ScheduleError:
        text = content_text(found, len(self._placement.stages))
        return ScheduleError(
            f"rank {rank}: expected the message of {action} to be next on the link to it, found that of {text}: "
            "receive in the order of the sends"
        )

    def _stuck(self, rows: Mapping[int, Sequence[Action]]) -> ScheduleError:
        places = []
        for track in self.tracks:
            index = len(track.stops)
            if index < len(track.instructions.kinds):
                action = rows[track.rank][index]
                code = track.instructions.kinds[index]
                cause = "a message that is never sent" if code == RECEIVE else "replicas that never come to it"
                places.append(f"rank {track.rank} waits in {action} (its action {index}) for {cause}")
        return ScheduleError(
            f"the schedule cannot run: {'; '.join(places)}. Put the sends before the receives that need them; "
            "penstock.verify shows the rows"
        )
