"""Lower bounds of a step: what any order takes at least, with these stages on these ranks. No solver is needed.

    rank      what comes before its first forward, its work, and of what comes after its last input backward all that
              its weight parts cannot hide
    memory    each microbatch keeps its bytes at least from its forward to its backward, there and back through all
              later stages; the bytes times the seconds of all microbatches, over the limit of the rank. Offloads take
              from that what a microbatch waits between its forward and its backward, and the link to the host passes
              a number of bytes per second
    link      what comes before the first activation, all messages of one direction one after another

Where a step ends for every rank alone, nothing comes before or after.
"""

from dataclasses import dataclass
from itertools import accumulate

from penstock.planning.orders.rows import ROUNDING, WEIGHT, OrderCosts


@dataclass(frozen=True, slots=True)
class Bound:
    """The seconds that a step takes at least, and what it is that takes them."""

    seconds: float
    reason: str

    def gap(self, seconds: float) -> float:
        """How far `seconds` is above the bound, as a share of `seconds`: the most that can be gained."""
        assert self.seconds <= seconds * ROUNDING, (
            f"{self.reason}: {seconds} s are less than the bound {self.seconds} s"
        )
        return max(0.0, 1 - self.seconds / seconds) if seconds else 0.0


def bound_of(costs: OrderCosts, link_seconds: tuple[float, ...] = ()) -> Bound:
    """The largest of the bounds. `link_seconds`: what a message occupies its link behind each stage, if it does."""
    each = [*_of_ranks(costs), *_of_memory(costs), *_of_links(costs, link_seconds)]
    return max(each, key=lambda bound: bound.seconds)


def _heads(costs: OrderCosts) -> list[float]:
    """By stage: the seconds until its first forward can start."""
    if not costs.barrier:
        return [0.0] * costs.stages
    steps = (own + sent for own, sent in zip(costs.forward, costs.activation, strict=False))
    return [0.0, *accumulate(steps)]


def _tails(costs: OrderCosts) -> list[float]:
    """By stage: the seconds after its last input backward until the input backward of stage 0 has ended."""
    if not costs.barrier:
        return [0.0] * costs.stages
    backward = costs.seconds[1]
    return [0.0, *accumulate(backward[stage] + costs.gradient[stage] for stage in range(costs.stages - 1))]


def _of_ranks(costs: OrderCosts) -> list[Bound]:
    heads, tails, count = _heads(costs), _tails(costs), costs.microbatches
    found = []
    for rank, held in enumerate(costs.held):
        hidden = count * sum(costs.weight[stage] for stage in held if stage not in costs.whole)
        behind = max(0.0, min(tails[stage] for stage in held) - hidden)
        found.append(Bound(heads[held[0]] + costs.work[rank] + behind, f"rank {rank}'s work"))
    return found


def _of_memory(costs: OrderCosts) -> list[Bound]:
    """The input part frees `freed` of the bytes, the weight part the others."""
    heads, tails = _heads(costs), _tails(costs)
    backward = costs.seconds[1]
    kept_on = costs.bytes_after[WEIGHT]
    # Seconds from the start of a stage's forward to the end of its backward, there and back.
    loops = [0.0] * costs.stages
    for stage in reversed(range(costs.stages)):
        loops[stage] = costs.forward[stage] + backward[stage]
        if stage + 1 < costs.stages:
            loops[stage] += costs.activation[stage] + loops[stage + 1] + costs.gradient[stage]
    found = []
    for rank, held in enumerate(costs.held):
        kept = moved = longest = 0.0
        for stage in held:
            away = loops[stage] - costs.forward[stage] - backward[stage] if costs.host_bandwidth else 0.0
            moved += costs.movable[stage] * away if away else 0.0
            longest = max(longest, away)
            longer = 0.0 if stage in costs.whole else costs.weight[stage]
            kept += costs.saved[stage] * loops[stage] - kept_on[stage] * longer
        limit = costs.limits[rank]
        if 0 < limit < float("inf"):
            spread = kept / (limit + costs.host_bandwidth * longest)
            seconds = heads[held[0]] + costs.microbatches * max(spread, (kept - moved) / limit)
            # A weight part may keep its bytes until the end of the step.
            whole = all(stage in costs.whole for stage in held)
            behind = min(tails[stage] for stage in held) if whole else 0.0
            found.append(Bound(seconds + behind, f"rank {rank}'s memory"))
    return found


def _of_links(costs: OrderCosts, link_seconds: tuple[float, ...]) -> list[Bound]:
    heads = _heads(costs)
    occupied: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for stage, seconds in enumerate(link_seconds):
        here, there = costs.ranks[stage], costs.ranks[stage + 1]
        for ends in ((here, there), (there, here)):
            if here != there:
                occupied.setdefault(ends, []).append((stage, seconds))
    return [
        Bound(
            min(heads[stage] + costs.forward[stage] for stage, _ in sent) * costs.barrier
            + costs.microbatches * sum(seconds for _, seconds in sent),
            f"the link from rank {here} to rank {there}",
        )
        for (here, there), sent in occupied.items()
    ]
