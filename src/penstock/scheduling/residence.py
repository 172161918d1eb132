"""Residence: adds to the row of a rank when weights that live on the host are on the device.

A *visit* is what a rank computes of one streamed stage before it computes another streamed stage; the receives directly
before its first computation belong to it. A fetch is at the beginning of the visit before, and so overlaps with it.

Rules of this file:
  1. Only this file creates `Fetch` and `Release`, from one row that has its messages.
  2. At the beginning of a visit, before its receives: weights that no later visit needs are released; then, if there is
     no place, those that are needed last [Belady 1966], but not those of this visit or of the next; then those of the
     next visit are fetched, if there is a second place. The last visit ends with a release of everything, before the
     norms and the updates of the row: between steps weights are on the host.
  3. A `Reduce` of a streamed stage is directly behind the stage's last backward and what that sends, since the
     gradients leave with the weights. A replica that has no microbatch sums them where the first sum of its row was,
     from the last stage to the first, as the others do.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.scheduling.actions import Action, Fetch, Receive, Reduce, Release, Send, WeightGradients, WeightReading


@dataclass(slots=True)
class _Visit:
    """What the row has from `start` on up to `stop` is of `stage`, whose weights are of `version`."""

    start: int
    stop: int
    stage: int
    version: int


def with_residence(row: Sequence[Action], streamed: frozenset[int], places: int) -> tuple[Action, ...]:
    """The `row` of a rank in a step with the fetches and releases of its `streamed` stages.

    `places`: how many of them the device has room for at once. With one, nothing is fetched ahead.
    """
    row = _with_early_sums(row, streamed)
    visits = _find_visits(row, streamed)
    turns: defaultdict[int, list[int]] = defaultdict(list)
    """By stage: the numbers of its visits."""
    for number, visit in enumerate(visits):
        turns[visit.stage].append(number)
    moves: dict[int, list[Action]] = {}
    """By place in the row: what comes before the action there."""
    resident: dict[int, int] = {}
    """The versions of the stages on the device."""
    for number, visit in enumerate(visits):
        made = moves.setdefault(visit.start, [])
        following = visits[number + 1 : number + 2] if places > 1 else []

        def next_turn(stage: int, now: int = number) -> int:
            """When `stage` is visited next: the number of its visit, or that of all visits if it has none left."""
            later = bisect_right(turns[stage], now)
            return turns[stage][later] if later < len(turns[stage]) else len(visits)

        for stage in [each for each in resident if each != visit.stage and next_turn(each) == len(visits)]:
            made.append(Release(stage, resident.pop(stage)))
        for each in (visit, *following):
            if each.stage in resident:
                continue
            if len(resident) == places:
                kept = {visit.stage, *(after.stage for after in following)}
                last = max((stage for stage in resident if stage not in kept), key=next_turn)
                made.append(Release(last, resident.pop(last)))
            made.append(Fetch(each.stage, each.version))
            resident[each.stage] = each.version
    if visits:
        moves[visits[-1].stop] = [Release(stage, version) for stage, version in resident.items()]
    return tuple(action for _, action in _inserted(row, moves))


def _with_early_sums(row: Sequence[Action], streamed: frozenset[int]) -> Sequence[Action]:
    """The row with the sums of streamed stages where rule 3 says."""
    sums = {action.stage: action for action in row if isinstance(action, Reduce) and action.stage in streamed}
    if not sums:
        return row
    first = next(place for place, action in enumerate(row) if isinstance(action, Reduce))
    moves: defaultdict[int, list[Action]] = defaultdict(list)
    for stage in sorted(sums, reverse=True):
        ends = [place for place, a in enumerate(row) if isinstance(a, WeightGradients) and a.stage == stage]
        moves[_end_of_sends(row, ends[-1]) if ends else first].append(sums[stage])
    late = set(sums.values())
    return [action for place, action in _inserted(row, moves) if place < 0 or action not in late]


def _find_visits(row: Sequence[Action], streamed: frozenset[int]) -> list[_Visit]:
    visits: list[_Visit] = []
    stop = 0
    for place, action in enumerate(row):
        if not isinstance(action, WeightReading) or action.stage not in streamed:
            continue
        if not visits or visits[-1].stage != action.stage:
            start = place
            while start > stop and isinstance(row[start - 1], Receive):
                start -= 1
            visits.append(_Visit(start, start, action.stage, action.version))
        stop = visits[-1].stop = _end_of_sends(row, place)
    return visits


def _end_of_sends(row: Sequence[Action], place: int) -> int:
    """The place behind the action at `place`, and what the stage sends and sums directly behind it."""
    stage, stop = row[place].stage, place + 1
    while stop < len(row) and isinstance(row[stop], Send | Reduce) and row[stop].stage == stage:
        stop += 1
    return stop


def _inserted(row: Sequence[Action], moves: Mapping[int, Sequence[Action]]) -> Iterator[tuple[int, Action]]:
    """The actions of `row` with their places, and before each what `moves` has for that place, with place -1."""
    for place, action in enumerate(row):
        for added in moves.get(place, ()):
            yield -1, added
        yield place, action
    for added in moves.get(len(row), ()):
        yield -1, added
