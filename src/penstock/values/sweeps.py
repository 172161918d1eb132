"""Files of cluster options: which clusters to compare, in a few lines.

An option is the file of a cluster, or the number of equal devices and their link. A list of bandwidths or of numbers
of devices stands for one option each, and two lists for all pairs.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from penstock.errors import PlanError
from penstock.values.clusters import Cluster
from penstock.values.device_kinds import DeviceKind
from penstock.values.documents import YamlNode, read_yaml
from penstock.values.quantities import bandwidth_text

_FORMAT = "penstock-sweep/1"
_OWN = ("kind", "speed", "memory_bytes", "price_per_hour", "latency_seconds")


def load_sweep(path: str | Path) -> dict[str, Cluster]:
    """The clusters of the file, by name. `PlanError` names the file, the field and the fix."""
    place = read_yaml(path, PlanError)
    place.check_format(_FORMAT)
    options = place.mapping(("format", "clusters"))["clusters"]
    found: dict[str, Cluster] = {}
    for row in options.items():
        for name, cluster in _read_option(row, Path(path).parent):
            if name in found:
                row.fail(f"an option with a name of its own, not {name!r} again", "give it another name")
            found[name] = cluster
    if not found:
        options.fail("one cluster or more", "list them")
    return found


def _read_option(row: YamlNode, directory: Path) -> Iterator[tuple[str, Cluster]]:
    if isinstance(row.value, dict) and "file" in row.value:
        places = row.mapping(("file",), ("name",))
        file = places["file"].text()
        yield places["name"].text() if "name" in places else Path(file).stem, Cluster.load(directory / file)
        return
    places = row.mapping(("devices", "bytes_per_second"), ("name", *_OWN))
    title = places["name"].text() if "name" in places else ""
    kind = places["kind"].text() if "kind" in places else ""
    numbers = {name: places[name].number() for name in _OWN[1:] if name in places}
    latency = numbers.pop("latency_seconds", 0.0)
    device = row.build(lambda: DeviceKind(kind, **numbers))
    counts, speeds = _one_or_more(places["devices"]), _one_or_more(places["bytes_per_second"])
    for count, speed in product(counts, speeds):
        devices, bandwidth = count.integer(), speed.number()
        parts = [title or f"{devices} x {kind or 'device'}"]
        parts += [f"{devices} devices"] if title and len(counts) > 1 else []
        parts += [bandwidth_text(bandwidth)] if len(speeds) > 1 or not title else []
        cluster = row.build(lambda: Cluster.uniform(devices, bandwidth, latency_seconds=latency))  # noqa: B023
        yield ", ".join(parts), cluster.with_kinds(device)


def _one_or_more(node: YamlNode) -> tuple[YamlNode, ...]:
    return node.items() if isinstance(node.value, list) else (node,)
