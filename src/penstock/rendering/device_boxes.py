"""Devices as boxes within the boxes of their machines, each with its stage, its replica and its memory.

In a large cluster equal boxes are drawn once, with a count: 3,072 devices in 384 equal servers are one server, "x 384".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from math import ceil, isinf, prod, sqrt
from typing import TypeAlias

from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.quantities import bandwidth_text, bytes_text

_CELL, _TALL, _FLAT, _GAP, _PAD, _TITLE = 104, 74, 52, 10, 12, 24
_SMALL = 128
"""Up to this many devices are all drawn, even if they are equal."""

STYLE = """
  svg { background: #ffffff; --ink: #1b1f24; --soft: #59636e; --edge: #c3cad3; --free: #f4f6f8; --well: #e3e7ec;
    --full: #59636e; --over: #c65200 }
  @media (prefers-color-scheme: dark) {
    svg { background: #14171c; --ink: #e6eaef; --soft: #9aa4b0; --edge: #3d4651; --free: #1b1f26; --well: #2c323b;
      --full: #9aa4b0; --over: #f0883e }
  }
  text { font: 12px ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink) }
  .title { font-weight: 600; font-size: 13px } .soft { fill: var(--soft); font-size: 11px } .small { font-size: 11px }
  .middle { text-anchor: middle } .end { text-anchor: end }
  .arrow { fill: none; stroke: var(--soft); stroke-width: 1.5 } .level { fill: none; stroke: var(--edge) }
  .device { fill: var(--free); stroke: var(--edge) } .well { fill: var(--well) } .full { fill: var(--full) }
  .over { fill: var(--over) } .copies { font-weight: 600; fill: var(--ink); text-anchor: end }
""".strip("\n")

_ANCHORS = ((59, 66, 140), (38, 120, 178), (38, 150, 132), (139, 187, 74), (242, 200, 75))
"""From dark to light, so that the order is visible without color, too."""


@lru_cache(maxsize=8)
def stage_colors(stages: int) -> tuple[tuple[str, str], ...]:
    """The color of every stage and the color of a text on it."""
    colors = []
    for stage in range(stages):
        at = stage / max(1, stages - 1) * (len(_ANCHORS) - 1)
        index = min(int(at), len(_ANCHORS) - 2)
        low, high = _ANCHORS[index], _ANCHORS[index + 1]
        red, green, blue = (round(a + (b - a) * (at - index)) for a, b in zip(low, high, strict=True))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue
        colors.append((f"#{red:02x}{green:02x}{blue:02x}", "#14171c" if bright > 118 else "#ffffff"))
    return tuple(colors)


def bandwidth_words(bandwidth: float) -> str:
    """``12 GB/s``; ``any speed`` for an infinite bandwidth."""
    return "any speed" if isinf(bandwidth) else bandwidth_text(bandwidth)


@dataclass(frozen=True, slots=True)
class Box:
    """An element of a picture with its upper left corner at 0, 0."""

    width: float
    height: float
    lines: list[str]


_Signature: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Holds the stages of every device, its position among their replicas, and its peak memory."""

    plan: Plan
    cluster: Cluster
    held: tuple[tuple[tuple[int, int], ...], ...]
    """Per device: (stage, position among the stage's ranks)."""

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster) -> "DeviceAssignment":
        """The assignment of `plan` on `cluster`."""
        held: list[list[tuple[int, int]]] = [[] for _ in range(cluster.devices)]
        for index, stage in enumerate(plan.stages):
            for position, rank in enumerate(stage.ranks):
                held[plan.devices[rank] if plan.devices else rank].append((index, position))
        return cls(plan, cluster, tuple(map(tuple, held)))

    @property
    def devices(self) -> int:
        """The number of devices of the cluster, used or not."""
        return len(self.held)

    def rank(self, device: int) -> int | None:
        """The rank on the device; None if it is not used."""
        if self.plan.devices:
            return self.plan.devices.index(device) if device in self.plan.devices else None
        return device if self.held[device] else None

    def name(self, device: int) -> str:
        """The rank of the device, or its own number if it has none or another."""
        rank = self.rank(device)
        if rank is None:
            return f"device {device}" if self.plan.devices else f"rank {device}"
        return f"rank {rank}" if rank == device else f"rank {rank} (device {device})"

    def peak(self, device: int) -> float | None:
        """The predicted bytes; None without a prediction for the device."""
        expected, rank = self.plan.predicted, self.rank(device)
        return None if expected is None or rank is None else expected.peak_bytes[rank]

    def signature(self, device: int) -> _Signature:
        """Equal for devices that differ only in their number and that of their replica."""
        peak = self.peak(device)
        own = (self.cluster.kind_of(device),) if self.cluster.kinds else ()
        return (*(stage for stage, _ in self.held[device]), *own, None if peak is None else bytes_text(peak))


