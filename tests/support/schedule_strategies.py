"""Random schedules for hypothesis."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule

FOLDED = ("zb-v", "v-half", "v-min")
METHODS = ["gpipe", "1f1b-flush", "pipedream", "2bw", "interleaved", "breadth-first", "spp", "zb-h1", *FOLDED]


@st.composite
def schedules(draw: st.DrawFn, most_ranks: int, most_microbatches: int) -> Schedule:
    """Any method on one rank per stage, with about `most_microbatches` microbatches a minibatch at the most."""
    method = draw(st.sampled_from(METHODS))
    ranks = draw(st.integers(1, most_ranks))
    if method == "interleaved":
        groups = draw(st.integers(1, max(1, most_microbatches // ranks)))
        return Schedule(method, ranks, ranks * groups, draw(st.integers(1, 3)))
    if method == "breadth-first":
        return Schedule(method, ranks, draw(st.integers(1, most_microbatches)), draw(st.integers(1, 3)))
    least = ranks if method == "2bw" else 1
    sync = method == "pipedream" and draw(st.booleans())
    microbatches = draw(st.integers(least, max(least, most_microbatches)))
    return Schedule(method, ranks, microbatches, 2 if method in FOLDED else 1, vertical_sync=sync)


@st.composite
def waiting_schedules(draw: st.DrawFn, most_ranks: int, most_microbatches: int) -> Schedule:
    """Schedules without replicas whose updates need what other stages know: tied gradients, or norms."""
    made = draw(schedules(most_ranks, most_microbatches).filter(lambda each: each.definition.synchronizes_updates))
    return replace(made, norms=draw(st.booleans()), ties=draw(_ties(range(made.stages))))


def _ties(stages: Sequence[int]) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Groups of these stages that share weights."""
    if len(stages) < 2:
        return st.just(())
    group = st.lists(st.sampled_from(stages), min_size=2, max_size=len(stages), unique=True)
    return st.lists(group.map(lambda members: tuple(sorted(members))), max_size=2).map(tuple)


@st.composite
def replicated_schedules(draw: st.DrawFn, most_stages: int, most_replicas: int, most_microbatches: int) -> Schedule:
    """Any method with replicas, equally or unequally many, that take turns or share every microbatch."""
    method = draw(st.sampled_from(METHODS))
    stages = draw(st.integers(1, most_stages))
    split = draw(st.booleans())
    sync = method == "pipedream" and draw(st.booleans())
    counts = st.integers(1, most_replicas)
    alike = method in ("interleaved", "breadth-first", *FOLDED) or (sync and not split) or draw(st.booleans())
    replicas = [draw(counts)] * stages if alike else [draw(counts) for _ in range(stages)]
    dealt = iter(draw(st.permutations(range(sum(replicas)))))
    at = tuple(tuple(next(dealt) for _ in range(count)) for count in replicas)
    if method == "interleaved":
        group = stages if split else stages * replicas[0]
        microbatches = group * draw(st.integers(1, max(1, most_microbatches // group)))
        return Schedule.placed(method, Placement(at * draw(st.integers(1, 3)), split), microbatches)
    least = (stages if split else sum(replicas)) if method == "2bw" else 1
    microbatches = draw(st.integers(least, max(least, most_microbatches)))
    at = (*at, *reversed(at)) if method in FOLDED else at
    return Schedule.placed(method, Placement(at, split), microbatches, vertical_sync=sync)
