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

__all__ = ["Graph", "Operator", "Tensor", "linearize"]

_WIDTH = 4096
"""How many down-sets of one size the search keeps. It is exact up to this width, and a beam search for wider graphs."""


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


def linearize(graph: Graph) -> tuple[tuple[int, float], ...]:
    """The operators in the order of the chain, each with the bytes that cross the cut after it.

    The order has the smallest total of crossing bytes. Among equal orders it is the first that the search finds, which
    tries the operators by index. The model's output crosses the cut after the last operator. Raises ValueError if the
    graph has a cycle.
    """
    predecessors = graph.predecessors()
    crossing: dict[int, float] = {0: 0}
    level: dict[int, float] = {0: 0}
    came_from: list[dict[int, int]] = []
    for _ in graph.operators:
        totals: dict[int, float] = {}
        steps: dict[int, int] = {}
        for inside, total in level.items():
            for operator in _ready(inside, predecessors):
                grown = inside | 1 << operator
                if grown not in crossing:
                    crossing[grown] = graph.crossing_bytes(grown)
                if grown not in totals or total + crossing[grown] < totals[grown]:
                    totals[grown], steps[grown] = total + crossing[grown], operator
        if not totals:
            raise ValueError("the graph has a cycle")
        level = totals if len(totals) <= _WIDTH else dict(nsmallest(_WIDTH, totals.items(), key=lambda item: item[1]))
        came_from.append(steps)
    order: list[tuple[int, float]] = []
    inside = (1 << len(graph.operators)) - 1
    for steps in reversed(came_from):
        order.append((steps[inside], crossing[inside]))
        inside ^= 1 << steps[inside]
    return tuple(reversed(order))


def _ready(inside: int, predecessors: list[int]) -> list[int]:
    """The operators outside `inside` whose predecessors are all inside."""
    return [operator for operator, mask in enumerate(predecessors) if not inside >> operator & 1 and not mask & ~inside]
