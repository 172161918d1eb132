"""The simulator: predicts the timeline of a schedule from the seconds of a profile.

It reads the programs that the worker runs, so a prediction cannot describe another schedule than the one that trains.
`event_simulation` computes when everything happens; this file turns a schedule or plan into its input and its result
into a timeline.

Every action becomes one span. A send lasts from when its link is free until its message has arrived, a receive and an
all-reduce as long as the rank waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Unpack, assert_never

from penstock.arguments import check_arguments, instance, integer
from penstock.errors import PlanError, ScheduleError
from penstock.scheduling.actions import Action
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.skips import choose_skips
from penstock.simulating.action_costs import Costs, plan_costs
from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.event_simulation import EventSimulation, Track
from penstock.simulating.instructions import Writer
from penstock.simulating.memory_traces import Sizes, trace_memory
from penstock.simulating.transfer_times import slowest_link
from penstock.timelines.memories import RankMemory
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.values.clusters import CLUSTER, Cluster
from penstock.values.crossings import find_hops
from penstock.values.plans import Plan, Stage, schedule
from penstock.values.profiles import Profile

_RULES = {
    "schedule_or_plan": instance(
        (Schedule, Plan), "a penstock.Schedule or a penstock.Plan", "make a plan with penstock.plan or Plan.uniform"
    ),
    "profile": instance(
        Profile, "a penstock.Profile", "measure the model with penstock.profile, or read a file with Profile.load"
    ),
    "cluster": CLUSTER,
}


def simulate(
    schedule_or_plan: Schedule | Plan,
    profile: Profile,
    cluster: Cluster,
    minibatches: int | None = None,
    **options: Unpack[Options],
) -> Timeline:
    """The predicted timeline of `minibatches` steps and the drain, in seconds from the start of the first forward.

    A plan has its stages; for a bare schedule the layers are split into stages of equal length (`Plan.uniform`).
    Tensors that skip stages are sent as in a `Pipeline`, directly where that is cheaper, if the profile has them; for a
    bare schedule, as its skips define. `minibatches` defaults to `default_minibatches`. Gradients of tied weights wait
    for their partner but take no time on the link, since a profile does not contain ties. With tensor parallelism the
    profile is that of one rank of a group, and all ranks of the group do the same. For an asynchronous schedule
    `Timeline.bubble` includes the fill and the drain of these minibatches, and `Timeline.steady_bubble` does not.

    Keywords are those of `Assumptions`: update_seconds_per_byte (0), overlap (True), overlap_reduce (True), allreduce
    ("ring"), shared_nic (False), optimizer_copies (2), master_copies (0), version_copies (1), state_on_host
    (False), shard_optimizer (False), slowdowns (none), split_seconds (3e-4).

    Raises `PlanError` if plan, profile and cluster do not match, and `ScheduleError` if the schedule cannot run.
    """
    check_arguments("simulate", _RULES, PlanError, schedule_or_plan=schedule_or_plan, profile=profile, cluster=cluster)
    match schedule_or_plan:
        case Plan():
            plan, simulated = schedule_or_plan, planned_schedule(schedule_or_plan, profile)
        case Schedule():
            plan, simulated = _uniform(schedule_or_plan, len(profile.layers)), schedule_or_plan
        case _:
            assert_never(schedule_or_plan)
    placement = simulated.placement
    costs = plan_costs(plan, profile, cluster, placement, Assumptions(**options), skips=simulated.skips)
    programs = simulated.program(default_minibatches(simulated, minibatches))
    symmetry = find_symmetry(placement, costs, simulated.microbatches)
    result = play({rank: programs[rank] for rank in symmetry.simulated}, placement, costs)
    sizes = Sizes.of(costs, placement)
    memory = {rank: trace_memory(track, sizes, costs, simulated) for rank, track in result.tracks.items()}
    passed = Sizes.of(costs.on_wire, placement)
    return _timeline(programs, result.tracks, symmetry, passed, width=plan.tensor_parallel, memory=memory)


def planned_schedule(plan: Plan, profile: Profile) -> Schedule:
    """The schedule of `plan` with the skips that a `Pipeline` chooses for a model of this profile."""
    return choose_skips(schedule(plan), find_hops(profile.crossings, [stage.start for stage in plan.stages]))


def default_minibatches(schedule: Schedule, minibatches: int | None = None) -> int:
    """`minibatches` if given; else one for a schedule that flushes, and enough to fill the pipe twice and to continue
    after an update for another.
    """
    if minibatches is None:
        if schedule.flushes:
            return 1
        depth = max(schedule.in_flight(stage) * schedule.placement.stride(stage) for stage in range(schedule.stages))
        microbatches = max(2 * depth, schedule.microbatches_per_update + 1)
        return -(-microbatches // schedule.microbatches)
    return integer(1).but("give how many").check("minibatches", minibatches, ScheduleError)


def execute(programs: Programs, placement: Placement, costs: Costs) -> Timeline:
    """The timeline of `programs` (a row of actions per rank), from second 0.

    Raises `ScheduleError` if a rank receives another message than the next on its link, or one that is never sent.
    """
    symmetry = find_symmetry(placement, costs, None)
    result = play({rank: programs[rank] for rank in symmetry.simulated}, placement, costs)
    return _timeline(programs, result.tracks, symmetry, Sizes.of(costs.on_wire, placement))


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """The actions that were simulated, by rank (`rows`), their times (`tracks`), and what computed these."""

    rows: Mapping[int, Sequence[Action]]
    tracks: Mapping[int, Track]
    writer: Writer
    events: EventSimulation

    @property
    def seconds(self) -> float:
        """When the last action ends."""
        return max((track.now for track in self.tracks.values()), default=0.0)


def play(rows: Mapping[int, Sequence[Action]], placement: Placement, costs: Costs) -> SimulatedRun:
    """Simulates the `rows` of some ranks, from second 0. Raises `ScheduleError` like `execute`."""
    writer = Writer(placement, costs)
    tracks = [Track(rank, writer.write(rank, row)) for rank, row in rows.items()]
    events = EventSimulation(tracks, placement, costs.assumptions, len(writer.links), len(writer.edges))
    events.play(rows)
    return SimulatedRun(rows, {track.rank: track for track in tracks}, writer, events)


@dataclass(frozen=True, slots=True)
class ReplicaSymmetry:
    """The ranks that are simulated, ascending, and for every rank the one of them that represents it."""

    simulated: tuple[int, ...]
    representatives: tuple[int, ...]


def find_symmetry(placement: Placement, costs: Costs, microbatches: int | None) -> ReplicaSymmetry:
    """Which ranks are simulated under a schedule with `microbatches` per minibatch; None if their number is not known.

    Of replicas that do the same at the same times, only one is:

    - Replicas that split every microbatch run in step: the first of each stage represents all.
    - Where every stage has d replicas that take turns, and d divides the minibatch, they form d pipelines that do the
      same d microbatches apart. If their devices and links are equal, the pipeline of the first replicas represents
      all.
    - Otherwise every rank is simulated.
    """
    if placement.split and costs.assumptions.slowdowns:
        raise PlanError(
            "slowdowns: expected none where replicas split microbatches, found some: all replicas of a stage compute "
            "at the same time, so scale the profile's seconds instead"
        )
    if not (placement.split or _runs_in_pipelines(placement, costs, microbatches)):
        every = tuple(range(placement.ranks))
        return ReplicaSymmetry(every, every)
    first = {rank: ranks[0] for ranks in placement.stages for rank in ranks}
    representatives = tuple(first[rank] for rank in range(placement.ranks))
    return ReplicaSymmetry(tuple(sorted(set(representatives))), representatives)


def _runs_in_pipelines(placement: Placement, costs: Costs, microbatches: int | None) -> bool:
    replicas = placement.replicas(0)
    if replicas == 1 or microbatches is None or microbatches % replicas or costs.assumptions.shared_nic:
        return False
    if costs.assumptions.slowdowns:
        return False
    if not placement.equal(range(len(placement.stages))):
        return False
    if costs.rank_times and any(len({costs.times_of(rank) for rank in ranks}) > 1 for ranks in placement.stages):
        return False
    if costs.cluster is None:
        return True
    far = [(placement.stages[here], placement.stages[there]) for (here, there), _ in costs.skips]
    pairs = {pair for pair in (*pairwise(placement.stages), *far) if pair[0] != pair[1]}
    return all(_links_are_equal(costs.cluster, here, there, costs.tensor_parallel) for here, there in pairs)


def _links_are_equal(cluster: Cluster, here: tuple[int, ...], there: tuple[int, ...], width: int) -> bool:
    kinds = {
        (
            slowest_link(cluster, (a * width + tp_rank,), (b * width + tp_rank,)),
            slowest_link(cluster, (b * width + tp_rank,), (a * width + tp_rank,)),
            cluster.message_costs(a * width + tp_rank, b * width + tp_rank),
            cluster.message_costs(b * width + tp_rank, a * width + tp_rank),
        )
        for a, b in zip(here, there, strict=True)
        for tp_rank in range(width)
    }
    return len(kinds) == 1


def _timeline(
    programs: Programs,
    tracks: Mapping[int, Track],
    symmetry: ReplicaSymmetry,
    sizes: Sizes,
    *,
    width: int = 1,
    memory: Mapping[int, RankMemory] | None = None,
) -> Timeline:
    """The spans of all ranks; each rank of the schedule becomes `width` ranks, which do the same."""
    spans: list[Span] = []
    for rank, row in enumerate(programs):
        track = tracks[symmetry.representatives[rank]]
        texts = list(map(str, row))
        passed = [size or None for size in sizes.message_bytes(track.instructions).tolist()]
        for member in range(rank * width, rank * width + width):
            # Checking every span takes most of the time of a long simulation, and these are valid.
            spans += map(Span.unchecked, repeat(member, len(texts)), texts, track.starts, track.stops, passed)
    held = () if memory is None else tuple(memory[first] for first in symmetry.representatives for _ in range(width))
    return Timeline(tuple(spans), len(programs) * width, held)


def _uniform(schedule: Schedule, layers: int) -> Plan:
    """A plan with stages of equal length on the ranks of `schedule`; only its stages are used."""
    placement = schedule.placement
    even = Plan.uniform(layers, schedule.stages)
    stages = tuple(Stage(own.start, own.stop, ranks) for own, ranks in zip(even.stages, placement.stages, strict=True))
    return Plan(
        stages,
        schedule.definition,
        schedule.microbatches,
        recompute=tuple(schedule.recomputed),
        streamed=tuple(schedule.streamed),
        routing="split" if placement.split else "round-robin",
    )


def balanced_bubble(schedule: Schedule, recomputed: frozenset[int] = frozenset()) -> float:
    """The idle share of all ranks, where a backward takes twice as long as a forward.

    A stage of r replicas that take turns takes r times as long for a microbatch as one of a single rank, so that all
    ranks have as much to do. Under an asynchronous schedule it is the share without fill and drain. `recomputed`: the
    stages whose backwards compute their forwards again.
    """
    placement = schedule.placement
    forwards = tuple(1.0 if placement.split else float(len(ranks)) for ranks in placement.stages)
    costs = Costs(forwards, tuple(2 * seconds for seconds in forwards), recomputed=recomputed)
    timeline = execute(schedule.program(default_minibatches(schedule)), placement, costs)
    return timeline.bubble if schedule.flushes else timeline.steady_bubble
