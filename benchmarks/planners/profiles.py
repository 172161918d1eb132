"""The profiles that `planning.py` and `planning_papers.py` plan: those of PipeDream, dnn-partitioning and Piper.

The first lie in tests/data; the others are read where `--data` names a folder that has them
(msr-fiddle/dnn-partitioning at b207b6a, msr-fiddle/piper at d7fc8cf). Every graph becomes a chain by the rule of
`penstock.values.graphs`.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from penstock.values.graphs import Graph, Operator, Tensor, linearize
from penstock.values.profiles import LayerProfile, Profile

ROOT = Path(__file__).parents[2]
MILLISECOND = 1e-3
LONGEST_SAMPLE = 10.0
"""Seconds; a file with a longer one counts in milliseconds."""
GNMT_SAMPLES = 64
"""Of PipeDream's file, which does not tell; from the bytes of its inputs."""


def load_profiles(data: Path | None, names: list[str]) -> dict[str, Profile]:
    """The profiles of the repository and of the folder `data`; all, or those named."""
    readers: dict[str, tuple[Any, Path]] = {}
    for path in sorted((ROOT / "tests" / "data" / "pipedream").glob("*/graph.txt")):
        readers[path.parent.name] = (read_pipedream, path)
    if data is not None:
        for path in sorted((data / "dnn-partitioning" / "throughput-inputs").glob("*/*_training.json")):
            readers[f"dnn/{path.stem.removesuffix('_training')}"] = (read_dnn_partitioning, path)
        for path in sorted((data / "piper").glob("*.json")):
            readers[f"piper/{path.stem}"] = (read_piper, path)
    unknown = sorted(set(names) - readers.keys())
    if unknown:
        raise SystemExit(f"no profile {', '.join(unknown)}: expected some of {', '.join(readers)}")
    return {name: read(path) for name, (read, path) in readers.items() if not names or name in names}


def join(profile: Profile, count: int) -> Profile:
    """`profile` with its layers joined to `count`, as equal in seconds as they come."""
    groups: list[list[LayerProfile]] = [[] for _ in range(count)]
    past = 0.0
    for index, layer in enumerate(profile.layers):
        middle = int(count * (past + layer.seconds / 2) / profile.seconds)
        # No group stays empty: each has a layer of its own at least.
        first = next((number for number, group in enumerate(groups) if not group), count - 1)
        wanted = min(middle, first, count - 1)
        groups[max(wanted, count - (len(profile) - index))].append(layer)
        past += layer.seconds
    joined = (
        LayerProfile(
            group[0].name,
            sum(layer.forward_seconds for layer in group),
            sum(layer.backward_seconds for layer in group),
            group[-1].cut_bytes,
            sum(layer.saved_bytes for layer in group),
            sum(layer.parameter_bytes for layer in group),
        )
        for group in groups
    )
    return Profile(tuple(joined), profile.microbatch_size, profile.name)


def read_pipedream(path: Path) -> Profile:
    return Profile.from_pipedream(path, GNMT_SAMPLES if path.parent.name == "gnmt" else None)


def read_dnn_partitioning(path: Path) -> Profile:
    """A training graph: forward nodes become operators, and a backward node belongs to the first of its colour class.

    The file has milliseconds, bytes of output on the edges, and of each node the bytes of weights and output together.
    In an operator graph weights are nodes; they join the first operator that reads them. Backward nodes of no forward
    node (gradients of losses) join the last operator.
    """
    content = json.loads(path.read_text())
    forward = [node for node in content["nodes"] if not node["isBackwardNode"]]
    sizes, readers = _edges(content["edges"], "size", {node["id"] for node in forward})
    read = {reader for own in readers.values() for reader in own}
    weights: dict[int, float] = defaultdict(float)
    operators = []
    for node in forward:
        key = node["id"]
        if "OperatorGraphs" in path.parts and key not in read and node["fpgaLatency"] == 0 and key in readers:
            weights[min(readers.pop(key))] += node["size"]
        else:
            operators.append(node)
            weights[key] += max(0.0, node["size"] - sizes[key])
    owner: dict[Any, int] = {}
    for node in operators:
        owner.setdefault(node.get("colorClass"), node["id"])
    backward: dict[int, float] = defaultdict(float)
    for node in content["nodes"]:
        if node["isBackwardNode"]:
            backward[owner.get(node.get("colorClass"), operators[-1]["id"])] += node["fpgaLatency"] * MILLISECOND
    nodes = [
        _Node(str(node["name"]), key, node["fpgaLatency"] * MILLISECOND, backward[key], weights[key], sizes[key])
        for node in operators
        for key in (node["id"],)
    ]
    return _chain(path.stem, nodes, sizes, readers)


def read_piper(path: Path) -> Profile:
    """A graph without tensor parallelism and recomputation, one sample a microbatch.

    What recomputation adds to a node's time is its forward; the rest is its backward.
    """
    content = json.loads(path.read_text())
    total = sum(
        mode["timePerSample"] for node in content["nodes"] for mode in node["TMPCs"]["1"] if mode["id"] == "vanilla"
    )
    # Files are in seconds or in milliseconds and do not say which.
    unit = MILLISECOND if total > LONGEST_SAMPLE else 1.0
    sizes, readers = _edges(content["edges"], "communicationCost", {node["id"] for node in content["nodes"]})
    operators = []
    for node in content["nodes"]:
        modes = {mode["id"]: mode for mode in node["TMPCs"]["1"]}
        plain = modes["vanilla"]
        again = modes.get("activation recomp", plain)["timePerSample"] - plain["timePerSample"]
        forward = min(plain["timePerSample"], max(0.0, again))
        operators.append(
            _Node(
                str(node["name"]),
                node["id"],
                forward * unit,
                (plain["timePerSample"] - forward) * unit,
                plain["parameterSize"],
                plain["memoryUsageA"],
            )
        )
    return _chain(path.stem, operators, sizes, readers)


class _Node(tuple[str, int, float, float, float, float]):
    """Name, id in the file, forward and backward seconds, bytes of weights, bytes that a backward needs."""

    def __new__(cls, *values: Any) -> "_Node":
        return super().__new__(cls, values)


def _edges(edges: list[dict[str, Any]], size: str, kept: set[int]) -> tuple[dict[int, float], dict[int, list[int]]]:
    """The bytes of the output of every kept node, and the nodes that read it."""
    sizes: dict[int, float] = defaultdict(float)
    readers: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        if edge["sourceId"] in kept and edge["destId"] in kept:
            sizes[edge["sourceId"]] = max(sizes[edge["sourceId"]], edge[size])
            readers[edge["sourceId"]].append(edge["destId"])
    return sizes, readers


def _chain(name: str, nodes: list[_Node], sizes: dict[int, float], readers: dict[int, list[int]]) -> Profile:
    numbers = {node[1]: index for index, node in enumerate(nodes)}
    operators = tuple(Operator(text, f, b, weights, saved) for text, _, f, b, weights, saved in nodes)
    tensors = tuple(
        Tensor(numbers[key], sizes[key], tuple(sorted(numbers[reader] for reader in read)))
        for key, read in sorted(readers.items())
    )
    layers = []
    for index, crossing in linearize(Graph(operators, tensors)):
        own = operators[index]
        times = (own.forward_seconds, own.backward_seconds)
        layers.append(LayerProfile(own.name, *times, crossing, own.output_bytes, own.parameter_bytes))
    return Profile(tuple(layers), 1, name=name)
