"""The critical path of a timeline: the chain of spans that determines its length.

It is found backwards, from the span that stops last, each time to the span that the current one waited for: from a
receive to the send of its message, if the message arrived after the rank began to wait; from an all-reduce to what the
last replica did before it; from a send to the span that produced its message, or to the previous message on the link if
it was queued behind that; to or from a copy between device and host if that has just ended; from anything else to what
its rank did before. Measured timelines are read in the same way, although their clocks differ a little.
"""

from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter

from penstock.arguments import integer
from penstock.errors import PlanError
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline


def critical_path(timeline: Timeline, server_ranks: int = 1) -> tuple[Span, ...]:
    """The spans of the critical path, first to last; each is one of ``timeline.spans``. Empty if there are no spans.

    Each starts when the one before it stops, with two exceptions: a receive starts when its rank begins to wait, and
    a message that was queued on a link starts before the latency of the previous one has passed. The spans of a rank
    must be in the order in which they ran. `server_ranks`: the ranks of a server, if they share one link to each other
    server (`simulate(shared_nic=True)`).
    """
    if not timeline.spans:
        return ()
    index = _Index(timeline, integer(1).check("critical_path(server_ranks=)", server_ranks, PlanError))
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
    """Finds the spans that a span may have waited for. Sends and copies do not block, so they are not in their rank's
    row here.
    """

    def __init__(self, timeline: Timeline, server_ranks: int) -> None:
        self._rows: defaultdict[int, list[Span]] = defaultdict(list)
        self._positions: dict[int, int] = {}
        self._sends: defaultdict[tuple[int, int, int, str], list[Span]] = defaultdict(list)
        """By sending stage, receiving stage, number, and topic."""
        self._made: defaultdict[tuple[int, int, int, str], list[Span]] = defaultdict(list)
        """The sends of what a forward or backward produced, by its rank, stage, microbatch and kind."""
        self._makers: dict[tuple[int, int, int, str], Span] = {}
        """Forwards and backwards by rank, stage, microbatch and kind."""
        self._queued: dict[int, list[Span]] = {}
        """The previous send on each of its links, by send."""
        self._reduces: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
        """All-reduces by stage and version."""
        self._copies: defaultdict[int, list[Span]] = defaultdict(list)
        """By rank, those between the device and its host."""
        links = _Links(timeline, server_ranks)
        for span in sorted(timeline.spans, key=attrgetter("start_seconds")):
            kind, stage, number = span.kind, span.stage, span.number
            if kind == "send":
                self._sends[stage, span.reference, number, span.topic].append(span)
                if not span.topic:
                    maker = "forward" if span.reference > stage else "backward"
                    self._made[span.rank, stage, number, maker].append(span)
                self._queued[id(span)] = links.queue(span)
                continue
            if span.copies:
                self._copies[span.rank].append(span)
                continue
            row = self._rows[span.rank]
            self._positions[id(span)] = len(row)
            row.append(span)
            self._makers[span.rank, stage, number, _made_by(kind)] = span
            if kind == "reduce":
                self._reduces[stage, number].append(span)

    def final(self) -> Span:
        """The span that stops last, in the order of its row."""
        last = [row[-1] for row in self._rows.values()] + [spans[-1] for spans in self._sends.values()]
        return max(last, key=attrgetter("stop_seconds"))

    def before(self, span: Span) -> Iterator[Span]:
        """The spans that `span` may have waited for; it did wait for the one of them that stops last."""
        match span.kind:
            case "send":
                yield from self._before_send(span)
            case "receive":
                own = list(self._previous(span))
                yield from own
                if span.seconds > 0 or not own:
                    yield from self._sends[span.reference, span.stage, span.number, span.topic]
            case "reduce":
                for other in self._reduces[span.stage, span.number]:
                    yield from self._previous(other)
            case _:
                before = [*self._copies[span.rank], *(self._rows[span.rank] if span.copies else ())]
                yield from (each for each in before if each is not span and each.stop_seconds <= span.start_seconds)
                yield from self._previous(span) if not span.copies else ()

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
        if maker is None or maker.stop_seconds < span.start_seconds:
            yield from self._queued[id(span)]

    def _previous(self, span: Span) -> Iterator[Span]:
        """The previous span of its rank, and the send after that if it kept the rank busy."""
        position = self._positions[id(span)]
        if not position:
            return
        own = self._rows[span.rank][position - 1]
        yield own
        if own.stop_seconds < span.start_seconds:
            yield from self._made.get((span.rank, own.stage, own.number, _made_by(own.kind)), ())


class _Links:
    """The links of a timeline, each with the last message so far."""

    def __init__(self, timeline: Timeline, server_ranks: int) -> None:
        self._server_ranks = server_ranks
        self._latest: dict[tuple[object, ...], Span] = {}
        self._receivers: defaultdict[tuple[int, int, int, str], list[int]] = defaultdict(list)
        """By sending stage, receiving stage, number, and topic."""
        for span in timeline.spans:
            if span.kind == "receive":
                self._receivers[span.reference, span.stage, span.number, span.topic].append(span.rank)

    def queue(self, send: Span) -> list[Span]:
        """The messages before `send` on its links, which it now follows; a link is that of two ranks or servers."""
        receivers = self._receivers[send.stage, send.reference, send.number, send.topic]
        links: dict[tuple[object, ...], None] = dict.fromkeys(self._link(send.rank, rank) for rank in receivers)
        if not receivers:  # a timeline without what was received
            links[send.rank, "to stage", send.reference] = None
        before = [self._latest[link] for link in links if link in self._latest]
        self._latest.update(dict.fromkeys(links, send))
        return before

    def _link(self, here: int, there: int) -> tuple[object, ...]:
        servers = here // self._server_ranks, there // self._server_ranks
        return ("servers", *servers) if servers[0] != servers[1] else (here, there)


def _made_by(kind: str) -> str:
    """The kind under which a span that produces a message is indexed: an input backward sends gradients, too."""
    return "backward" if kind == "backward input" else kind