def draw_devices(assignment: DeviceAssignment, width: float) -> Box:
    """All devices side by side, in rows of at most `width` pixels."""
    return _grid(
        _alike([(assignment.signature(rank), rank, 1) for rank in range(assignment.devices)], assignment), width
    )


def draw_levels(levels: Sequence[tuple[int, float]], assignment: DeviceAssignment, width: float) -> Box:
    """The devices within their machines, level by level, in an outermost box of about `width` pixels."""
    return _level(levels, len(levels), 0, assignment, width)


_BoxGroup: TypeAlias = tuple[_Signature, int, int]
"""Its signature, its first rank, and how many equal boxes it represents."""


def _level(
    levels: Sequence[tuple[int, float]], depth: int, first: int, assignment: DeviceAssignment, width: float
) -> Box:
    """The box of the component of level `depth` (0 is a device) whose first rank is `first`."""
    count, bandwidth = levels[depth - 1]
    size = prod(count for count, _ in levels[: depth - 1])
    inner = width - 2 * _PAD
    starts = [first + index * size for index in range(count)]
    signed = [(_signature(start, size, assignment), start, 1) for start in starts]
    groups = _merged(signed) if assignment.devices > _SMALL else signed
    if depth == 1:
        content = _grid(_cells(groups, assignment), inner)
    else:
        boxes = [_counted(_level(levels, depth - 1, start, assignment, inner), copies) for _, start, copies in groups]
        content = _grid(boxes, inner)
    words = f"{count} {'device' if depth == 1 else 'group'}{'s' if count > 1 else ''}"
    words += f", {bandwidth_words(bandwidth)} between them" if count > 1 else ""
    wide, high = (
        max(content.width, 6 * len(words) + (36 if assignment.devices > _SMALL else 0)) + 2 * _PAD,
        content.height + _TITLE + _PAD,
    )
    lines = [
        f'<rect class="level" x="0.5" y="0.5" width="{wide:g}" height="{high:g}" rx="8"/>',
        f'<text class="soft" x="{_PAD}" y="17">{words}</text>',
        f'<g transform="translate({_PAD} {_TITLE})">',
        *content.lines,
        "</g>",
    ]
    return Box(wide + 1, high + 1, lines)


def _signature(first: int, size: int, assignment: DeviceAssignment) -> _Signature:
    return tuple(assignment.signature(rank) for rank in range(first, first + size))


def _alike(groups: Sequence[_BoxGroup], assignment: DeviceAssignment) -> list[Box]:
    return _cells(_merged(groups) if assignment.devices > _SMALL else groups, assignment)


def _merged(groups: Sequence[_BoxGroup]) -> list[_BoxGroup]:
    """The first box of each signature, with the number of its equals."""
    found: dict[_Signature, tuple[int, int]] = {}
    for signature, first, copies in groups:
        start, before = found.get(signature, (first, 0))
        found[signature] = start, before + copies
    return [(signature, first, copies) for signature, (first, copies) in found.items()]


def _cells(groups: Sequence[_BoxGroup], assignment: DeviceAssignment) -> list[Box]:
    colors = stage_colors(len(assignment.plan.stages))
    return [_counted(_cell(rank, assignment, colors), copies) for _, rank, copies in groups]


def _counted(box: Box, copies: int) -> Box:
    """The box, with a count at the upper right if it represents several."""
    if copies == 1:
        return box
    entry = f'<text class="copies" x="{box.width - 8:g}" y="17">\N{MULTIPLICATION SIGN} {copies}</text>'
    return Box(box.width, box.height, [*box.lines, entry])


