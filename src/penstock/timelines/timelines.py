"""A timeline: what every rank did, and when, in seconds; predicted by the simulator or measured by the runtime.

Both have the same type, so that the same code draws, compares and saves predictions and measurements. The bubble is
defined only here.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.arguments import check_fields, entries, instance, integer
from penstock.errors import ScheduleError, counted
from penstock.timelines.drawings import timeline_svg
from penstock.timelines.memories import RankMemory
from penstock.timelines.pages import timeline_page
from penstock.timelines.panels import Panel
from penstock.timelines.spans import Span
from penstock.timelines.traces import read_trace, trace_json
from penstock.values.documents import write_text
from penstock.values.quantities import seconds_text

__all__ = ["Span", "Timeline"]


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """Holds the spans of ranks ``0 .. ranks-1``, in any order. Raises `ScheduleError` for a span of another rank.

    Only forwards, backwards and updates count as busy: a rank that waits for a transfer is idle. Spans of computation
    that overlap (rounding of a device's clock) count once, so that the bubble stays between 0 and 1.
    """

    spans: tuple[Span, ...]
    ranks: int
    memory: tuple[RankMemory, ...] = ()
    """The memory of every rank over time; empty if unknown."""
    title: str = field(default="Timeline", compare=False)
    """What it is of, for the headline of its page."""

    def __post_init__(self) -> None:
        check_fields(self, {"ranks": integer(1).but("pass the number of ranks")}, ScheduleError, " in a timeline")
        for name in ("spans", "memory"):
            object.__setattr__(self, name, entries(name, getattr(self, name), ScheduleError))
        rule = instance(Span, "a Span", "take those of another timeline, or Timeline.load_trace(path)")
        for index, span in enumerate(self.spans):
            rule.check(f"spans[{index}]", span, ScheduleError)
            if span.rank >= self.ranks:
                raise ScheduleError(
                    f"timeline of {counted(self.ranks, 'rank')}: the span of {span.action} lies on rank {span.rank}, "
                    f"expected one of 0 to {self.ranks - 1}: pass ranks={span.rank + 1} or more"
                )
        if self.memory and len(self.memory) != self.ranks:
            raise ScheduleError(
                f"timeline of {counted(self.ranks, 'rank')}: expected the memory of each rank or of none, found that "
                f"of {len(self.memory)}: give one RankMemory for each rank"
            )

    def __repr__(self) -> str:
        size = f"{counted(self.ranks, 'rank')}, {counted(len(self.spans), 'span')}"
        return f"Timeline({size}, {self.seconds:.6g} seconds, bubble {self.bubble:.1%})"

    @property
    def seconds(self) -> float:
        """Wall time: from the first start to the last stop of any span."""
        start, stop = self._extent
        return stop - start

    @property
    def bubble(self) -> float:
        """Idle share of wall time: 1 - busy seconds / (ranks * seconds). 0 for an empty timeline.

        It includes the fill and the drain of the pipeline; `steady_bubble` does not. The papers' ``(p-1)/m`` is
        relative to ideal time instead: that is ``bubble / (1 - bubble)``.
        """
        return self._bubble(*self._extent)

    @property
    def steady_bubble(self) -> float:
        """Idle share without fill and drain: from the start of rank 0's first backward to the stop of its last forward.

        For an asynchronous schedule it is the limit of a long run. Equal to `bubble` where there is no such interval
        (one GPipe minibatch).
        """
        own = [span for span in self.spans if span.rank == 0]
        start = min((span.start_seconds for span in own if span.kind.startswith("backward")), default=0.0)
        stop = max((span.stop_seconds for span in own if span.kind == "forward"), default=0.0)
        return self._bubble(start, stop) if stop > start else self.bubble

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """Idle share of wall time of every rank; their mean is `bubble`."""
        start, stop = self._extent
        if stop <= start:
            return (0.0,) * self.ranks
        return tuple(max(0.0, 1.0 - _covered(row, start, stop) / (stop - start)) for row in self._grouped())

    def busy_seconds(self, rank: int) -> float:
        """The seconds during which `rank` computes."""
        return _covered(span for span in self.spans if span.rank == rank)

    def explain(self) -> str:
        """Where the time goes, in words: each rank's shares, the longest wait, and a stage that computes longest."""
        return explain_spans(self.spans, self.ranks, self.seconds)

    def save_trace(self, path: str | Path) -> None:
        """Writes Chrome's trace JSON, for ui.perfetto.dev or chrome://tracing, with the memory as counters."""
        write_text(path, trace_json(self._rows(), self.memory, self._extent[0]), ScheduleError)

    @classmethod
    def load_trace(cls, path: str | Path) -> "Timeline":
        """Reads a file of `save_trace`; its times start at 0, rounded to a float of microseconds.

        Raises `ScheduleError` for any other file.
        """
        return cls(*read_trace(path))

    def save_svg(self, path: str | Path, *, measured: "Timeline | None" = None, critical: Sequence[Span] = ()) -> None:
        """Writes an SVG picture: one row per rank, readable on light and dark pages.

        `measured` is drawn below this timeline, which is then called the prediction, on one time axis. `critical` holds
        the spans of the critical path of either, in order, to be marked (`penstock.simulating.critical_path`).
        """
        write_text(path, self.svg(measured=measured, critical=critical), ScheduleError)

    def svg(self, *, measured: "Timeline | None" = None, critical: Sequence[Span] = ()) -> str:
        """The text of the picture that `save_svg` writes."""
        return timeline_svg(self._panels(measured, critical))

    def _repr_svg_(self) -> str:
        """What a notebook shows of a timeline."""
        return self.svg()

    def save_html(
        self,
        path: str | Path,
        *,
        measured: "Timeline | None" = None,
        critical: Sequence[Span] = (),
        title: str | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Writes a self-contained HTML page to zoom and pan, with a tooltip for every span.

        `measured` and `critical` as in `save_svg`; `title` is the page's headline in place of the timeline's own, and
        `notes` are lines below it.
        """
        page = timeline_page(self._panels(measured, critical), title or self.title, notes)
        write_text(path, page, ScheduleError)

    def _panels(self, measured: "Timeline | None", critical: Sequence[Span]) -> tuple[Panel, ...]:
        if measured is None:
            return (self.panel("", critical),)
        return self.panel("predicted", critical), measured.panel("measured", critical)

    def panel(self, name: str, critical: Sequence[Span] = ()) -> Panel:
        """The timeline as a part of a picture (`penstock.timelines.drawings.timeline_svg`), under `name`."""
        own = set(self.spans) if critical else set()
        start, stop = self._extent
        return Panel(
            name,
            self._rows(),
            start,
            stop - start,
            self.bubble,
            self.idle_shares,
            self.memory,
            tuple(span for span in critical if span in own),
        )

    def _rows(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of every rank, in the order in which they start."""
        return tuple(
            tuple(sorted(row, key=lambda span: (span.start_seconds, span.stop_seconds))) for row in self._grouped()
        )

    def _grouped(self) -> list[list[Span]]:
        """The spans of every rank."""
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return rows

    @property
    def _extent(self) -> tuple[float, float]:
        start = min((span.start_seconds for span in self.spans), default=0.0)
        stop = max((span.stop_seconds for span in self.spans), default=0.0)
        return start, stop

    def _bubble(self, start: float, stop: float) -> float:
        if stop <= start:
            return 0.0
        busy = sum(_covered(row, start, stop) for row in self._grouped())
        return max(0.0, 1.0 - busy / (self.ranks * (stop - start)))


def _covered(spans: Iterable[Span], start: float = float("-inf"), stop: float = float("inf")) -> float:
    """The seconds between `start` and `stop` during which at least one of `spans` computes."""
    intervals = sorted((span.start_seconds, span.stop_seconds) for span in spans if span.computes)
    total = 0.0
    reached = start
    for begin, end in intervals:
        begin, end = max(begin, reached), min(end, stop)
        if end > begin:
            total += end - begin
            reached = end
    return total


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
            if span.kind.startswith(("forward", "backward", "recompute")):
                stages[span.stage][0] += span.seconds
                stages[span.stage][1] += span.kind == "forward"
        elif span.kind == "receive":
            waits[span.rank] += span.seconds
            sources[span.rank, span.stage, span.reference] += span.seconds
        elif span.kind == "reduce":
            sums[span.rank] += span.seconds
    what = "Of its time each rank computes, waits for messages, sums gradients:"
    lines = [f"{counted(ranks, 'rank')}, {seconds_text(seconds)}. {what}"]
    for rank in range(ranks):
        shares = [own[rank] / seconds for own in (busy, waits, sums)]
        rest = max(0.0, 1 - sum(shares))
        names = ", ".join(map(str, sorted(held[rank]))) or "none"
        lines.append(
            f"  rank {rank} (stage {names}): {shares[0]:.0%}, {shares[1]:.0%}, {shares[2]:.0%}; it is idle {rest:.0%}"
        )
    return "\n".join([*lines, *_limits(busy, seconds, sources, stages)])


def _limits(
    busy: Sequence[float], seconds: float, sources: dict[tuple[int, int, int], float], stages: dict[int, list[float]]
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
