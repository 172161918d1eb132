"""Lower bounds of a step: what any order takes at least, with these stages on these ranks. No solver is needed.

    rank      what comes before its first forward, its work, and what it must wait: until its first gradient has come
              it does only the forwards that its memory holds; and behind its last forward, whose gradient goes there
              and back through all later stages, only backwards of what its memory holds beside
    memory    each microbatch keeps its bytes at least from its forward to its backward, there and back through all
              later stages; the bytes times the seconds of all microbatches, over the limit of the rank. Memory that is
              filled or emptied at the ends of a step is not used in full
    rounds    if K microbatches of a stage fit, the forward K later waits for the end of a backward; what is left when
              no full round is goes through all later ranks, each of which does one microbatch after another
    link      what comes before the first message, all messages of one direction one after another, and what comes then

Offloads add to the memory what passes the link to the host: that is counted as free where it can be. Where a step ends
for every rank alone, nothing comes before or after.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from operator import add

from penstock.errors import PlanError
from penstock.planning.orders.rows import BACKWARD, ROUNDING, WEIGHT, OrderCosts

_FEW = 2
"""The most stages of a rank of which it is tried how many microbatches fill its memory."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The seconds that a step takes at least, and what it is that takes them."""

    seconds: float
    reason: str

    def gap(self, seconds: float) -> float:
        """How far `seconds` is above the bound, as a share of `seconds`: the most that can be gained.

        Raises `PlanError` if they are below it.
        """
        if self.seconds > seconds * ROUNDING:
            raise PlanError(
                f"the bound of an order: expected no step below {self.seconds} s ({self.reason}), found one of "
                f"{seconds} s. The bound is wrong, or the simulator: open an issue with the plan, the profile and the "
                "cluster (`save` writes each to a file) and the options of the call"
            )
        return max(0.0, 1 - self.seconds / seconds) if seconds else 0.0


def bound_of(costs: OrderCosts) -> Bound:
    """The largest of the bounds."""
    paths = _Paths.of(costs)
    ranks = (each for rank in range(costs.length) for each in _of_rank(costs, paths, rank))
    best = max((*ranks, *_of_links(costs, paths)), key=lambda bound: bound.seconds)
    for fitting, seconds in _rounds(costs, paths, 0) if costs.barrier else ():
        if rounds := (costs.microbatches - 1) // fitting:
            # The microbatches behind some full rounds of the first stage are a step of their own.
            rest = bound_of(replace(costs, microbatches=costs.microbatches - rounds * fitting))
            least = Bound(rounds * seconds + rest.seconds, "rank 0's memory")
            best = max(best, least, key=lambda bound: bound.seconds)
    return best


def _rounds(costs: OrderCosts, paths: "_Paths", stage: int) -> Iterator[tuple[int, float]]:
    """How many microbatches of a stage fit, and the least seconds from the forward of one to that of the first for
    which it makes room.

    That holds for the bytes of the stage, and for those that a second stage of its rank needs for one microbatch before
    any can return. Nothing where offloads change what fits.
    """
    held, limit, count = costs.held[costs.ranks[stage]], costs.limits[costs.ranks[stage]], costs.microbatches
    size, limit, whole = costs.saved[stage], limit * ROUNDING, costs.whole
    if limit < size or (costs.host_bandwidth and any(costs.movable)):
        return
    fitting = int(limit / size) if limit < size * count else count
    kept = 0.0 if stage in whole else -costs.bytes_after[WEIGHT][stage]
    # Where its backward does not free enough, another backward or a weight part of the stage comes first.
    longer = costs.weight[stage] if kept > limit - fitting * size else 0.0
    if kept < size:
        longer = min(longer, costs.seconds[BACKWARD][stage])
    yield fitting, paths.loop[stage] + longer
    last, room = held[-1], limit - costs.saved[held[-1]]
    if len(held) == 2 and stage < last and size <= room < size * count:
        fitting, lasting = int(room / size), paths.down[last] - paths.down[stage] + paths.loop[last]
        kept = 0.0 if last in whole else -costs.bytes_after[WEIGHT][last]
        longer = costs.weight[last] if (fitting + 1) * size + kept > limit else 0.0
        yield fitting, lasting + min(longer, max(0.0, paths.loop[stage] - lasting))