def _cell(rank: int, assignment: DeviceAssignment, colors: Sequence[tuple[str, str]]) -> Box:
    """One device: its rank, its stages in their colors, its replica and layers, its memory."""
    held = assignment.held[rank]
    height = _FLAT if assignment.plan.predicted is None else _TALL
    lines = [
        f'<g class="tenant"><title>{escape(_tooltip(rank, assignment))}</title>',
        f'<rect class="device" x="0.5" y="0.5" width="{_CELL - 1}" height="{height - 1}" rx="5"/>',
        f'<text class="small" x="8" y="17">{assignment.name(rank)}</text>',
    ]
    if not held:
        return Box(_CELL, height, [*lines, '<text class="soft" x="8" y="38">not used</text></g>'])
    wide = (_CELL - 12) / len(held)
    for index, (stage, position) in enumerate(held):
        paint, ink = colors[stage]
        x = 6 + index * wide
        lines.append(f'<rect x="{x:g}" y="24" width="{wide - 1:g}" height="20" rx="3" fill="{paint}"/>')
        text = _short(stage, position, assignment, len(held))
        if 6.2 * len(text) < wide:
            lines.append(f'<text class="small middle" x="{x + wide / 2:g}" y="38" style="fill:{ink}">{text}</text>')
    return Box(_CELL, height, [*lines, *_memory_bar(rank, assignment), "</g>"])


def _short(stage: int, position: int, assignment: DeviceAssignment, stages: int) -> str:
    if stages > 1:
        return str(stage)
    replicas = assignment.plan.replicas[stage]
    replica = position // assignment.plan.tensor_parallel
    # A box that represents several devices shows no replica.
    return f"stage {stage}" + (f" #{replica}" if replicas > 1 and assignment.devices <= _SMALL else "")


def _memory_bar(rank: int, assignment: DeviceAssignment) -> list[str]:
    peak = assignment.peak(rank)
    if peak is None:
        return []
    predicted = assignment.plan.predicted
    limit = assignment.cluster.memory_of(rank)
    most = limit if limit is not None else max(predicted.peak_bytes if predicted else (peak,)) or 1.0
    wide = _CELL - 12
    name = "over" if limit is not None and peak > limit else "full"
    text = bytes_text(peak) if limit is None else f"{bytes_text(peak)} of {bytes_text(limit)}"
    return [
        f'<rect class="well" x="6" y="48" width="{wide}" height="6" rx="2"/>',
        f'<rect class="{name}" x="6" y="48" width="{min(1.0, peak / most) * wide:.1f}" height="6" rx="2"/>',
        f'<text class="soft middle" x="{_CELL // 2}" y="67" style="font-size:10px">{text}</text>',
    ]


def _tooltip(rank: int, assignment: DeviceAssignment) -> str:
    """The tooltip of a device."""
    plan = assignment.plan
    lines = [assignment.name(rank) + ("" if assignment.held[rank] else ": not used")]
    kind = assignment.cluster.kind_of(rank)
    lines += [kind.name] if kind.name else []
    lines += [f"{kind.speed:.3g} times as fast as its profile"] if kind.speed != 1 else []
    for index, position in assignment.held[rank]:
        stage, replicas = plan.stages[index], plan.replicas[index]
        replica, tp_rank = divmod(position, plan.tensor_parallel)
        copy = f", replica {replica} of {replicas}" if replicas > 1 else ""
        copy += f", tensor-parallel rank {tp_rank} of {plan.tensor_parallel}" if plan.tensor_parallel > 1 else ""
        lines.append(f"stage {index}: layers [{stage.start}, {stage.stop}){copy}")
    if (peak := assignment.peak(rank)) is not None:
        limit = assignment.cluster.memory_of(rank)
        room = "" if limit is None else f", {peak / limit:.0%} of {bytes_text(limit)}"
        lines.append(f"peak memory {bytes_text(peak)}{room}")
    return "\n".join(lines)


def _grid(boxes: Sequence[Box], width: float) -> Box:
    """Boxes in rows of equal columns, within `width`; a compact block rather than one long row."""
    cell_wide, cell_high = max(box.width for box in boxes), max(box.height for box in boxes)
    fitting = max(1, int((width + _GAP) // (cell_wide + _GAP)))
    square = ceil(sqrt(len(boxes) * cell_high / cell_wide * 2.4))
    columns = min(len(boxes), fitting, max(square, min(fitting, 4)))
    columns = ceil(len(boxes) / ceil(len(boxes) / columns))  # rows of nearly equal length
    lines: list[str] = []
    for index, box in enumerate(boxes):
        row, column = divmod(index, columns)
        lines.append(f'<g transform="translate({column * (cell_wide + _GAP):g} {row * (cell_high + _GAP):g})">')
        lines += [*box.lines, "</g>"]
    rows = ceil(len(boxes) / columns)
    return Box(columns * (cell_wide + _GAP) - _GAP, rows * (cell_high + _GAP) - _GAP, lines)
