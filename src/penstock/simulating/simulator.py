"""The simulator: plays a schedule through with the seconds of a profile, and says when everything happens.

It reads the programs that the worker runs, so a prediction cannot describe another schedule than the one that trains.
What happens when is `player`'s matter; here a schedule or plan becomes what is played, and this a timeline.

Every action becomes one span. A send lasts from when its link is free until its message has arrived, a receive and an
all-reduce as long as the rank waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Unpack, assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Action
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.skips import choose_skips
from penstock.simulating.assumptions import Assumptions, Options
from penstock.simulating.costs import Costs, plan_costs
from penstock.simulating.instructions import Writer
from penstock.simulating.memory_traces import Sizes, hold
from penstock.simulating.player import Player, Track
from penstock.simulating.replica_symmetry import Folding, fold
from penstock.timelines.memories import RankMemory
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.values.clusters import Cluster
from penstock.values.crossings import find_hops
from penstock.values.plans import Plan, Stage, schedule
from penstock.values.profiles import Profile

__all__ = ["Played", "execute", "planned_schedule", "play", "simulate", "telling_minibatches"]


def simulate(
    schedule_or_plan: Schedule | Plan,
    profile: Profile,
    cluster: Cluster,
    minibatches: int | None = None,
    **options: Unpack[Options],
) -> Timeline:
    """The predicted timeline of `minibatches` steps and the drain, in seconds from the start of the first forward.

    A plan brings its stages; for a bare schedule the layers are split into stages of equal length (`Plan.uniform`).
    What goes past stages goes as in a `Pipeline`: directly where that costs less, if the profile tells what it is; for
    a bare schedule, as its skips say.
    Without a number of minibatches: `telling_minibatches`. Gradients of tied weights wait for their partner but take
    no time on the link, since a profile does not know what is tied. With tensor parallelism the profile is that of one
    rank of a group, and all ranks of the group do the same. For an asynchronous schedule `Timeline.bubble` counts the
    fill and the drain of these minibatches, and `Timeline.steady_bubble` does not.

    Keywords are those of `Assumptions`: update_seconds_per_byte (0), overlap (True), overlap_reduce (True), allreduce
    ("ring"), shared_nic (False), optimizer_copies (2), master_copies (0), version_copies (1), slowdowns (none),
    split_seconds (3e-4).

    `PlanError` if plan, profile and cluster do not fit each other; `ScheduleError` if the schedule cannot run.
    """
    match schedule_or_plan:
        case Plan():
            plan, played = schedule_or_plan, planned_schedule(schedule_or_plan, profile)
        case Schedule():
            plan, played = _uniform(schedule_or_plan, len(profile.layers)), schedule_or_plan
        case _:
            assert_never(schedule_or_plan)
    placement = played.placement
    costs = plan_costs(plan, profile, cluster, placement, Assumptions(**options), played.skips)
    programs = played.program(telling_minibatches(played, minibatches))
    folding = fold(placement, costs, played.microbatches)
    result = play({rank: programs[rank] for rank in folding.played}, placement, costs)
    sizes = Sizes.of(costs, placement)
    memory = _remember(result, played, costs, sizes)
    return _timeline(programs, result.tracks, folding, sizes, plan.tensor_parallel, memory)


def planned_schedule(plan: Plan, profile: Profile) -> Schedule:
    """The schedule of `plan` with the skips that a `Pipeline` chooses for a model of this profile."""
    return choose_skips(schedule(plan), find_hops(profile.crossings, [stage.start for stage in plan.stages]))


def telling_minibatches(schedule: Schedule, minibatches: int | None = None) -> int:
    """`minibatches` if given, else as many as show what the schedule does.

    One for a schedule that flushes; else enough to fill the pipe twice and to go on after an update.
    """
    if minibatches is None:
        if schedule.flushes:
            return 1
        depth = max(schedule.in_flight(stage) * schedule.placement.stride(stage) for stage in range(schedule.stages))
        microbatches = max(2 * depth, schedule.microbatches_per_update + 1)
        return -(-microbatches // schedule.microbatches)
    if minibatches < 1:
        raise ScheduleError(f"minibatches: expected 1 or more, found {minibatches}: there is nothing to play otherwise")
    return minibatches


def execute(programs: Programs, placement: Placement, costs: Costs) -> Timeline:
    """When everything in `programs` (a row of actions per rank) happens, from second 0.

    `ScheduleError` if a rank receives another message than the next on its link, or waits for one that never comes.
    """
    folding = fold(placement, costs, None)
    result = play({rank: programs[rank] for rank in folding.played}, placement, costs)
    return _timeline(programs, result.tracks, folding, Sizes.of(costs, placement))


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """`rows`: the actions that were played, by rank. `tracks`: when they happened. And what made the times."""

    rows: Mapping[int, Sequence[Action]]
    tracks: Mapping[int, Track]
    writer: Writer
    player: Player

    @property
    def seconds(self) -> float:
        """When the last action ends."""
        return max((track.now for track in self.tracks.values()), default=0.0)


def play(rows: Mapping[int, Sequence[Action]], placement: Placement, costs: Costs) -> Played:
    """Plays the `rows` of some ranks, from second 0. `ScheduleError` as for `execute`."""
    writer = Writer(placement, costs)
    tracks = [Track(rank, writer.write(rank, row)) for rank, row in rows.items()]
    player = Player(tracks, placement, costs.assumptions, len(writer.links), len(writer.edges))
    player.play(rows)
    return Played(rows, {track.rank: track for track in tracks}, writer, player)


def _timeline(
    programs: Programs,
    tracks: Mapping[int, Track],
    folding: Folding,
    sizes: Sizes,
    width: int = 1,
    memory: Mapping[int, RankMemory] | None = None,
) -> Timeline:
    """The spans of all ranks; rank g of the schedule is `width` ranks here, which do the same."""
    spans: list[Span] = []
    for rank, row in enumerate(programs):
        track = tracks[folding.stands[rank]]
        texts = list(map(str, row))
        carried = [size or None for size in sizes.carried_by(track.instructions).tolist()]
        for lane in range(rank * width, rank * width + width):
            spans += map(_make_span, repeat(lane, len(texts)), texts, track.starts, track.stops, carried)
    held = () if memory is None else tuple(memory[first] for first in folding.stands for _ in range(width))
    return Timeline(tuple(spans), len(programs) * width, held)


_new = object.__new__
# Unpacked, so that a field more in Span is an error here at once.
_set_rank, _set_action, _set_start, _set_stop, _set_size = (Span.__dict__[field.name].__set__ for field in fields(Span))


def _make_span(rank: int, action: str, start: float, stop: float, size: float | None) -> Span:
    """``Span(...)`` without its checks, which take most of the time of a long simulation: these are right as made."""
    span = _new(Span)
    _set_rank(span, rank)
    _set_action(span, action)
    _set_start(span, start)
    _set_stop(span, stop)
    _set_size(span, size)
    return span


def _remember(result: Played, played: Schedule, costs: Costs, sizes: Sizes) -> dict[int, RankMemory]:
    return {rank: hold(track, sizes, costs, played) for rank, track in result.tracks.items()}


def _uniform(schedule: Schedule, layers: int) -> Plan:
    """Stages of equal length where `schedule` has them; of the plan, only they are used."""
    placement = schedule.placement
    even = Plan.uniform(layers, schedule.stages)
    stages = tuple(Stage(own.start, own.stop, ranks) for own, ranks in zip(even.stages, placement.stages, strict=True))
    return Plan(
        stages, schedule.definition, schedule.microbatches, routing="split" if placement.split else "round-robin"
    )
