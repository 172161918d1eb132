"""The simulator against a slow oracle: all times raised from zero until every law of the simulator holds.

The oracle shares no code with the simulator but the rows of the schedule and the placement. It plays every rank, also
where the simulator plays one for several. Where replicas share each microbatch there are no norms: the simulator plays
one replica of each stage, and only the norms of that one.
"""

from dataclasses import dataclass, field, replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Receive,
    ReceiveNorms,
    Recompute,
    Reduce,
    Send,
    SendNorms,
    Update,
)
from penstock.scheduling.schedules import Programs, Schedule
from penstock.simulating import Assumptions, plan_costs, simulate
from penstock.simulating.assumptions import Options
from penstock.simulating.simulator import execute
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkMatrix, MessageCosts
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile
from support.simulation_problems import problems

Spot = tuple[int, int]
Message = tuple[int, int, int]
"""The spot of a send, and the rank that it goes to."""


@dataclass
class Oracle:
    """Starts and stops of all actions; `moves` says which send a receive waits for."""

    schedule: Schedule
    plan: Plan
    profile: Profile
    cluster: Cluster
    overlap: bool
    overlap_reduce: bool
    shares_medium: bool
    wire_share: float
    programs: Programs
    start: dict[Spot, float] = field(default_factory=dict)
    stop: dict[Spot, float] = field(default_factory=dict)
    begun: dict[Spot, float] = field(default_factory=dict)
    """When a replica could begin an all-reduce."""
    left: dict[Message, float] = field(default_factory=dict)
    arrived: dict[Message, float] = field(default_factory=dict)

    def layers(self, stage: int) -> tuple[LayerProfile, ...]:
        return self.profile.layers[self.plan.stages[stage].start : self.plan.stages[stage].stop]

    def share(self, stage: int) -> int:
        return len(self.plan.stages[stage].ranks) if self.schedule.placement.split else 1

    def pace(self, stage: int, rank: int) -> float:
        """How much longer a layer takes than in the profile; replicas that share a microbatch wait for each other."""
        ranks = self.plan.stages[stage].ranks if self.schedule.placement.split else (rank,)
        return max(1 / self.cluster.kind_of(rank).speed for rank in ranks)

    def weight_part(self, stage: int) -> float:
        """Where it was not measured: half of a backward, of layers with weights."""
        shares = [
            (layer.backward_seconds / 2 if layer.parameter_bytes else 0.0)
            if layer.weight_seconds is None
            else layer.weight_seconds
            for layer in self.layers(stage)
        ]
        return sum(shares)

    def peers(self, action: Send | SendNorms | Receive | ReceiveNorms, rank: int) -> tuple[int, ...]:
        place, stage = self.schedule.placement, action.stage
        if isinstance(action, SendNorms):
            return place.peer_replicas(stage, action.target, rank)
        if isinstance(action, ReceiveNorms):
            return (place.peer_replica(stage, action.source, rank),)
        return (place.rank_of(action.target if isinstance(action, Send) else action.source, action.microbatch),)

    def transfer(self, stage: int, other: int, rank: int, peer: int, *, norms: bool) -> tuple[float, ...]:
        """From `rank` of `stage` to `peer` of `other`: seconds on the link, latency, the seconds that each end is busy,
        whatever the bytes and with the bytes, and the share of the seconds on the link in which both ends stand still.
        """
        place = self.schedule.placement
        here, there = (place.stages[stage], place.stages[other]) if place.split else ((rank,), (peer,))
        pairs = [(a, b) for a in here for b in there]
        size = 8 * len(place.stages) if norms else self.wire_share * self.layers(min(stage, other))[-1].cut_bytes
        share = size / len(pairs)
        ends = [[self.cluster.message_costs(a, b) for b in there if a != b] for a in here]
        ends += [[self.cluster.message_costs(a, b) for a in here if a != b] for b in there]
        return (
            share / min(self.cluster.bandwidth(*pair) for pair in pairs),
            max(self.cluster.latency(*pair) for pair in pairs),
            max(sum(cost.seconds for cost in end) for end in ends),
            max(sum(cost.seconds_per_byte * share for cost in end) for end in ends),
            max(self.cluster.message_costs(*pair).blocking for pair in pairs) if self.overlap else 1.0,
        )

    def ring(self, stage: int) -> float:
        ranks = self.plan.stages[stage].ranks
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        rounds = 2 * (len(ranks) - 1)
        size = sum(layer.parameter_bytes for layer in self.layers(stage))
        slowest = min(self.cluster.bandwidth(*pair) for pair in pairs)
        size /= 1 if self.shares_medium else len(ranks)
        return rounds * size / slowest + rounds * max(self.cluster.latency(*pair) for pair in pairs)

    def exposed(self, stage: int) -> float:
        """The share of an all-reduce that no backward hides."""
        ranks = self.plan.stages[stage].ranks
        ring = [self.cluster.message_costs(a, b).blocking for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
        return max(ring) if self.overlap_reduce else 1.0

    def ring_handling(self, stage: int) -> float:
        """Each replica sends 2 (r - 1) shares of the weights to the next one, and takes in as many."""
        ranks = self.plan.stages[stage].ranks
        costs = [self.cluster.message_costs(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
        share = sum(layer.parameter_bytes for layer in self.layers(stage)) / len(ranks)
        most = max(cost.seconds for cost in costs) + share * max(cost.seconds_per_byte for cost in costs)
        return 4 * (len(ranks) - 1) * most

    def run(self) -> None:
        spots = [(rank, index) for rank, row in enumerate(self.programs) for index in range(len(row))]
        self.start, self.stop, self.begun = ({spot: 0.0 for spot in spots} for _ in range(3))
        sends: dict[object, Message] = {}
        queue: dict[tuple[int, int], list[Message]] = {}
        place = self.schedule.placement
        for rank, index in spots:
            action = self.programs[rank][index]
            if isinstance(action, Send | SendNorms):
                for peer in self.peers(action, rank):
                    # One message to a stage stands for those to all replicas that share the microbatch.
                    sent = rank, index, peer
                    one = (action.version, peer) if isinstance(action, SendNorms) else (action.microbatch, None)
                    sends[type(action), action.stage, action.target, rank, *one] = sent
                    queue.setdefault((rank, peer), []).append(sent)
                    self.left[sent] = self.arrived[sent] = 0.0
        before = {line[i]: line[i - 1] for line in queue.values() for i in range(1, len(line))}
        changed = True
        while changed:
            changed = False
            for rank, row in enumerate(self.programs):
                clock = ring_free = 0.0
                backward: dict[int, int] = {}
                for index, action in enumerate(row):
                    spot, begin, end = (rank, index), clock, clock
                    layers = self.layers(action.stage)
                    share = self.share(action.stage) / self.pace(action.stage, rank)
                    if not isinstance(action, Send | SendNorms | Receive | ReceiveNorms | Reduce):
                        clock += self.cluster.action_seconds
                    if isinstance(action, Forward | Recompute):
                        end = clock = clock + sum(layer.forward_seconds for layer in layers) / share
                    elif isinstance(action, BackwardWeight):
                        end = clock = clock + self.weight_part(action.stage) / share + 0.5
                        backward[action.stage] = index
                    elif isinstance(action, Backward | BackwardInput):
                        seconds = sum(layer.backward_seconds for layer in layers) / share
                        if isinstance(action, BackwardInput):
                            seconds -= self.weight_part(action.stage) / share
                        end = clock = clock + seconds
                        if isinstance(action, Backward):
                            backward[action.stage] = index
                    elif isinstance(action, Update):
                        end = clock = clock + 0.25 * sum(layer.parameter_bytes for layer in layers)
                    elif isinstance(action, Send | SendNorms):
                        norms = isinstance(action, SendNorms)
                        for peer in self.peers(action, rank):
                            sent = rank, index, peer
                            seconds, latency, handling, copying, blocked = self.transfer(
                                action.stage, action.target, rank, peer, norms=norms
                            )
                            clock += handling
                            leaves = max(clock, self.left[before[sent]] if sent in before else 0.0)
                            begin = begin if norms else leaves
                            changed |= self.left[sent] != leaves + seconds
                            self.left[sent] = leaves + seconds
                            self.arrived[sent] = leaves + seconds + latency
                            end = max(end, self.arrived[sent])
                            clock += blocked * (self.left[sent] - clock) + copying
                    elif isinstance(action, Receive | ReceiveNorms):
                        norms = isinstance(action, ReceiveNorms)
                        (source,) = self.peers(action, rank)
                        kind = SendNorms if norms else Send
                        one = (action.version, rank) if isinstance(action, ReceiveNorms) else (action.microbatch, None)
                        seconds, _, handling, copying, blocked = self.transfer(
                            action.source, action.stage, source, rank, norms=norms
                        )
                        arrival = self.arrived[sends[kind, action.source, action.stage, source, *one]]
                        clock += copying + blocked * seconds
                        end = clock = max(clock, arrival) + handling
                    else:
                        assert isinstance(action, Reduce)
                        places = [(r, self.programs[r].index(action)) for r in place.stages[action.stage]]
                        handled = self.ring_handling(action.stage)
                        come = max(self.start[other] for other in places) + handled
                        begun = clock + handled
                        if action.stage in backward:
                            first = self.start[rank, backward[action.stage]]
                            begun = first + self.exposed(action.stage) * (begun - first)
                        self.begun[spot] = max(begun, ring_free)
                        end = max(come, max(self.begun[other] for other in places) + self.ring(action.stage))
                        clock = ring_free = end
                    changed |= (begin, end) != (self.start[spot], self.stop[spot])
                    self.start[spot], self.stop[spot] = begin, end


costs = st.sampled_from([0.0, 0.25, 1.0])


@st.composite
def busy_problems(draw: st.DrawFn) -> tuple[Schedule, Plan, Profile, Cluster, int]:
    """`problems` whose messages take time of the ranks, each link's their own, half of them with norms."""
    schedule, plan, profile, cluster, minibatches = draw(problems())
    ranks = range(cluster.devices)
    rates, delays = (
        tuple(tuple(of(a, b) for b in ranks) for a in ranks) for of in (cluster.bandwidth, cluster.latency)
    )
    made = draw(st.lists(st.builds(MessageCosts, costs, costs, st.sampled_from([0, 0.5, 1])), min_size=1, max_size=4))
    taken = cycle(made)
    rows = tuple(tuple(next(taken) for _ in ranks) for _ in ranks)
    cluster = replace(cluster, links=LinkMatrix(rates, delays, rows), action_seconds=draw(costs))
    can_wait = schedule.definition.synchronizes_updates and not schedule.placement.split
    return replace(schedule, norms=can_wait and draw(st.booleans())), plan, profile, cluster, minibatches


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(busy_problems(), st.tuples(*[st.booleans()] * 3), st.sampled_from([1.0, 0.5]))
def test_equals_the_fixed_point(
    problem: tuple[Schedule, Plan, Profile, Cluster, int], assumed: tuple[bool, bool, bool], wire_share: float
) -> None:
    schedule, plan, profile, cluster, minibatches = problem
    overlap, overlap_reduce, shares_medium = assumed
    programs = schedule.program(minibatches)
    oracle = Oracle(schedule, plan, profile, cluster, *assumed, wire_share, programs)
    oracle.run()
    sent = profile.with_wire_share(wire_share)
    options: Options = {
        "update_seconds_per_byte": 0.25,
        "overlap": overlap,
        "overlap_reduce": overlap_reduce,
        "allreduce": "shared" if shares_medium else "ring",
        "split_seconds": 0.5,
    }
    if schedule.norms:
        # A plan says nothing of norms.
        timed = plan_costs(plan, sent, cluster, schedule.placement, Assumptions(**options))
        timeline = execute(programs, schedule.placement, timed)
    else:
        timeline = simulate(plan, sent, cluster, minibatches, **options)
    spans = iter(timeline.spans)
    exact = all(count in (1, 2, 4) for count in map(len, schedule.placement.stages))

    for rank, row in enumerate(programs):
        for index, action in enumerate(row):
            span = next(spans)
            assert (span.rank, span.action) == (rank, str(action))
            found = span.start_seconds, span.stop_seconds
            expected = oracle.start[rank, index], oracle.stop[rank, index]
            # Thirds are not exact, and the oracle adds them up in another order.
            assert found == expected if exact else all(abs(a - b) < 1e-9 for a, b in zip(found, expected, strict=True))
