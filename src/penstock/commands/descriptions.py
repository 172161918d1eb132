"""Profiles, plans and clusters as text for a person."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import assert_never

from penstock.errors import counted, visible
from penstock.values import Cluster, DeviceKind, LayerProfile, LinkLevels, LinkMatrix, Plan, Profile, schedule
from penstock.values.plan_stages import ranks_text
from penstock.values.quantities import bandwidth_text, bytes_text, seconds_text, table_lines


def describe_profile(profile: Profile) -> str:
    """One row per layer and the sums. The weight part of a backward has a column where it was measured."""
    layers = profile.layers
    columns: list[tuple[str, Callable[[LayerProfile], str], str]] = [
        ("layer", lambda layer: visible(layer.name), "sum"),
        _summed(layers, "forward", lambda layer: layer.forward_seconds, seconds_text),
        _summed(layers, "backward", lambda layer: layer.backward_seconds, seconds_text),
        ("cut", lambda layer: bytes_text(layer.cut_bytes), ""),
        _summed(layers, "saved", lambda layer: layer.saved_bytes, bytes_text),
        _summed(layers, "parameters", lambda layer: layer.parameter_bytes, bytes_text),
        ("workspace", lambda layer: bytes_text(layer.workspace_bytes), ""),
    ]
    if any(layer.frozen_bytes for layer in layers):
        columns.insert(6, _summed(layers, "frozen", lambda layer: layer.frozen_bytes, bytes_text))
    if any(layer.wire_bytes is not None for layer in layers):
        columns.insert(4, ("sent", lambda layer: bytes_text(_sent_bytes(layer)), ""))
    if any(layer.weight_seconds is not None for layer in layers):
        columns.insert(3, _summed(layers, "its weight part", lambda layer: layer.weight_part_seconds, seconds_text))
    rows = [(str(index), *(cell(layer) for _, cell, _ in columns)) for index, layer in enumerate(layers)]
    head, total = ("", *(name for name, _, _ in columns)), ("", *(sum_ for _, _, sum_ in columns))
    about = ", ".join(visible(part) for part in (profile.name, profile.device) if part)
    title = f"profile{f' of {about}' if about else ''}: {counted(len(layers), 'layer')}, microbatches of "
    table = "\n".join(table_lines([head, *rows, total], left={1}))
    return f"{title}{counted(profile.microbatch_size, 'sample')}\n{table}{_beside(profile)}"


def _sent_bytes(layer: LayerProfile) -> float:
    return layer.cut_bytes if layer.wire_bytes is None else layer.wire_bytes


def _beside(profile: Profile) -> str:
    """The use of the device's memory that belongs to no layer, if there is any."""
    notes = []
    if profile.library_bytes:
        notes.append(f"libraries keep {bytes_text(profile.library_bytes)} beside it on every rank")
    if profile.fragmentation > 1:
        notes.append(f"the allocator had reserved {profile.fragmentation:.2f} times what was in use at the peak")
    return f"\n{'; '.join(notes)}" if notes else ""


def _summed(
    layers: "Sequence[LayerProfile]", name: str, number: "Callable[[LayerProfile], float]", text: Callable[[float], str]
) -> "tuple[str, Callable[[LayerProfile], str], str]":
    """A column: its name, its cell for a layer, its sum."""
    return name, lambda layer: text(number(layer)), text(sum(map(number, layers)))


def describe_plan(plan: Plan) -> str:
    """The plan and the picture of its schedule."""
    from penstock.rendering import render

    return f"{plan}\n\n{render(schedule(plan))}"


def describe_cluster(cluster: Cluster) -> str:
    """Devices, memory, and links."""
    memory = "no memory limit" if cluster.memory_bytes is None else f"{bytes_text(cluster.memory_bytes)} each"
    lines = [f"cluster: {counted(cluster.devices, 'device')}, {memory}"]
    first = 0
    for kind, same in groupby(cluster.kinds):
        count = len(list(same))
        lines.append(f"  {ranks_text(range(first, first + count))}: {_kind(kind)}")
        first += count
    match cluster.links:
        case LinkLevels(levels, latencies):
            joined = "devices"
            for (count, bandwidth), latency in zip(levels, latencies, strict=True):
                after = f", {seconds_text(latency)} latency" if latency else ""
                lines.append(f"  {count} {joined} at {bandwidth_text(bandwidth)}{after}")
                joined = "of these"
        case LinkMatrix(rows, latencies):
            late = any(cluster.latency(a, b) for a in range(len(rows)) for b in range(len(rows)))
            lines.append(_matrix("bandwidth" if late else "", rows, bandwidth_text))
            lines += [_matrix("latency", latencies, seconds_text)] if late else []
        case _:
            assert_never(cluster.links)
    return "\n".join([*lines, *_costs(cluster)])


def _costs(cluster: Cluster) -> list[str]:
    """What offloads, messages and actions take; of messages the link where they take most."""
    lines = []
    if cluster.host_bandwidth is not None:
        lines.append(f"  offloads pass at {bandwidth_text(cluster.host_bandwidth)} each way")
    if cluster.has_message_costs:
        ranks = range(cluster.devices)
        costs = [cluster.message_costs(a, b) for a in ranks for b in ranks if a != b]
        each, byte = max(cost.seconds for cost in costs), max(cost.seconds_per_byte for cost in costs)
        parts = f"{seconds_text(each)}, {1e9 * byte:.3g} ns a byte and {max(cost.blocking for cost in costs):.0%}"
        lines.append(f"  a message takes up to {parts} of its time on the link of each of its two ranks")
    for what, seconds, beyond in (
        ("an action", cluster.action_seconds, "its layers"),
        ("a step", cluster.step_seconds, "its actions"),
    ):
        lines += [f"  {what} takes {seconds_text(seconds)} beyond {beyond}"] if seconds else []
    return lines


def _kind(kind: DeviceKind) -> str:
    parts = [visible(kind.name) or "no name"]
    parts += [f"{kind.speed:.3g} times as fast as its profile"] if kind.speed != 1 else []
    parts += [bytes_text(kind.memory_bytes)] if kind.memory_bytes is not None else []
    parts += [f"{kind.price_per_hour:.4g} an hour each"] if kind.price_per_hour else []
    return ", ".join(parts)


def _matrix(title: str, rows: Sequence[Sequence[float]], text: Callable[[float], str]) -> str:
    """A row for every sender, a column for every receiver."""
    head = (title, *(f"to {b}" for b in range(len(rows))))
    body = [
        (f"from {a}", *("-" if a == b else text(value) for b, value in enumerate(row))) for a, row in enumerate(rows)
    ]
    return "\n".join(table_lines([head, *body], left={0}))
