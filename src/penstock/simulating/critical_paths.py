"""The critical path of a timeline: the chain of spans that its length hangs on, from the first start to the last stop.

From the span that stops last one goes back, each time to the span that it waited for: a receive to the send of its
message, if that came later than the rank did; an all-reduce to what the last replica did before it; a send to what made
its message, or to the message before it on the link if it had to wait for that; anything else to what its rank did
before. Measured timelines are read in the same way, though their clocks differ a little.
"""

from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter

from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline

__all__ = ["critical_path"]


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """The spans of the critical path, first to last; each is one of ``timeline.spans``. Empty if there are none.

    Each starts when the one before it stops, but for two things: a receive starts when its rank began to wait, and
    a message on the link follows the one before it by less than that one's latency. The spans of a rank must be in the
    order in which they were done.
    """
    if not timeline.spans:
        return ()
    index = _Index(timeline)
    span: Span | None = index.final()
    path: list[Span] = []
    seen: set[int] = set()
    while span is not None:
        path.append(span)
        seen.add(id(span))
        earlier = [other for other in index.before(span) if id(other) not in seen]
        span = max(earlier, key=attrgetter("stop_seconds"), default=None)
    return tuple(reversed(path))


class _Index:
    """The spans by what others wait for. Sends do not block: they are no part of their rank's row here."""

    def __init__(self, timeline: Timeline) -> None:
        self._rows: defaultdict[int, list[Span]] = defaultdict(list)
        self._places: dict[int, int] = {}
        self._sends: defaultdict[tuple[int, int, int, str], list[Span]] = defaultdict(list)
        """By sending stage, receiving stage, number, and topic."""
        self._made: defaultdict[tuple[int, int, int, str], list[Span]] = defaultdict(list)
        """The sends of what a forward or backward made, by its rank, stage, microbatch and kind."""
        self._makers: dict[tuple[int, int, int, str], Span] = {}
        """Forwards and backwards by rank, stage, microbatch and kind."""
        self._queued: dict[int, Span] = {}
        """For a send the one before it from the same stage to the same."""
        self._meetings: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
        """All-reduces by stage and version."""
        latest: dict[tuple[int, int, int], Span] = {}
        for span in sorted(timeline.spans, key=attrgetter("start_seconds")):
            kind, stage, number = span.kind, span.stage, span.number
            if kind == "send":
                self._sends[stage, span.reference, number, span.topic].append(span)
                if not span.topic:
                    maker = "forward" if span.reference > stage else "backward"
                    self._made[span.rank, stage, number, maker].append(span)
                link = span.rank, stage, span.reference
                if link in latest:
                    self._queued[id(span)] = latest[link]
                latest[link] = span
                continue
            row = self._rows[span.rank]
            self._places[id(span)] = len(row)
            row.append(span)
            self._makers[span.rank, stage, number, _made_by(kind)] = span
            if kind == "reduce":
                self._meetings[stage, number].append(span)

    def final(self) -> Span:
        """The span that stops last, in the order of its row."""
        ends = [row[-1] for row in self._rows.values()] + [spans[-1] for spans in self._sends.values()]
        return max(ends, key=attrgetter("stop_seconds"))

    def before(self, span: Span) -> Iterator[Span]:
        """What `span` may have waited for; of several, it did wait for the one that stops last."""
        match span.kind:
            case "send":
                yield from self._before_send(span)
            case "receive":
                own = list(self._previous(span))
                yield from own
                if span.seconds > 0 or not own:
                    yield from self._sends[span.reference, span.stage, span.number, span.topic]
            case "reduce":
                for other in self._meetings[span.stage, span.number]:
                    yield from self._previous(other)
            case _:
                yield from self._previous(span)

    def _before_send(self, span: Span) -> Iterator[Span]:
        kind = "forward" if span.reference > span.stage else "backward"
        maker = self._makers.get((span.rank, span.stage, span.number, kind))
        if maker is None or span.topic:
            row = self._rows[span.rank]
            maker = max(
                (other for other in row if other.computes and other.stop_seconds <= span.start_seconds),
                key=attrgetter("stop_seconds"),
                default=None,
            )
        if maker is not None:
            yield maker
        if id(span) in self._queued and (maker is None or maker.stop_seconds < span.start_seconds):
            yield self._queued[id(span)]

    def _previous(self, span: Span) -> Iterator[Span]:
        """What its rank did before; the send after that, if that kept the rank busy."""
        place = self._places[id(span)]
        if not place:
            return
        own = self._rows[span.rank][place - 1]
        yield own
        if own.stop_seconds < span.start_seconds:
            yield from self._made.get((span.rank, own.stage, own.number, _made_by(own.kind)), ())


def _made_by(kind: str) -> str:
    """The kind as which what makes a message is known: gradients leave after a backward or after its input part."""
    return "backward" if kind == "backward input" else kind
