"""The files that commands read: profiles, clusters and plans, each recognized by its first words, and sweeps."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from penstock.commands.quantities import parse_bandwidth, parse_bytes, parse_count
from penstock.errors import PlanError
from penstock.values import Cluster, DeviceKind, Profile
from penstock.values.documents import YamlNode, read_yaml
from penstock.values.quantities import bandwidth_text

_SWEEP = "penstock-sweep/1"
_OWN = ("kind", "speed", "memory_bytes", "price_per_hour", "latency_seconds")
"""What an option says of its devices and links, if it is no file."""


def declare_cluster(parser: argparse.ArgumentParser, *, devices: bool = False, memory: bool = False) -> None:
    """Adds CLUSTER and the options that describe a uniform cluster in its place."""
    parser.add_argument("cluster", metavar="CLUSTER", nargs="?", help="a cluster file (YAML)")
    group = parser.add_argument_group("instead of a cluster file")
    if devices:
        group.add_argument("--devices", type=parse_count, metavar="N", help="this many equal devices")
    group.add_argument("--bandwidth", type=parse_bandwidth, metavar="B", help="of every link: 12e9, 12GB/s, 10Gbps")
    text = "of the link between each device and its host"
    group.add_argument("--host-bandwidth", type=parse_bandwidth, metavar="B", help=text)
    if memory:
        group.add_argument("--memory", type=parse_bytes, metavar="M", help="of each device: 16e9, 16GB, 16GiB")


def read_cluster(
    path: str | None,
    devices: int | None,
    bandwidth: float | None,
    host_bandwidth: float | None,
    memory_bytes: float | None = None,
) -> Cluster:
    """The cluster file at `path`, or else a uniform cluster; links are instant where no bandwidth is given.

    Raises `PlanError` where both are given, or neither.
    """
    options = {"--devices": devices, "--bandwidth": bandwidth}
    options |= {"--host-bandwidth": host_bandwidth, "--memory": memory_bytes}
    if path is not None:
        if extra := [name for name, value in options.items() if value is not None]:
            raise PlanError(f"cluster: {path} and {', '.join(extra)} were given: expected one of them; drop the other")
        return Cluster.load(path)
    if devices is None:
        raise PlanError("cluster: none was given: expected a cluster file, or --devices N --bandwidth B")
    uniform = Cluster.uniform(devices, math.inf if bandwidth is None else bandwidth, memory_bytes)
    return replace(uniform, host_bandwidth=host_bandwidth)


def declare_samples(parser: argparse.ArgumentParser) -> None:
    """Adds the option for a graph.txt, which says nothing of its minibatch."""
    text = "samples of the minibatch that a graph.txt was measured with (default: by the size of its images, else 1)"
    parser.add_argument("--graph-samples", type=parse_count, metavar="N", help=text)


def declare_wire_share(parser: argparse.ArgumentParser) -> None:
    """Adds the option for a pipeline that is to have a ``wire_dtype=``."""
    text = "links carry this share of what crosses cuts: 0.5 for bfloat16 and float32 (default: the profile's)"
    parser.add_argument("--wire-share", type=float, metavar="X", help=text)


def load_profile(path: str, wire_share: float | None = None, graph_samples: int | None = None) -> Profile:
    """A profile file; a name that ends in ``.txt`` is read as the graph of PipeDream's profiler. `wire_share`: of what
    crosses cuts, for `Profile.with_wire_share`. `graph_samples`: of the minibatch of such a graph.
    """
    graph = Path(path).suffix == ".txt"
    if graph_samples is not None and not graph:
        raise PlanError(
            f"--graph-samples and {path}: expected PipeDream's graph.txt, found a profile, which says its "
            "microbatch size: drop the option"
        )
    profile = Profile.from_pipedream(path, graph_samples) if graph else Profile.load(path)
    return profile if wire_share is None else profile.with_wire_share(wire_share)


def load_sweep(path: str | Path) -> dict[str, Cluster]:
    """The clusters of the file, by name. `PlanError` names the file, the field and the fix.

    An option is the file of a cluster, or the number of equal devices and their link. A list of bandwidths or of
    numbers of devices stands for one option each, and two lists for all pairs.
    """
    place = read_yaml(path, PlanError)
    place.check_format(_SWEEP)
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