@dataclass(frozen=True, slots=True)
class _Paths:
    """What a microbatch takes at least, by stage."""

    down: list[float]
    """From the start of its forward on stage 0 to that on each stage."""
    loop: list[float]
    """From the start of its forward to the end of its backward, there and back through all later stages."""
    back: list[float]
    """From the end of its backward to that on stage 0."""

    @classmethod
    def of(cls, costs: OrderCosts) -> "_Paths":
        forward, backward = costs.seconds[:2]
        down = list(accumulate(map(add, forward, costs.activation), initial=0.0))
        back = list(accumulate(map(add, backward, costs.gradient), initial=0.0))
        turn = down[-1] + forward[-1] + backward[-1] + back[-1]
        return cls(down, [turn - here - there for here, there in zip(down, back, strict=True)], back)


def _of_rank(costs: OrderCosts, paths: _Paths, rank: int) -> Iterator[Bound]:
    held, limit, count = costs.held[rank], costs.limits[rank], costs.microbatches
    if limit <= 0:
        return
    (forward, backward, weight), (down, loop, back) = costs.seconds, (paths.down, paths.loop, paths.back)
    first, last, split = held[0], held[-1], [stage for stage in held if stage not in costs.whole]
    kept = {stage: -costs.bytes_after[WEIGHT][stage] for stage in split}
    head = down[first] if costs.barrier else 0.0
    rest = [0.0 if stage in costs.whole else weight[stage] for stage in range(costs.stages)]
    # What comes behind the last backward of the rank, and may be hidden by weight parts.
    tail = max(rest[first], back[first] + rest[0]) if costs.barrier else rest[first]
    movable = costs.movable or (0.0,) * costs.stages
    bandwidth = costs.host_bandwidth if any(map(movable.__getitem__, held)) else 0.0

    forwards = [(forward[stage], costs.saved[stage]) for stage in held]
    weights = [(weight[stage], kept[stage]) for stage in split]
    returns = [(backward[stage] + rest[stage], costs.saved[stage]) for stage in held]
    own = sum(seconds for seconds, _ in returns)
    pending = min(count * sum(rest[stage] for stage in held), _fitting(weights, limit, 0.0, 0.0))
    opening = down[last] - down[first] + loop[last] - backward[last]
    begun = opening - min(count * sum(map(forward.__getitem__, held)), _fitting(forwards, limit, bandwidth, opening))
    away = loop[last] - forward[last] + back[last] - back[first] + tail
    room = limit if bandwidth else max(0.0, limit - sum(costs.saved[stage] for stage in held))
    closing = away - own - min((count - 1) * own, _fitting([*returns, *weights], room, bandwidth, away))
    begun, closing, behind = max(0.0, begun), max(0.0, closing), max(0.0, tail - pending)
    # Forwards that do not all fit end behind the first backward.
    apart = not bandwidth and count * sum(costs.saved[stage] for stage in held) > limit * ROUNDING
    waits = begun + max(closing, behind) if apart else max(begun + behind, closing)
    yield Bound(
        head + costs.work[rank] + waits, f"rank {rank}'s {'memory' if behind < waits and limit < inf else 'work'}"
    )
    sizes = {stage: costs.saved[stage] for stage in held}
    if limit == inf or limit * ROUNDING < max(sizes.values()):
        return

    area = sum(costs.saved[stage] * loop[stage] + kept.get(stage, 0.0) * rest[stage] for stage in held)
    behind = 0.0 if split else back[first] * costs.barrier
    if bandwidth:
        farthest = max(loop[stage] - forward[stage] - backward[stage] for stage in held)
        moved = sum(movable[stage] * (loop[stage] - forward[stage] - backward[stage]) for stage in held)
        spread = max(area / (limit + bandwidth * farthest), (area - moved) / limit)
        yield Bound(head + count * spread + behind, f"rank {rank}'s memory")
        return
    ends = [*((backward[stage], costs.saved[stage] - kept.get(stage, 0.0)) for stage in held), *weights]
    if all(kept.get(stage, size) == size for stage, size in sizes.items()) and len(held) <= _FEW:
        limit = _filled(list(sizes.values()), limit, count) or limit
    unused = _unused(forwards, limit) + _unused(ends, limit) if apart else 0.0
    yield Bound(head + (count * area + unused) / limit + behind, f"rank {rank}'s memory")
    for stage in held:
        for fitting, lasting in _rounds(costs, paths, stage):
            ahead, rounds = (count - 1) % fitting, (count - 1) // fitting
            # What is left behind full rounds goes through all later stages, each of which does one after another.
            least = [ahead * forward[stage] + loop[stage]]
            for later in ([each for each in own if each >= stage] for own in costs.held):
                both = (ahead + 1) * sum(forward[each] + backward[each] for each in later)
                least += [down[each] - down[stage] + both + back[each] - back[stage] for each in later[:1]]
            seconds = rounds * lasting + max(least)
            start = down[stage] * costs.barrier
            stop = max(rest[stage], (back[stage] + rest[0]) * costs.barrier)
            yield Bound(start + seconds + stop, f"rank {rank}'s memory")


