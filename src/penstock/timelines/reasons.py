"""Where the time of a timeline goes, in words: what limits it, and what its ranks wait for."""

from collections import defaultdict
from collections.abc import Sequence

from penstock.timelines.spans import Span
from penstock.values.quantities import seconds_text

_UNEVEN = 1.2
"""A stage that computes this many times as long as the others on average is named."""


def explain_spans(spans: Sequence[Span], ranks: int, seconds: float) -> str:
    """The shares of every rank's time, the longest wait, and the stage that computes longest; `seconds`: of all."""
    if not spans or not seconds:
        return "Nothing takes time in this timeline."
    busy, waits, sums = ([0.0] * ranks for _ in range(3))
    sources: defaultdict[tuple[int, int, int], float] = defaultdict(float)
    stages: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0])
    held: defaultdict[int, set[int]] = defaultdict(set)
    for span in spans:
        if span.computes:
            busy[span.rank] += span.seconds
            held[span.rank].add(span.stage)
            if span.kind.startswith(("forward", "backward")):
                stages[span.stage][0] += span.seconds
                stages[span.stage][1] += span.kind == "forward"
        elif span.kind == "receive":
            waits[span.rank] += span.seconds
            sources[span.rank, span.stage, span.reference] += span.seconds
        elif span.kind == "reduce":
            sums[span.rank] += span.seconds
    lines = [
        f"{ranks} ranks, {seconds_text(seconds)}. Of its time each rank computes, waits for messages, sums gradients:"
    ]
    for rank in range(ranks):
        shares = [own[rank] / seconds for own in (busy, waits, sums)]
        rest = max(0.0, 1 - sum(shares))
        names = ", ".join(map(str, sorted(held[rank]))) or "none"
        lines.append(
            f"  rank {rank} (stage {names}): {shares[0]:.0%}, {shares[1]:.0%}, {shares[2]:.0%}; it is idle {rest:.0%}"
        )
    return "\n".join([*lines, *_limits(busy, seconds, sources, stages)])


def _limits(
    busy: Sequence[float],
    seconds: float,
    sources: dict[tuple[int, int, int], float],
    stages: dict[int, list[float]],
) -> list[str]:
    """What limits the timeline."""
    busiest = max(range(len(busy)), key=busy.__getitem__)
    lines = [f"Rank {busiest} computes longest, {busy[busiest] / seconds:.0%} of the time."]
    if sources and max(sources.values()) > 0:
        rank, stage, source = max(sources, key=sources.__getitem__)
        waited = sources[rank, stage, source]
        lines.append(
            f"The longest wait is that of rank {rank} for messages from stage {source} to stage {stage}: "
            f"{seconds_text(waited)}, {waited / seconds:.0%} of the time."
        )
    each = {stage: own / count for stage, (own, count) in stages.items() if count}
    if len(each) > 1:
        slowest = max(each, key=each.__getitem__)
        others = sum(own for stage, own in each.items() if stage != slowest) / (len(each) - 1)
        if each[slowest] > _UNEVEN * others:
            lines.append(
                f"Stage {slowest} computes {seconds_text(each[slowest])} for a microbatch and the others "
                f"{seconds_text(others)} on average: give it fewer layers, or more replicas."
            )
    return lines
