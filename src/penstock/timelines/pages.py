"""The HTML page of a timeline, or of a prediction above a measurement: a picture to zoom, pan and inspect.

The page needs no other file: the spans are columns of numbers in one JSON document, and the script (`pages.js`, in this
directory) draws the visible ones on a canvas. So a page of tens of thousands of spans is a megabyte and pans smoothly.
The words of the tooltips are here, in `_WORDS`; the script only fills in the numbers.
"""

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from penstock.errors import visible
from penstock.timelines.memories import MemoryCurve, RankMemory
from penstock.timelines.panels import Panel, held_stages, peak_words
from penstock.timelines.spans import Span
from penstock.values.quantities import bytes_text, seconds_text

_TICKS = 10_000_000
"""The longest panel has at least this many ticks; times in the document are whole ticks."""

_WORDS = {
    "F": ("forward of microbatch {number}", "stage {stage}, weights of version {reference}"),
    "B": ("backward of microbatch {number}", "stage {stage}, weights of version {reference}"),
    "I": ("input backward of microbatch {number}", "stage {stage}, weights of version {reference}"),
    "W": ("weight backward of microbatch {number}", "stage {stage}, weights of version {reference}"),
    "C": ("forward of microbatch {number} again", "stage {stage}, weights of version {reference}"),
    "U": ("update to version {number}", "stage {stage}, from gradients at version {reference}"),
    "A": ("sum of gradients for version {number}", "over the replicas of stage {stage}"),
    "S": ("send microbatch {number} to stage {reference}", "from stage {stage}"),
    "R": ("wait for microbatch {number} from stage {reference}", "for stage {stage}"),
    "T": ("send tied gradients for version {number} to stage {reference}", "from stage {stage}"),
    "t": ("wait for tied gradients for version {number} from stage {reference}", "for stage {stage}"),
    "N": ("send norms for version {number} to stage {reference}", "from stage {stage}"),
    "H": ("copy of microbatch {number} to the host", "from stage {stage}"),
    "D": ("copy of microbatch {number} from the host", "for stage {stage}"),
    "G": ("copy of weights {number} from the host", "for stage {stage}"),
    "Q": ("release of weights {number}", "of stage {stage}, with its gradients"),
    "n": ("wait for norms for version {number} from stage {reference}", "for stage {stage}"),
}
_HELP = (
    "Wheel: zoom. Drag, or Shift and wheel: move. Wheel over the ranks: scroll. Double click: zoom to a span. Keys: "
    "arrows go from span to span, + and \N{MINUS SIGN} zoom, a and d move, [ and ] change the height of the rows, "
    "m hides the memory, 0 shows everything."
)


