"""The SVG picture of a plan on a cluster: the stages of each device, its links and its memory.

At the top are the stages in their order, with the bytes that cross each cut, and below them the machines. The picture
needs no other file and follows the reader's light or dark setting. Equal machines of a large cluster are drawn once,
with their number.

    [stage 0: layers 0-4] 1.2 MB > [stage 1: layers 5-7 x 2] > ...
    +- 2 of these at 1.25 GB/s ------------------------------------+
    | +- 2 devices at 12 GB/s ---+   +- 2 devices at 12 GB/s ---+  |
    | | [rank 0   ]  [rank 1   ] |   | [rank 2   ]  [rank 3   ] |  |
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain
from math import ceil, inf, isfinite, lcm, log
from typing import assert_never

from penstock.errors import PlanError, counted, visible
from penstock.rendering.device_boxes import (
    STYLE,
    Box,
    DeviceAssignment,
    bandwidth_words,
    draw_devices,
    draw_levels,
    stage_colors,
)
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels, LinkMatrix
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text, seconds_text

_WIDTH, _MARGIN = 1120, 20
_CHIP, _CHIP_HEIGHT, _ARROW = 128, 58, 66
_PAIRS = 4_096
"""The number of pairs of replicas that are examined for the slowest transfer of a cut."""


def draw_plan(plan: Plan, cluster: Cluster, profile: Profile | None = None) -> str:
    """The SVG document of the picture.

    With a profile it also shows the seconds of each stage and the bytes over each cut, for one microbatch of the plan's
    size. Raises `PlanError` if the plan has more ranks than the cluster has devices, or other layers than the profile.
    """
    _check(plan, cluster, profile)
    if profile is not None and plan.microbatch_size is not None:
        profile = profile.scaled(plan.microbatch_size)
    stages = _StageChain(plan, cluster, profile)
    top = 74 + stages.height
    assignment = DeviceAssignment.of(plan, cluster)
    match cluster.links:
        case LinkLevels(levels):
            machines = draw_levels(levels, assignment, _WIDTH - 2 * _MARGIN)
        case LinkMatrix(rows):
            machines = _side_by_side(draw_devices(assignment, _WIDTH // 2 - 2 * _MARGIN), draw_heat_map(rows))
        case _:
            assert_never(cluster.links)
    width = max(_WIDTH, machines.width + 2 * _MARGIN)
    height = top + machines.height + _MARGIN
    headline, figures = _headline(plan, cluster), _figures(plan)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(visible(headline))}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<text class="title" x="{_MARGIN}" y="26">{escape(visible(headline))}</text>',
        f'<text class="soft" x="{_MARGIN}" y="44">{escape(visible(figures))}</text>',
        *stages.draw(58),
        f'<g transform="translate({_MARGIN} {top})">',
        *machines.lines,
        "</g>",
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def _check(plan: Plan, cluster: Cluster, profile: Profile | None) -> None:
    last = max(chain.from_iterable(stage.ranks for stage in plan.stages))
    last = max(plan.devices, default=last)
    if last >= cluster.devices:
        used = "device" if plan.devices else "rank"
        raise PlanError(
            f"the plan uses {used} {last} and the cluster has {cluster.devices} devices: expected {used}s below "
            f"{cluster.devices}. Draw the plan over the cluster that it was made for"
        )
    if profile is not None and plan.layers != len(profile.layers):
        raise PlanError(
            f"the plan has {plan.layers} layers and the profile {profile.name!r} has {len(profile.layers)}: expected "
            "the same number. Use the profile that the plan was made from"
        )


def _headline(plan: Plan, cluster: Cluster) -> str:
    options = ["recompute"] if plan.recompute else []
    options += [f"tensor parallel {plan.tensor_parallel}"] if plan.tensor_parallel > 1 else []
    options += ["split microbatches"] if plan.routing == "split" else []
    size = "" if plan.microbatch_size is None else f" of {plan.microbatch_size}"
    parts = [counted(len(plan.stages), "stage"), counted(plan.microbatches, "microbatch") + size, *options]
    return f"{plan.schedule}: {', '.join(parts)}, {plan.ranks} of {counted(cluster.devices, 'device')}"


def _figures(plan: Plan) -> str:
    expected = plan.predicted
    if expected is None:
        return "no prediction"
    limit = f", limited by {expected.limit}" if expected.limit else ""
    return (
        f"predicted: {seconds_text(expected.minibatch_seconds)} a minibatch, "
        f"{expected.samples_per_second:.4g} samples/s, bubble {expected.bubble:.1%} of wall time, "
        f"peak memory {bytes_text(max(expected.peak_bytes))}{limit}"
    )


class _StageChain:
    """Draws the stages one after the other, broken into rows like text."""

    def __init__(self, plan: Plan, cluster: Cluster, profile: Profile | None) -> None:
        self.plan, self.cluster, self.profile = plan, plan.used(cluster), profile
        self.columns = (_WIDTH - 2 * _MARGIN + _ARROW) // (_CHIP + _ARROW)
        self.height = -(-len(plan.stages) // self.columns) * (_CHIP_HEIGHT + 12)

    def draw(self, top: int) -> Iterator[str]:
        colors = stage_colors(len(self.plan.stages))
        for index, stage in enumerate(self.plan.stages):
            row, column = divmod(index, self.columns)
            x, y = _MARGIN + column * (_CHIP + _ARROW), top + row * (_CHIP_HEIGHT + 12)
            paint, ink = colors[index]
            words = escape(visible(f"stage {index}: {stage}{self._names(stage)}"))
            yield f'<g class="stage"><title>{words}</title>'
            yield f'<rect x="{x}" y="{y}" width="{_CHIP}" height="{_CHIP_HEIGHT}" rx="6" fill="{paint}"/>'
            replicas = self.plan.replicas[index]
            copies = f" \N{MULTIPLICATION SIGN} {replicas}" if replicas > 1 else ""
            yield f'<text x="{x + 10}" y="{y + 20}" style="fill:{ink}" class="title">stage {index}{copies}</text>'
            yield f'<text x="{x + 10}" y="{y + 36}" style="fill:{ink}">{_layers(stage)}</text>'
            yield f'<text x="{x + 10}" y="{y + 51}" style="fill:{ink}" class="small">{self._cost(stage)}</text></g>'
            if index + 1 < len(self.plan.stages):
                yield from self._arrow(index, x + _CHIP, y + _CHIP_HEIGHT // 2)

    def _names(self, stage: Stage) -> str:
        if self.profile is None:
            return ""
        first, last = self.profile.layers[stage.start].name, self.profile.layers[stage.stop - 1].name
        return f": {first}" + (f" to {last}" if stage.stop - stage.start > 1 else "")

    def _cost(self, stage: Stage) -> str:
        if self.profile is None:
            return ""
        layers = self.profile.layers[stage.start : stage.stop]
        weights = sum(layer.parameter_bytes + layer.frozen_bytes for layer in layers)
        # The slowest of its devices.
        times = [self.profile.times_on(kind) for kind in {self.cluster.kind_of(rank) for rank in stage.ranks}]
        own = slice(stage.start, stage.stop)
        seconds = max(sum(time.forward_seconds[own]) + sum(time.backward_seconds[own]) for time in times)
        return f"{seconds_text(seconds)}, {bytes_text(weights)}"

    def _arrow(self, index: int, x: int, y: int) -> Iterator[str]:
        """The arrow to the next stage, with the bytes over the cut and the seconds of their slowest transfer."""
        yield f'<path class="arrow" d="M{x + 6} {y}h{_ARROW - 12}m-5 -4l5 4l-5 4"/>'
        if self.profile is None:
            return
        stages = self.plan.stages
        size = self.profile.on_wire.layers[stages[index].stop - 1].cut_bytes
        here, there = stages[index].ranks, stages[index + 1].ranks
        rounds = min(lcm(len(here), len(there)), _PAIRS)
        pairs = {(here[k % len(here)], there[k % len(there)]) for k in range(rounds)}
        seconds = max(self.cluster.transfer_seconds(size, a, b) for a, b in pairs)
        middle = x + _ARROW / 2
        yield f'<text class="small middle" x="{middle:g}" y="{y - 7}">{bytes_text(size)}</text>'
        yield f'<text class="soft middle" x="{middle:g}" y="{y + 17}">{seconds_text(seconds)}</text>'


def _layers(stage: Stage) -> str:
    return (
        f"layer {stage.start}" if stage.stop - stage.start == 1 else f"layers {stage.start}\N{EN DASH}{stage.stop - 1}"
    )


def _side_by_side(left: Box, right: Box) -> Box:
    gap = 40
    moved = [f'<g transform="translate({left.width + gap:g} 0)">', *right.lines, "</g>"]
    return Box(left.width + gap + right.width, max(left.height, right.height), [*left.lines, *moved])


_SIDE, _LEFT, _TOP = 400, 58, 40
_MOST = 96
"""With more ranks, several share a square, which shows the slowest of their links."""
_NAMED = 24
"""Up to this many ranks are numbered, and their links have tooltips."""


def draw_heat_map(rows: Sequence[Sequence[float]]) -> Box:
    """The heat map of the matrix `rows` (bytes per second) without its diagonal: row a, column b is the link from rank
    a to rank b, and dark is slow.
    """
    ranks = len(rows)
    block = ceil(ranks / _MOST)
    squares = ceil(ranks / block)
    side = min(40.0, _SIDE / squares)
    values = [value for a, row in enumerate(rows) for b, value in enumerate(row) if a != b and isfinite(value)]
    least, most = min(values, default=1.0), max(values, default=1.0)
    lines = [
        '<text class="title" x="0" y="14">bandwidth from rank (row) to rank (column)</text>',
        f'<text class="soft" x="0" y="30">dark {bandwidth_words(least)} to light {bandwidth_words(most)}'
        + (f"; a square is the slowest of {block} \N{MULTIPLICATION SIGN} {block} links" if block > 1 else "")
        + "</text>",
    ]
    for a in range(squares):
        for b in range(squares):
            value = _slowest(rows, a * block, b * block, block)
            if value == inf and a == b:
                continue
            red, green, blue = _shade(value, least, most)
            x, y = _LEFT + b * side, _TOP + 16 + a * side
            tooltip = f"<title>rank {a} to rank {b}: {bandwidth_words(value)}</title>" if ranks <= _NAMED else ""
            lines.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{side * 0.96:.1f}" height="{side * 0.96:.1f}" '
                f'fill="#{red:02x}{green:02x}{blue:02x}"' + (f">{tooltip}</rect>" if tooltip else "/>")
            )
    for rank in range(ranks) if ranks <= _NAMED else range(0, squares, ceil(squares / 8)):
        middle = (rank + 0.5) * side
        lines.append(f'<text class="soft end" x="{_LEFT - 6}" y="{_TOP + 20 + middle:.1f}">{rank * block}</text>')
        lines.append(f'<text class="soft middle" x="{_LEFT + middle:.1f}" y="{_TOP + 10}">{rank * block}</text>')
    return Box(_LEFT + squares * side, _TOP + 16 + squares * side, lines)


def _slowest(rows: Sequence[Sequence[float]], first: int, second: int, block: int) -> float:
    """The slowest link between two blocks of ranks; infinite if there are only diagonal elements."""
    stop = len(rows)
    pairs = (
        rows[a][b]
        for a in range(first, min(first + block, stop))
        for b in range(second, min(second + block, stop))
        if a != b
    )
    return min(pairs, default=inf)


def _shade(value: float, least: float, most: float) -> tuple[int, int, int]:
    """The color on a logarithmic scale: a link that is twice as fast is always one step lighter."""
    share = 1.0 if value >= most or most <= least else log(value / least) / log(most / least)
    dark, light = (44, 45, 110), (247, 214, 120)
    middle = (43, 135, 155)
    low, high, position = (dark, middle, share * 2) if share < 0.5 else (middle, light, share * 2 - 1)
    red, green, blue = (round(a + (b - a) * position) for a, b in zip(low, high, strict=True))
    return red, green, blue
