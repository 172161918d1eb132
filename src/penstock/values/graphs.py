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
"""

from dataclasses import dataclass
from heapq import nsmallest
from typing import TypeAlias

from penstock.progress import progress_line

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