def timeline_page(panels: Sequence[Panel], title: str, notes: Sequence[str] = ()) -> str:
    """The HTML document of `panels`, one below the other on one time axis, with `notes` in its head."""
    directory = files("penstock.timelines")
    style = directory.joinpath("pages.css").read_text(encoding="utf-8")
    script = directory.joinpath("pages.js").read_text(encoding="utf-8")
    # A closing tag within a string would end the script element early.
    document = json.dumps(_document(panels), separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            '<meta name="color-scheme" content="light dark"/>',
            f"<title>{escape(visible(title))}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            f"<header>\n<h1>{escape(visible(title))}</h1>",
            *(f'<p class="figures">{escape(panel.headline)}</p>' for panel in panels),
            *_difference(panels),
            *(f'<p class="figures">{escape(visible(note))}</p>' for note in notes),
            "</header>",
            *_bar(panels),
            '<div id="frame" tabindex="0" role="application" aria-describedby="help" '
            'aria-label="Timeline, one row per rank">',
            '<canvas id="canvas"></canvas><div id="space"></div></div>',
            '<div id="tip" hidden="hidden"></div><p id="said" role="status"></p>',
            f'<p id="help">{_HELP}</p>',
            "<noscript><p>The picture needs JavaScript; the figures below do not.</p></noscript>",
            *_table(panels),
            f'<script type="application/json" id="data">{document}</script>',
            f"<script>\n{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _difference(panels: Sequence[Panel]) -> Iterator[str]:
    """The difference between a measurement and the prediction above it."""
    if len(panels) == 2 and panels[0].seconds > 0:
        ratio = panels[1].seconds / panels[0].seconds - 1
        word = "longer" if ratio >= 0 else "shorter"
        yield f'<p class="figures">{panels[1].name} takes {abs(ratio):.1%} {word} than {panels[0].name}</p>'


def _bar(panels: Sequence[Panel]) -> Iterator[str]:
    """The legend, and buttons as an alternative to the wheel and the keys."""
    letters = {_letter(span) for panel in panels for row in panel.rows for span in row}
    yield '<div class="bar"><ul class="legend">'
    for word, kinds in (
        ("forward", "FC"),
        ("backward", "BI"),
        ("weight", "W"),
        ("update", "U"),
        ("reduce", "A"),
        ("send", "STNHD"),
    ):
        if letters & set(kinds):
            text = {"reduce": "sum of gradients", "weight": "weight backward"}.get(word, word)
            yield f'<li><span class="swatch {word}"></span>{text}</li>'
    if any(len(held_stages(row)) > 1 for panel in panels for row in panel.rows):
        shades = '<span class="swatch forward1"></span><span class="swatch backward1"></span>'
        yield f"<li>{shades}lighter: every other stage of the rank</li>"
    yield '<li><span class="swatch idle"></span>idle (bubble)</li>'
    if any(panel.critical for panel in panels):
        yield '<li><span class="swatch critical"></span>critical path</li>'
    if any(panel.memory for panel in panels):
        yield '<li><span class="swatch held"></span>memory always held</li>'
        yield '<li><span class="swatch activations"></span>activations</li>'
        yield '<li><span class="swatch buffers"></span>messages and gradients</li>'
    yield '</ul><div class="buttons" role="group" aria-label="View">'
    for name, text, words in (
        ("out", "\N{MINUS SIGN}", "zoom out"),
        ("in", "+", "zoom in"),
        ("all", "all", "show everything"),
        ("flatter", "\N{UPWARDS ARROW}\N{DOWNWARDS ARROW} less", "flatter rows"),
        ("taller", "\N{UPWARDS ARROW}\N{DOWNWARDS ARROW} more", "taller rows"),
    ):
        yield f'<button type="button" id="{name}" title="{words}" aria-label="{words}">{text}</button>'
    if any(panel.memory for panel in panels):
        yield '<button type="button" id="memory" title="show or hide the memory" aria-pressed="true">memory</button>'
    yield "</div></div>"


def _table(panels: Sequence[Panel]) -> Iterator[str]:
    """The figures of every rank as text, for screen readers and to copy."""
    yield "<details><summary>Figures, rank by rank</summary>"
    for panel in panels:
        yield f"<table><caption>{escape(panel.headline)}</caption>"
        memory = "<th>peak memory</th><th>of it</th>" if panel.memory else ""
        yield f"<thead><tr><th>rank</th><th>busy</th><th>idle</th>{memory}</tr></thead><tbody>"
        for rank, idle in enumerate(panel.idle_shares):
            cells = [str(rank), seconds_text((1 - idle) * panel.seconds), f"{idle:.1%}"]
            if panel.memory:
                peak, _, parts = peak_words(panel.memory[rank]).partition(": ")
                cells += [peak.removeprefix("peak "), parts]
            yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        yield "</tbody></table>"
    yield "</details>"


def _document(panels: Sequence[Panel]) -> dict[str, object]:
    seconds = max(panel.seconds for panel in panels)
    tick = 10.0 ** math.floor(math.log10(seconds / _TICKS)) if seconds > 0 else 1.0
    return {"tick": tick, "words": _WORDS, "panels": [_panel(panel, tick) for panel in panels]}


def _panel(panel: Panel, tick: float) -> dict[str, object]:
    places = {span: (rank, index) for rank, row in enumerate(panel.rows) for index, span in enumerate(row)}
    return {
        "name": panel.name,
        "length": round(panel.seconds / tick),
        "rows": [_row(row, panel.idle_shares[rank], panel.origin, tick) for rank, row in enumerate(panel.rows)],
        "memory": [_memory(memory, panel.origin, tick) for memory in panel.memory],
        "critical": [places[span] for span in panel.critical],
    }


def _row(row: Sequence[Span], idle: float, origin: float, tick: float) -> dict[str, object]:
    """The columns of one rank's spans. Starts are written as the distance from the previous start."""
    starts = [round((span.start_seconds - origin) / tick) for span in row]
    stops = [round((span.stop_seconds - origin) / tick) for span in row]
    stages = [span.stage for span in row]
    columns: dict[str, object] = {
        "idle": f"{idle:.1%}",
        "kinds": "".join(map(_letter, row)),
        "stages": stages[0] if len(set(stages)) == 1 else stages,
        "numbers": [span.number for span in row],
        "references": [span.reference for span in row],
        "starts": [start - before for before, start in zip([0, *starts], starts, strict=False)],
        "lengths": [stop - start for start, stop in zip(starts, stops, strict=True)],
    }
    if any(span.size_bytes is not None for span in row):
        columns["sizes"] = [0 if span.size_bytes is None else bytes_text(span.size_bytes) for span in row]
    return columns


def _memory(memory: RankMemory, origin: float, tick: float) -> dict[str, object]:
    return {
        "peak": memory.peak_bytes,
        "held": memory.constant_bytes,
        "words": peak_words(memory),
        "activations": _curve_columns(memory.activations, origin, tick),
        "buffers": _curve_columns(memory.buffers, origin, tick),
    }


def _curve_columns(curve: MemoryCurve, origin: float, tick: float) -> dict[str, list[int]]:
    """Distances in ticks, and whole bytes."""
    times = [round((at - origin) / tick) for at, _ in curve]
    return {
        "at": [time - before for before, time in zip([0, *times], times, strict=False)],
        "bytes": [round(size) for _, size in curve],
    }


def _letter(span: Span) -> str:
    """The kind in one character, as in the action's text; ``t`` and ``n`` are receives."""
    letter = span.action.lstrip("0123456789")[0]
    return letter.lower() if letter in "TN" and span.kind == "receive" else letter