def _fitting(items: list[tuple[float, float]], limit: float, bandwidth: float, seconds: float) -> float:
    """The most seconds of `items`, (seconds, bytes), of which any number take at most `limit` bytes together; more of
    them with what passes the link to the host in `seconds`, which is all if it keeps up.
    """
    rate = max((own / size if size else inf for own, size in items if own), default=0.0)
    if bandwidth:
        return inf if rate * bandwidth >= 1 else rate * (limit + bandwidth * seconds)
    if rate == inf or limit == inf:
        return inf if rate else 0.0
    number = int(limit * ROUNDING / min((size for own, size in items if own), default=inf))
    return min(rate * limit, number * max((own for own, _ in items), default=0.0))


def _filled(sizes: list[float], limit: float, count: int) -> float:
    """The most of `limit` bytes that whole microbatches take, of which at most `count` have each of `sizes`."""
    if not sizes:
        return 0.0
    size, *rest = sizes
    numbers = range(min(count, int(limit * ROUNDING / size) if size else 0) + 1)
    return max(number * size + _filled(rest, limit - number * size, count) for number in numbers)


def _unused(items: list[tuple[float, float]], limit: float) -> float:
    """Bytes times seconds that are free while `limit` is filled by `items`, (seconds, bytes), one after another."""
    rate = max((size / own if own else inf for own, size in items if size), default=0.0)
    return max(0.0, limit - max(size for _, size in items)) ** 2 / (2 * rate) if rate else 0.0


def _of_links(costs: OrderCosts, paths: _Paths) -> list[Bound]:
    (forward, backward, weight), (down, loop, back) = costs.seconds, (paths.down, paths.loop, paths.back)
    rest = 0.0 if 0 in costs.whole else weight[0]
    # By link: what each of its messages takes, and what comes at least before the first and behind the last one.
    sent: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for stage, (carried, returned) in enumerate(zip(*costs.occupied, strict=True)):
        here, there = costs.ranks[stage], costs.ranks[stage + 1]
        if here != there:
            after = loop[stage + 1] + back[stage + 1] + rest
            sent.setdefault((here, there), []).append((carried, down[stage] + forward[stage], after))
            before = down[stage + 1] + loop[stage + 1]
            sent.setdefault((there, here), []).append((returned, before, backward[stage] + back[stage] + rest))
    return [
        Bound(
            (min(before) + min(after)) * costs.barrier + costs.microbatches * sum(seconds),
            f"the link from rank {here} to rank {there}",
        )
        for (here, there), messages in sent.items()
        for seconds, before, after in [tuple(zip(*messages, strict=True))]
    ]
