"""Sample timelines, small and large, and a reader of SVG elements, for the tests of pictures and pages."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from penstock.timelines.memories import RankMemory
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline

SPANS = (
    Span(0, "0F0@0", 1.0, 2.0),
    Span(0, "0S0>1", 2.0, 2.5, 4.2e6),
    Span(0, "0R0<1", 2.0, 6.0, 4.2e6),
    Span(0, "0B0@0", 6.0, 8.0),
    Span(0, "0A1", 8.0, 8.25, 1e6),
    Span(0, "0U1<0", 8.25, 8.5),
    Span(1, "1R0<0", 1.0, 2.5, 4.2e6),
    Span(1, "1F0@0", 2.5, 3.5),
    Span(1, "1B0@0", 3.5, 5.5),
    Span(1, "1S0>0", 5.5, 6.0, 4.2e6),
    Span(1, "1U1<0", 5.5, 5.75),
)
"""Two stages, one microbatch; the transfers take half a second. Second 1 is the first."""

SVG = "{http://www.w3.org/2000/svg}"


def timeline_with_memory() -> Timeline:
    """`SPANS` with memory: 4 GB are always held, activations take 3 GB for a time, and a message of 1 GB arrives."""
    first = RankMemory(1e9, 2e9, 1e9, ((1.0, 3e9), (8.0, 0.0)), ((5.5, 1e9), (6.0, 0.0)))
    second = RankMemory(1e9, 2e9, 1e9, ((2.5, 3e9), (5.5, 0.0)), ())
    return Timeline(SPANS, 2, (first, second))


def shifted(timeline: Timeline, origin: float, factor: float) -> Timeline:
    """`timeline`, `factor` times as slow and `origin` seconds later."""
    spans = (
        Span(span.rank, span.action, origin + factor * span.start_seconds, origin + factor * span.stop_seconds)
        for span in timeline.spans
    )
    return Timeline(tuple(spans), timeline.ranks)


def large_timeline(ranks: int, microbatches: int) -> Timeline:
    """GPipe with as many spans as a training step of that size has, and its memory."""
    spans: list[Span] = []
    memory: list[RankMemory] = []
    for rank in range(ranks):
        held: list[tuple[float, float]] = []
        for k in range(microbatches):
            start, back = float(rank + k), float(microbatches + 2 * ranks + 2 * k - rank)
            spans.append(Span(rank, f"{rank}F{k}@0", start, start + 1))
            spans.append(Span(rank, f"{rank}B{k}@0", back, back + 2))
            held += [(start, float(k + 1)), (back + 2, float(microbatches - k - 1))]
            if rank + 1 < ranks:
                spans.append(Span(rank, f"{rank}S{k}>{rank + 1}", start + 1, start + 1.25, 4.2e6))
                spans.append(Span(rank + 1, f"{rank + 1}R{k}<{rank}", start + 1, start + 1.25, 4.2e6))
        memory.append(RankMemory(8.0, 16.0, 8.0, tuple(sorted(held))))
    return Timeline(tuple(spans), ranks, tuple(memory))


def elements(document: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(document).iter(f"{SVG}{tag}"))


def classes(document: str, tag: str, name: str) -> Iterator[ElementTree.Element]:
    """The elements `tag` of class `name`."""
    return (element for element in elements(document, tag) if element.get("class") == name)
