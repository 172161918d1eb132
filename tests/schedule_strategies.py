"""Random schedules for hypothesis."""

from hypothesis import strategies as st

from penstock.scheduling.schedules import Schedule

__all__ = ["schedules"]


@st.composite
def schedules(draw: st.DrawFn, most_ranks: int, most_microbatches: int) -> Schedule:
    """Any method, up to so many ranks and about so many microbatches a minibatch."""
    method = draw(st.sampled_from(["gpipe", "1f1b-flush", "1f1b", "2bw", "interleaved"]))
    ranks = draw(st.integers(1, most_ranks))
    if method == "interleaved":
        groups = draw(st.integers(1, max(1, most_microbatches // ranks)))
        return Schedule(method, ranks, ranks * groups, draw(st.integers(1, 3)))
    least = ranks if method == "2bw" else 1
    sync = method == "1f1b" and draw(st.booleans())
    return Schedule(method, ranks, draw(st.integers(least, max(least, most_microbatches))), vertical_sync=sync)
