"""A backward split into input backward and weight backward (B and W of [ZeroBubble 2024]).

Other stages wait for the gradients of inputs, but not for those of weights. The input backward is one run of autograd.
It is asked for the gradients of what the stage received and, on the way, for those of the results of operators that
have weights; it computes nothing else. The weight backward computes the gradients of these weights from what the
operators read and the gradients of their results, by autograd's own formulas. Autograd then takes them through what
lies between an operator and its weights (transposes, casts), and adds them to the weights' ``.grad``.

A weight is *deferred* if every path to it leads through such an operator. All other leaves (the weights of norms and of
recurrent layers, for example, or one that is used in two ways) get their gradients in the input backward, so that
autograd sums them in its own order; the weight backward adds these to ``.grad``.

Each input backward walks over the graph once, which takes about half a microsecond for each node.

Laws of this file:
  1. Both halves together have the bits of one backward, and no gradient is computed twice.
  2. It depends on no module and no parameter: autograd's graph alone decides which weights are deferred.
  3. Between the halves it holds what the operators read and the gradients of their results, and no graph.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.runtime.execution.weight_gradients import OPERATORS
from penstock.torch_internals.autograd import node_kinds, sequence_number
from penstock.torch_internals.tensors import accumulated_hooks, gradient_hooks

Node: TypeAlias = Any
"""A node of autograd's graph. PyTorch's type for it does not declare what is saved there."""

GROUP_BYTES = 2**22
"""Weight gradients are added to those of earlier microbatches in groups of about this many bytes."""

(_LEAF,) = node_kinds("AccumulateGrad")
(_TRANSPOSED,) = node_kinds("TBackward0")
_MOVES = frozenset(
    node_kinds(
        *("TBackward0", "TransposeBackward0", "TransposeBackward1", "PermuteBackward0", "ViewBackward0"),
        *("UnsafeViewBackward0", "AliasBackward0", "CloneBackward0", "ToCopyBackward0", "SplitBackward0"),
        *("SplitWithSizesBackward0", "UnbindBackward0", "SliceBackward0", "SelectBackward0", "UnsqueezeBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
    )
)
"""The nodes that may lie between an operator and its weights: they move or cast elements, and compute nothing else."""


class _WeightUse(NamedTuple):
    """Describes an argument of an operator that is a weight, possibly moved or cast."""

    slot: int
    entry: GradientEdge
    """The edge that takes its gradient."""
    path: tuple[Node, ...]
    """The nodes from there to the leaf."""

    @property
    def leaf(self) -> Tensor:
        leaf: Tensor = self.path[-1].variable
        return leaf


class _Deferred(NamedTuple):
    compute: Callable[[], Sequence[Tensor]]
    uses: Sequence[_WeightUse]
    exclusive: bool
    """Whether no other operator has gradients for the same weights."""


class WeightBackward:
    """Holds what an input backward leaves: the `deferred` gradients, which are to be computed, and those `made` for
    other leaves, which are to be added to ``.grad``.
    """

    __slots__ = ("_deferred", "_made")

    def __init__(self, deferred: Sequence[_Deferred], made: Sequence[tuple[Tensor, Tensor]]) -> None:
        # The last one runs first. Those of shared weights are at the end, and are summed in one run of autograd.
        self._deferred = sorted(deferred, key=lambda work: not work.exclusive)
        self._made = tuple(made)

    def run(self) -> None:
        """Adds the gradients of the weights to their ``.grad``, and frees what it held. Once."""
        accumulation = _GradientAccumulation()
        with torch.no_grad():
            for leaf, gradient in self._made:
                if gradient_hooks(leaf):
                    # They have been run when autograd made the gradient.
                    _add(leaf, gradient)
                    for hook in accumulated_hooks(leaf):
                        hook(leaf)
                else:
                    accumulation.accumulate(leaf, gradient)
            self._made = ()
            while self._deferred:
                if self._deferred[-1].exclusive:
                    accumulation.flush(GROUP_BYTES)
                work = self._deferred.pop()
                for use, gradient in zip(work.uses, work.compute(), strict=True):
                    if work.exclusive and len(use.path) == 1:
                        accumulation.accumulate(use.leaf, gradient)
                    elif work.exclusive and len(use.path) == 2 and type(use.path[0]) is _TRANSPOSED:
                        accumulation.accumulate(use.leaf, gradient.t())
                    else:
                        accumulation.queue(use.entry, gradient)
            accumulation.flush()


class _GradientAccumulation:
    """Adds gradients to leaves: directly where that is enough, else through autograd, in groups."""

    __slots__ = ("_gradients", "_roots", "_size")

    def __init__(self) -> None:
        self._roots: list[Tensor | GradientEdge] = []
        self._gradients: list[Tensor] = []
        self._size = 0

    def accumulate(self, leaf: Tensor, gradient: Tensor) -> None:
        """Adds `gradient` to ``leaf.grad`` as autograd would, which takes six times as long."""
        own = leaf.grad
        hooked = gradient_hooks(leaf) or accumulated_hooks(leaf)
        if hooked or gradient.layout is not torch.strided or gradient.dtype is not leaf.grad_dtype:
            self.queue(leaf, gradient)
        elif own is None or own.layout is torch.strided:
            _add(leaf, gradient)
        else:
            self.queue(leaf, gradient)

    def queue(self, root: Tensor | GradientEdge, gradient: Tensor) -> None:
        """Leaves `gradient` to the next `flush`."""
        self._roots.append(root)
        self._gradients.append(gradient)
        self._size += gradient.numel() * gradient.element_size()

    def flush(self, least_bytes: int = 0) -> None:
        """Has autograd take the queued gradients, if they have at least `least_bytes`."""
        if self._roots and self._size >= least_bytes:
            torch.autograd.backward(self._roots, self._gradients)  # type: ignore[arg-type]
            self._roots, self._gradients, self._size = [], [], 0


def _add(leaf: Tensor, gradient: Tensor) -> None:
    """Adds `gradient` to that of `leaf`, without the hooks."""
    if leaf.grad is None:
        # A copy that is laid out like the leaf: other tensors may share the memory of this gradient.
        leaf.grad = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
    else:
        leaf.grad.add_(gradient)


def run_input_backward(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], received: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
    """Runs the input backward from `roots`, the edges of outputs, and the `gradients` there. Returns the gradients of
    `received`, which are leaves (None where no output depends on one), and the weight backward that is left. The graph
    is freed.
    """
    leaves = [leaf for leaf in received if leaf.requires_grad]
    operators, others = _find_deferrable(roots, {id(leaf) for leaf in leaves})
    wanted = [*leaves, *others, *(GradientEdge(operator.node, 0) for operator in operators)]
    if not wanted or not roots:
        return (None,) * len(received), WeightBackward((), ())
    # Read before the run of autograd, which frees what it saved.
    formulas = [OPERATORS[type(operator.node)].read(operator.node, operator.slots) for operator in operators]
    boxes = [operator.catch() for operator in operators]
    found = torch.autograd.grad(roots, wanted, gradients, allow_unused=True)  # type: ignore[arg-type]
    deferred = []
    ends = found[len(leaves) + len(others) :]
    for operator, formula, box, end in zip(operators, formulas, boxes, ends, strict=True):
        caught = box[0][0] if box else end
        if caught is not None:
            deferred.append(_Deferred(partial(formula, caught), operator.uses, operator.exclusive))
    made = zip(others, found[len(leaves) :], strict=False)
    pending = WeightBackward(deferred, [(leaf, gradient) for leaf, gradient in made if gradient is not None])
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=False)}
    return tuple(by_leaf.get(id(leaf)) for leaf in received), pending


@dataclass(slots=True, eq=False)
class _OperatorNode:
    node: Node
    uses: list[_WeightUse]
    exclusive: bool = True
    """Whether no other edges lead to these weights."""

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(use.slot for use in self.uses)

    def catch(self) -> list[tuple[Tensor | None]]:
        """Returns a list that will hold the gradient of its result if the node runs. The gradient that autograd itself
        returns for a node has not passed the user's hooks on the result if the node runs, and has if it does not.
        """
        box: list[tuple[Tensor | None]] = []
        self.node.register_prehook(box.append)
        return box


def _find_deferrable(
    roots: Sequence[GradientEdge], received: Collection[int]
) -> tuple[list[_OperatorNode], list[Tensor]]:
    """Finds the operators behind `roots` whose weights are deferred, in the order of their forwards, and the leaves
    that are not deferred. `received`: the ids of leaves to leave out.
    """
    edges, operators, leaves = _walk_graph(roots)
    left = {leaf: leaf.variable for leaf in leaves}
    left = {leaf: variable for leaf, variable in left.items() if id(variable) not in received}
    shared = []
    for operator in operators:
        operator.uses = [use for use in operator.uses if use.path[-1] in left]
        operator.exclusive = all(edges[node] == 1 for use in operator.uses for node in use.path)
        if not operator.exclusive:
            shared.append(operator)
    if shared:
        wrong = _find_out_of_order(shared, edges)
        for operator in shared:
            operator.uses = [use for use in operator.uses if use.path[-1] not in wrong]
    operators = [operator for operator in operators if operator.uses]
    if shared:
        operators.sort(key=lambda operator: sequence_number(operator.node))
    for operator in operators:
        for use in operator.uses:
            left.pop(use.path[-1], None)
    return operators, list(left.values())


def _find_out_of_order(operators: Sequence[_OperatorNode], edges: Mapping[Node, int]) -> set[Node]:
    """The leaves whose gradients a weight backward could not sum in the order of a whole backward."""
    # The number of edges that end at a node and come from operators, and from moves between them and a leaf.
    direct = Counter(use.path[0] for operator in operators for use in operator.uses)
    moves = {pair for operator in operators for use in operator.uses for pair in pairwise(use.path)}
    between = Counter(end for _, end in moves)
    return {
        use.path[-1]
        for operator in operators
        for use in operator.uses
        if not all(_is_in_order(direct[node], between[node], edges[node]) for node in use.path)
    }


def _is_in_order(direct: int, between: int, edges: int) -> bool:
    """Whether a node at which `edges` end gets its gradients in the weight backward only, and sums them in the order of
    a whole backward. Gradients of operators are added before those of moves, which matters from three on.
    """
    return direct + between == edges and (edges <= 2 or not direct or not between)


def _walk_graph(roots: Sequence[GradientEdge]) -> tuple[dict[Node, int], list[_OperatorNode], list[Node]]:
    """Every node behind `roots` with the number of edges that end at it; the operators, with all arguments that may
    be weights; and the leaves.
    """
    edges: dict[Node, int] = dict.fromkeys((root.node for root in roots), 0)
    found, leaves, stack = [], [], list(edges)
    for root in roots:
        edges[root.node] += 1
    while stack:
        node = stack.pop()
        following = node.next_functions
        for end, _ in following:
            if end in edges:
                edges[end] += 1
            elif end is not None:
                edges[end] = 1
                stack.append(end)
        kind = type(node)
        if kind is _LEAF:
            leaves.append(node)
        elif kind in OPERATORS:
            found.append((node, following))
    operators = []
    for node, following in found:
        known = OPERATORS[type(node)]
        uses = [use for slot in known.slots if (use := _trace_weight(following, slot))]
        if uses and known.accepts(node):
            operators.append(_OperatorNode(node, uses))
    return edges, operators, leaves


def _trace_weight(following: Sequence[tuple[Node, int]], slot: int) -> _WeightUse | None:
    """The argument `slot` of an operator with the edges `following`, if only moves and casts lead from it to a leaf."""
    node, number = following[slot]
    path: list[Node] = []
    while node is not None:
        path.append(node)
        kind = type(node)
        if kind is _LEAF:
            return _WeightUse(slot, GradientEdge(path[0], number), tuple(path))
        if kind not in _MOVES:
            return None
        ((node, _),) = node.next_functions
    return None
