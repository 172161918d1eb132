"""The simulator: plays a schedule through with the seconds of a profile, and says when everything happens.

It reads the programs that the worker runs, so a prediction cannot describe another schedule than the one that trains.
Nothing here is random and no clock is read: every start is the latest of the times that it waits for.

Laws of this file:
  1. A rank does its actions one after the other, in the order of its program.
  2. A receive blocks until its message is there; a send does not block.
  3. A link, which is a directed pair of ranks, carries one message at a time, in the order of the sends.
  4. Every action becomes one span. A send lasts while its message is on the link, a receive while the rank waits.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Action, Backward, Forward, Receive, ReceiveTied, Send, SendTied, Update
from penstock.scheduling.schedules import Programs, Schedule, schedule
from penstock.simulating.costs import Costs, plan_costs
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.spans import Span
from penstock.values.timelines import Timeline

__all__ = ["execute", "simulate", "telling_minibatches"]


def simulate(
    schedule_or_plan: Schedule | Plan,
    profile: Profile,
    cluster: Cluster,
    minibatches: int | None = None,
    *,
    update_seconds_per_byte: float = 0.0,
) -> Timeline:
    """The predicted timeline of `minibatches` steps and the drain, in seconds from the start of the first forward.

    A plan brings its stages; for a bare schedule the layers are split into stages of equal length (`Plan.uniform`).
    Without a number of minibatches: `telling_minibatches`. An update takes `update_seconds_per_byte` times the stage's
    parameter bytes; profiles do not measure updates, so that it is 0 unless you know better. Gradients of tied weights
    wait for their partner but take no time on the link, since a profile does not know what is tied. For an
    asynchronous schedule `Timeline.bubble` counts the fill and the drain of these minibatches, and
    `Timeline.steady_bubble` does not.

    `PlanError` if plan, profile and cluster do not fit each other; `ScheduleError` if the schedule cannot run.
    """
    match schedule_or_plan:
        case Plan():
            plan, played = schedule_or_plan, schedule(schedule_or_plan)
        case Schedule():
            plan, played = _uniform(schedule_or_plan, len(profile.layers)), schedule_or_plan
        case _:
            assert_never(schedule_or_plan)
    placement = [played.rank_of(stage) for stage in range(played.stages)]
    costs = plan_costs(plan, profile, cluster, placement, update_seconds_per_byte)
    return execute(played.program(telling_minibatches(played, minibatches)), placement, costs)


def telling_minibatches(schedule: Schedule, minibatches: int | None = None) -> int:
    """`minibatches` if given, else as many as show what the schedule does.

    One for a schedule that flushes; else enough to fill the pipe twice and to go on after an update.
    """
    if minibatches is None:
        if schedule.flushes:
            return 1
        microbatches = max(2 * schedule.stages, schedule.microbatches_per_update + 1)
        return -(-microbatches // schedule.microbatches)
    if minibatches < 1:
        raise ScheduleError(f"minibatches: expected 1 or more, found {minibatches}: there is nothing to play otherwise")
    return minibatches


def execute(programs: Programs, placement: Sequence[int], costs: Costs) -> Timeline:
    """When everything in `programs` (a row of actions per rank) happens, from second 0; stage s is on ``placement[s]``.

    `ScheduleError` if a rank receives another message than the next on its link, or waits for one that never comes.
    """
    ranks = len(programs)
    links = {(a, b): _Link() for a in range(ranks) for b in range(ranks)}
    rows = [_Row(rank, program, placement, costs, links) for rank, program in enumerate(programs)]
    ready = deque((row, row.play()) for row in rows)
    waiting: dict[tuple[int, int], tuple[_Row, Iterator[_Edge]]] = {}
    while ready:
        row, play = ready.popleft()
        edge = next(play, None)
        if edge is not None:
            waiting[edge] = row, play
        for arrived in [edge for edge in waiting if links[edge].messages]:
            ready.append(waiting.pop(arrived))
    if waiting:
        raise ScheduleError(
            "the schedule cannot run: "
            + "; ".join(
                f"rank {row.rank} waits in {row.program[len(row.spans)]} (its action {len(row.spans)}) for rank "
                f"{source}, which has nothing more to send"
                for (source, _), (row, _) in sorted(waiting.items(), key=lambda item: item[0][1])
            )
            + ". Put the sends before the receives that need them; penstock.verify shows the rows"
        )
    return Timeline(tuple(span for row in rows for span in row.spans), ranks)


_Edge: TypeAlias = tuple[int, int]
_Content: TypeAlias = tuple[int, int, int]
"""Sending stage, receiving stage, microbatch or version."""


@dataclass(slots=True, eq=False)
class _Link:
    """A directed link: what is on its way, and when the last of it will have arrived."""

    messages: deque[tuple[float, _Content]] = field(default_factory=deque)
    free_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Row:
    """One rank on its way through its program."""

    rank: int
    program: Sequence[Action]
    placement: Sequence[int]
    costs: Costs
    links: dict[_Edge, _Link]
    spans: list[Span] = field(default_factory=list)

    def play(self) -> Iterator[_Edge]:
        """Runs until a message is missing; yields the edge that it must come over, and expects it when resumed."""
        rank, costs, placement, links = self.rank, self.costs, self.placement, self.links
        now = 0.0
        for action in self.program:
            start = now
            match action:
                case Forward(stage=stage):
                    now += costs.forward_seconds[stage]
                case Backward(stage=stage):
                    now += costs.backward_seconds[stage]
                case Send(stage, number, target) | SendTied(stage, number, target):
                    link = links[rank, placement[target]]
                    start = max(now, link.free_seconds)
                    stop = start + _transfer_seconds(action, costs)
                    link.free_seconds = stop
                    link.messages.append((stop, (stage, target, number)))
                    self.spans.append(Span(rank, str(action), start, stop))
                    continue
                case Receive(stage, number, source) | ReceiveTied(stage, number, source):
                    edge = placement[source], rank
                    if not links[edge].messages:
                        yield edge
                    arrival, content = links[edge].messages.popleft()
                    if content != (source, stage, number):
                        raise _mismatch(action, rank, edge, content)
                    now = max(now, arrival)
                case Update(stage=stage):
                    now += costs.update_seconds[stage]
                case _:
                    assert_never(action)
            self.spans.append(Span(rank, str(action), start, now))


def _transfer_seconds(action: Send | SendTied, costs: Costs) -> float:
    match action:
        case Send(stage=stage, target=target):
            return costs.activation_seconds[stage] if target > stage else costs.gradient_seconds[target]
        case SendTied():
            return 0.0
        case _:
            assert_never(action)


def _mismatch(action: Action, rank: int, edge: _Edge, content: _Content) -> ScheduleError:
    source, target, number = content
    return ScheduleError(
        f"rank {rank}: expected the message of {action} to be next on the link from rank {edge[0]}, found that of "
        f"{number} from stage {source} to stage {target}: receive in the order of the sends"
    )


def _uniform(schedule: Schedule, layers: int) -> Plan:
    """Stages of equal length on the ranks of `schedule`; of the plan, only they are used."""
    dealing = "interleaved" if schedule.stages_per_rank > 1 else "gpipe"
    return Plan.uniform(layers, schedule.stages, schedule=dealing, stages_per_rank=schedule.stages_per_rank)
