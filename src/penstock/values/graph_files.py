"""Reads ``graph.txt``, the file that PipeDream's profiler writes for a model.

    node4 -- Embedding(32320, 1024) -- forward_compute_time=0.073, ..., activation_size=[6.0; 1.0], parameter_size=8.0
    <tab or spaces>node4 -- node5

It has one line per node, in any order, with milliseconds and bytes per minibatch, then one line per edge.

Rules of the translation:
  1. Nodes described as ``Input...`` are dropped: their time is data loading, and stages read the batch themselves.
  2. ``__getitem__(i)`` is not an operator: it stands for tensor i of its producer, and repeats that tensor's bytes.
  3. A node is an output of the model if none of its tensors is read. Unread tensors of other nodes cross no cut.
  4. An edge from a node of several tensors reads all of them.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.arguments import text_of
from penstock.errors import ProfileError
from penstock.values.documents import read_text
from penstock.values.graphs import Graph, Operator, Tensor

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_GETITEM = re.compile(r"__getitem__\((\d+)\)")
_IMAGE_BYTES = tuple(3 * side * side * 4 for side in (224, 299, 331))
"""Of the images that the models of torchvision and Cadene take, in numbers of 4 bytes."""
_MILLISECOND = 1e-3


@dataclass(frozen=True, slots=True)
class GraphFile:
    """Holds a graph, and the number of samples in the measured minibatch if the file gives it."""

    name: str
    graph: Graph
    minibatch_size: int | None


@dataclass(frozen=True, slots=True)
class _Node:
    """One line of the file, with times in seconds."""

    key: str
    text: str
    forward_seconds: float
    backward_seconds: float
    sizes: tuple[float, ...]
    parameter_bytes: float

    @property
    def dropped(self) -> bool:
        return self.text.startswith("Input")


def read_graph(path: str | Path) -> GraphFile:
    """The graph of `path`. `ProfileError` names the line that cannot be read."""
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(path, ProfileError).splitlines(), start=1):
        where = f"{path}: line {number}"
        if line[:1].isspace() and line.strip():
            edges.append(_read_edge(where, line.strip()))
        elif line.strip():
            node = _read_node(where, line)
            if node.key in nodes:
                raise ProfileError(
                    f"{where}: {node.key} stands in the file twice: expected one line per node. Remove one"
                )
            nodes[node.key] = node
    for edge in edges:
        for key in edge:
            if key not in nodes:
                raise ProfileError(
                    f"{path}: the edge {edge[0]} -- {edge[1]} names {key}, which has no line of its own: "
                    "expected a line for every node. Add it, or remove the edge"
                )
    kept = {key: nodes[key] for key in sorted(nodes, key=_natural) if not nodes[key].dropped}
    if not kept:
        raise ProfileError(f"{path}: expected one node or more beside inputs, found none: profile the model again")
    graph = _translate(kept, [edge for edge in edges if edge[0] in kept and edge[1] in kept])
    return GraphFile(Path(path).resolve().parent.name, graph, _minibatch_size(nodes.values()))


def _translate(nodes: dict[str, _Node], edges: list[tuple[str, str]]) -> Graph:
    """The graph, with operators in the order of `nodes`; a ``__getitem__`` becomes a tensor of its producer."""
    producers: dict[str, list[str]] = {key: [] for key in nodes}
    for source, target in edges:
        producers[target].append(source)
    items = {key for key, node in nodes.items() if _GETITEM.match(node.text) and len(producers[key]) == 1}
    owners = {key: _owner(key, items, producers) for key in nodes}
    numbers = {key: number for number, key in enumerate(key for key in nodes if key not in items)}

    sizes: dict[str, dict[int | str, float]] = {key: dict(enumerate(nodes[key].sizes)) for key in numbers}
    item_of: dict[str, int | str] = {}
    for key in sorted(items, key=_natural):
        match = _GETITEM.match(nodes[key].text)
        assert match is not None
        own = sizes[owners[key]]
        index, size = int(match[1]), sum(nodes[key].sizes)
        # An item of an item is a tensor of its own, and so is one that repeats no entry of its producer's list.
        item_of[key] = index if producers[key][0] not in items and own.get(index) == size else f"item {index} as {key}"
        own[item_of[key]] = size

    readers: dict[str, dict[int | str, set[int]]] = {key: {slot: set() for slot in sizes[key]} for key in numbers}
    for source, target in edges:
        if target not in items:
            slots = [item_of[source]] if source in items else range(len(nodes[source].sizes))
            for slot in slots:
                readers[owners[source]][slot].add(numbers[target])

    tensors = []
    for key, number in numbers.items():
        output = not any(readers[key].values())
        for slot, size in sizes[key].items():
            if not output or slot in range(len(nodes[key].sizes)):
                tensors.append(Tensor(number, size, tuple(sorted(readers[key][slot])), output))
    return Graph(tuple(_operator(key, nodes, owners) for key in numbers), tuple(tensors))


def _owner(key: str, items: set[str], producers: dict[str, list[str]]) -> str:
    """The operator that makes the tensors of node `key`."""
    while key in items:
        key = producers[key][0]
    return key


def _operator(key: str, nodes: dict[str, _Node], owners: dict[str, str]) -> Operator:
    """Node `key` with the costs of its items, which are zero in all known files."""
    whole = [node for other, node in nodes.items() if owners[other] == key]
    return Operator(
        name=f"{key} {nodes[key].text.split('(', 1)[0]}",
        forward_seconds=sum(node.forward_seconds for node in whole),
        backward_seconds=sum(node.backward_seconds for node in whole),
        parameter_bytes=sum(node.parameter_bytes for node in whole),
        output_bytes=sum(nodes[key].sizes),
    )


def _read_edge(where: str, line: str) -> tuple[str, str]:
    keys = line.split(" -- ")
    if len(keys) != 2:
        raise ProfileError(f"{where}: expected an edge like `node4 -- node5`, found {text_of(line)}: correct the line")
    return keys[0].strip(), keys[1].strip()


def _read_node(where: str, line: str) -> _Node:
    parts = line.split(" -- ")
    if len(parts) not in (3, 4):
        raise ProfileError(
            f"{where}: expected `node4 -- description -- forward_compute_time=0.1, ...`, found {text_of(line)}: "
            "correct the line; an edge begins with a tab or spaces"
        )
    values: dict[str, tuple[float, ...]] = {}
    for pair in parts[2].split(", "):
        name, _, text = pair.partition("=")
        values[name.strip()] = _read_numbers(f"{where}: {name.strip()}", text)
    for name in _FIELDS:
        if name not in values:
            raise ProfileError(f"{where}: {name} is missing: expected {', '.join(_FIELDS)}. Add it")
        if name != "activation_size" and len(values[name]) != 1:
            raise ProfileError(
                f"{where}: {name}: expected one number, found {len(values[name])}: only sizes can be lists"
            )
    forward, backward = (values[name][0] * _MILLISECOND for name in _FIELDS[:2])
    return _Node(
        key=parts[0].strip(),
        text=parts[1],
        forward_seconds=forward,
        backward_seconds=backward,
        sizes=values["activation_size"],
        parameter_bytes=values["parameter_size"][0],
    )


def _read_numbers(where: str, text: str) -> tuple[float, ...]:
    """``1.0`` or ``[1.0; 2.0]``; whole numbers become integers, so that sums of bytes are exact."""
    numbers = []
    for part in text.strip().removeprefix("[").removesuffix("]").split(";"):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise ProfileError(
                f"{where}: expected a number, 0 or more, or a list like [1.0; 2.0], found {text_of(text)}: correct it"
            )
        numbers.append(int(number) if number.is_integer() else number)
    return tuple(numbers)


def _minibatch_size(nodes: Iterable[_Node]) -> int | None:
    """The number of samples in the input if it consists of square images of a known size."""
    size = sum(sum(node.sizes) for node in nodes if node.dropped)
    return next((int(size // image) for image in _IMAGE_BYTES if size and size % image == 0), None)


def _natural(key: str) -> tuple[str, int]:
    """A key that sorts node9 before node10."""
    digits = re.search(r"\d*$", key)
    number = digits[0] if digits else ""
    return key.removesuffix(number), int(number or 0)
