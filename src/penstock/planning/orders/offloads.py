"""Offloads for an order that takes too much memory: which microbatches leave the device, and when they come back.

An order is first simulated without offloads. Wherever a rank holds more than its limit, the microbatch that is in
flight longest leaves, of those that are away by then; and so on, until the limit holds. A copy is planned where the
link to the host is free and nothing waits for it: its memory is free for the first action that begins when it has
left, and it is back before its backward. So the times stay as they are, and the simulator judges the result.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Unpack

import numpy as np

from penstock.scheduling.actions import Compute, Forward, HostCopy, InputGradients, Offload, Reload
from penstock.scheduling.written_programs import define_by_programs
from penstock.simulating.action_costs import plan_costs
from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.simulator import planned_schedule, simulate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile


class _Life(NamedTuple):
    """A microbatch from its forward to its first backward, which have these places in a row, and what a copy takes."""

    stage: int
    microbatch: int
    forward: int
    backward: int
    moved_bytes: float
    copy_seconds: float


class _Trip(NamedTuple):
    """From when the memory of a microbatch is free, for the action at the place `away`, until it is taken again, before
    the action at the place `back`.
    """

    away: int
    free: float
    taken: float
    back: int


def offload_order(
    name: str, plan: Plan, profile: Profile, cluster: Cluster, limits: Sequence[float], **options: Unpack[Options]
) -> Plan | None:
    """`plan`, which flushes, with the offloads that keep each rank within its limit, as schedule
    `name`; None if there are none. `cluster` has a `host_bandwidth`. `limits`: the most bytes of each rank.
    """
    made, width = planned_schedule(plan, profile), plan.tensor_parallel
    if any("|" in row for row in made.definition.programs):
        return None
    costs = plan_costs(plan, profile, cluster, made.placement, Assumptions(**options), skips=made.skips)
    copies = [size / (cluster.host_bandwidth or inf) for size in costs.offloaded_bytes]
    timeline = simulate(plan, profile, cluster, 1, **options)
    programs: list[tuple[Compute | HostCopy, ...]] = []
    for rank, program in enumerate(made.step(0)):
        spans = [span for span in timeline.spans if span.rank == rank * width and span.computes]
        row = _Row(
            tuple(action for action in program if isinstance(action, Compute)),
            tuple(span.start_seconds for span in spans),
            tuple(span.stop_seconds for span in spans),
            cluster.host_bytes,
        )
        lives = row.lives(costs.offloaded_bytes, copies)
        trips = row.trips_within(limits[rank], list(timeline.memory[rank * width].total_curve()), lives)
        if trips is None:
            return None
        programs.append(tuple(row.inserted(trips)))
    return replace(plan, schedule=define_by_programs(name, tuple(programs)), predicted=None)


@dataclass(frozen=True, slots=True)
class _Row:
    """What a rank computes in a step, and when."""

    actions: tuple[Compute, ...]
    starts: tuple[float, ...]
    stops: tuple[float, ...]
    host_bytes: float

    def lives(self, sizes: Sequence[float], copies: Sequence[float]) -> list[_Life]:
        """The longest-lived first. `sizes` and `copies`: bytes and seconds, by stage."""
        begun: dict[tuple[int, int], int] = {}
        found = []
        for place, action in enumerate(self.actions):
            stage = action.stage
            if isinstance(action, Forward):
                begun[stage, action.microbatch] = place
            elif isinstance(action, InputGradients) and sizes[stage] > 0:
                forward = begun[stage, action.microbatch]
                copied = {"moved_bytes": sizes[stage], "copy_seconds": copies[stage]}
                found.append(_Life(stage, action.microbatch, forward, place, **copied))
        return sorted(found, key=lambda life: self.stops[life.forward] - self.starts[life.backward])

    def trips_within(
        self, limit: float, curve: Sequence[tuple[float, float]], lives: Sequence[_Life]
    ) -> dict[_Life, _Trip] | None:
        """The trips that keep `curve`, the bytes of the rank from each second on, within `limit`; None if there are
        none.
        """
        changes, sizes = np.array(curve, dtype=np.float64).T
        times = np.unique(np.concatenate([changes, self.starts, self.stops]))
        most = sizes[np.maximum(np.searchsorted(changes, times, side="right") - 1, 0)]
        until = np.append(times[1:], inf)
        trips: dict[_Life, _Trip] = {}
        while True:
            held = most.copy()
            for life, trip in trips.items():
                held[(times >= trip.free) & (until <= trip.taken)] -= life.moved_bytes
            worst = int(held.argmax())
            if held[worst] <= limit:
                return trips
            for life in lives:
                tried = None if life in trips else self._trips([*trips, life])
                if tried is not None and tried[life].free <= times[worst] and until[worst] <= tried[life].taken:
                    trips = tried
                    break
            else:
                return None

    def _trips(self, lives: Sequence[_Life]) -> dict[_Life, _Trip] | None:
        """When each of `lives` is away; None if one would have to be waited for, or finds no room on the host."""
        gone: dict[_Life, int] = {}
        free, due = 0.0, inf
        for life in sorted(lives, key=lambda life: life.forward):
            free = max(free, self.stops[life.forward]) + life.copy_seconds
            gone[life] = bisect_left(self.starts, free, life.forward + 1)
            there = sum(each.moved_bytes for each in lives if each.forward <= life.forward < each.backward)
            if gone[life] >= life.backward or there > self.host_bytes:
                return None
        trips: dict[_Life, _Trip] = {}
        for life in sorted(lives, key=lambda life: life.backward, reverse=True):
            due = min(due, self.starts[life.backward]) - life.copy_seconds
            back = next((place for place in range(life.backward, 0, -1) if self.stops[place - 1] <= due), 0)
            if back <= gone[life]:
                return None
            trips[life] = _Trip(gone[life], self.starts[gone[life]], self.stops[back - 1], back)
        return trips

    def inserted(self, trips: Mapping[_Life, _Trip]) -> Iterator[Compute | HostCopy]:
        """The row with the offloads and reloads of these trips."""
        lives = sorted(trips, key=lambda life: life.backward)
        for place, action in enumerate(self.actions):
            yield from (Reload(life.stage, life.microbatch) for life in lives if trips[life].back == place)
            yield action
            for life in (life for life in lives if life.forward == place):
                yield Offload(life.stage, life.microbatch, trips[life].away - place)
