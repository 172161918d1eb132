r"""A model as a graph of operators, and the chain that is made from it.

Stages hold consecutive layers, so a graph with branches must become a chain. The prefixes of such a chain are down-sets
of the graph: with every operator they contain all that it depends on. Each is determined by its maximal operators,
which form an antichain, the state of PipeDream's optimizer. A down-set is a possible cut. The tensors that are made
inside and read outside cross it, each once.

There are many such chains. We choose an order of the operators whose cuts have the smallest total of crossing bytes. It
is a shortest path through the down-sets, from the empty one to the whole graph, which adds one operator at a time:

        b          {} -> {a} -> {a,b} -> {a,b,c} -> {a,b,c,d}
      /   \                  \                  /
    a       d                 -> {a,c} ---------
      \   /
        c          the cut {a} is crossed by a's output once, although b and c both read it

``graph.txt`` is the file that PipeDream's profiler writes for a model:

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
from heapq import nsmallest
from pathlib import Path
from typing import TypeAlias

from penstock.arguments import text_of
from penstock.errors import ProfileError
from penstock.progress import progress_line
from penstock.values.documents import read_text
from penstock.values.quantities import MOST

_WIDTH = 4096
"""The most down-sets of one size that the search keeps. It is exact up to this width, and a beam search beyond."""

_NARROW = 32
"""The fewest, however large the graph is."""

_EFFORT = 4_000_000
"""How many choices of a next operator are examined, in about ten seconds, before the search keeps fewer down-sets."""

_MOST = 40_000_000
"""How many are too many."""

_State: TypeAlias = tuple[float, float, int]
"""Of a down-set: the total of the crossing bytes so far, those of the cut after it, and the operators that may come
next."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of the graph."""

    name: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    output_bytes: float
    """The bytes of all tensors that it makes, read or not."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that operator `producer` makes and the operators `readers` read (indices into `Graph.operators`)."""

    producer: int
    bytes: float
    readers: tuple[int, ...]
    output: bool = False
    """Whether it is an output of the model, which crosses every later cut."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Holds operators and the tensors between them; it must not have cycles."""

    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...]

    def predecessors(self) -> list[int]:
        """A bit mask per operator: the operators whose tensors it reads."""
        masks = [0] * len(self.operators)
        for tensor in self.tensors:
            for reader in tensor.readers:
                masks[reader] |= 1 << tensor.producer
        return masks

    def crossing_bytes(self, inside: int) -> float:
        """The bytes that cross the cut after the down-set `inside` (a bit mask); each tensor counts once."""
        return sum(
            tensor.bytes
            for tensor in self.tensors
            if inside >> tensor.producer & 1
            and (tensor.output or any(not inside >> reader & 1 for reader in tensor.readers))
        )


def linearize(graph: Graph, most_choices: int = _MOST) -> tuple[tuple[int, float], ...]:
    """The operators in the order of the chain, each with the bytes that cross the cut after it.

    The order has the smallest total of crossing bytes. Among equal orders it is the first that the search finds, which
    tries the operators by index. The model's output crosses the cut after the last operator. In graphs of many parallel
    branches the search keeps only the best of the down-sets of one size, fewer in larger graphs, so that it takes
    seconds. Raises ValueError if the graph has a cycle, or if more than `most_choices` of a next operator have to be
    examined.
    """
    lattice = _Lattice.of(graph)
    count, spent = len(graph.operators), 0
    level: dict[int, _State] = {0: (0.0, 0.0, lattice.first)}
    came_from: list[dict[int, int]] = []
    for size in progress_line(range(count), lambda size: f"operator {size}", "ordering the graph"):
        totals, steps, examined = lattice.grow(level)
        spent += examined
        if not totals:
            raise ValueError("the graph has a cycle")
        if spent > most_choices:
            raise ValueError(
                f"the graph of {count} operators is too wide to be made a chain: expected at most {most_choices:.0e} "
                f"choices of a next operator, found more after {size} operators: join operators that belong together"
            )
        # What each kept down-set costs, as seen so far, and how many of these the remaining effort allows.
        each = max(1.0, examined / len(level))
        width = int(max(_NARROW, min(_WIDTH, (_EFFORT - spent) / (each * (count - size)))))
        if len(totals) > width:
            totals = dict(nsmallest(width, totals.items(), key=lambda item: item[1][0]))
            steps = {inside: steps[inside] for inside in totals}
        level = totals
        came_from.append(steps)
    order: list[tuple[int, float]] = []
    inside = (1 << count) - 1
    for steps in reversed(came_from):
        order.append((steps[inside], graph.crossing_bytes(inside)))
        inside ^= 1 << steps[inside]
    return tuple(reversed(order))


@dataclass(frozen=True, slots=True)
class _Lattice:
    """The down-sets of a graph, and what it takes to add an operator to one; sets are bit masks."""

    first: int
    """The operators that read nothing."""
    made_bytes: tuple[float, ...]
    """By operator: the bytes that begin to cross when it is added."""
    read: tuple[tuple[tuple[int, float], ...], ...]
    """By operator: the readers and the bytes of the tensors that it reads, which cross no more if all readers are
    inside."""
    successors: tuple[tuple[tuple[int, int], ...], ...]
    """By operator: those that read its tensors, each with all that it depends on directly."""

    @classmethod
    def of(cls, graph: Graph) -> "_Lattice":
        count = len(graph.operators)
        predecessors = graph.predecessors()
        made = [0.0] * count
        read: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        behind: list[dict[int, int]] = [{} for _ in range(count)]
        for tensor in graph.tensors:
            if tensor.readers or tensor.output:
                made[tensor.producer] += tensor.bytes
            readers = sum(1 << reader for reader in set(tensor.readers))
            for reader in set(tensor.readers):
                behind[tensor.producer][reader] = predecessors[reader]
                if not tensor.output:
                    read[reader].append((readers, tensor.bytes))
        return cls(
            sum(1 << operator for operator, mask in enumerate(predecessors) if not mask),
            tuple(made),
            tuple(map(tuple, read)),
            tuple(tuple((1 << reader, mask) for reader, mask in sorted(own.items())) for own in behind),
        )

    def grow(self, level: dict[int, _State]) -> tuple[dict[int, _State], dict[int, int], int]:
        """The down-sets with one operator more, the operator that each adds, and how many choices were examined."""
        grown_level: dict[int, _State] = {}
        steps: dict[int, int] = {}
        examined = 0
        for inside, (total, crossing, ready) in level.items():
            rest = ready
            while rest:
                bit = rest & -rest
                rest ^= bit
                examined += 1
                operator = bit.bit_length() - 1
                grown = inside | bit
                outside = ~grown
                bytes_ = crossing + self.made_bytes[operator]
                for readers, size in self.read[operator]:
                    if not readers & outside:
                        bytes_ -= size
                known = grown_level.get(grown)
                if known is None:
                    following = ready ^ bit
                    for successor, needed in self.successors[operator]:
                        if not needed & outside:
                            following |= successor
                    grown_level[grown] = total + bytes_, bytes_, following
                    steps[grown] = operator
                elif total + bytes_ < known[0]:
                    grown_level[grown] = total + bytes_, *known[1:]
                    steps[grown] = operator
        return grown_level, steps, examined


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
    text = read_text(path, ProfileError, "a graph of PipeDream's profiler")
    for number, line in enumerate(text.splitlines(), start=1):
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
        if not 0 <= number <= MOST:
            raise ProfileError(
                f"{where}: expected a number from 0 to {MOST}, or a list like [1.0; 2.0], found "
                f"{text_of(text)}: correct it"
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
