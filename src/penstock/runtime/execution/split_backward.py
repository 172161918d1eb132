"""A backward in two parts: the gradients that other stages wait for, and those of weights, which nobody waits for.

The input part is one run of autograd, which is asked for the gradients of what was received and, on the way, for those
of the results of operators that have weights. What it is not asked for it does not compute. The weight part computes
the gradients of these weights from what was caught, by autograd's own formulas, and hands them to autograd where they
enter what lies between an operator and its weights (transposes, casts), down to the weights' ``.grad``.

A weight is *deferred* if every path to it is through such an operator. All other leaves (the weights of norms and of
recurrent layers, say, or one that is used in two ways) get their gradients in the input part, whole, so that autograd
sums them up in its own order; they wait for the weight part to be added.

What must be known of the graph takes one walk over it in each input part: about half a microsecond for each node.

Laws of this file:
  1. The sum of both parts has the bits of one backward, and no gradient is computed twice.
  2. It knows no module and no parameter: what can be deferred is read off autograd's graph alone.
  3. Between the parts it holds what the operators read and the gradients of their results, and no graph.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.runtime.execution.weight_gradients import OPERATORS, kinds_of

__all__ = ["WeightBackward", "go_backward_to_inputs"]

Node: TypeAlias = Any
"""A node of autograd's graph. PyTorch's type for it does not know what is saved there."""

GROUP_BYTES = 2**22
"""About so many bytes of gradients of weights are there before they are added to those of earlier microbatches."""

(_LEAF,) = kinds_of("AccumulateGrad")
(_TRANSPOSED,) = kinds_of("TBackward0")
_MOVES = frozenset(
    kinds_of(
        *("TBackward0", "TransposeBackward0", "TransposeBackward1", "PermuteBackward0", "ViewBackward0"),
        *("UnsafeViewBackward0", "AliasBackward0", "CloneBackward0", "ToCopyBackward0", "SplitBackward0"),
        *("SplitWithSizesBackward0", "UnbindBackward0", "SliceBackward0", "SelectBackward0", "UnsqueezeBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
    )
)
"""What may lie between an operator and its weights: what moves or casts elements, and computes nothing else."""


class _Claim(NamedTuple):
    """An argument of an operator that is a weight, or what one was moved or cast to."""

    slot: int
    entry: GradientEdge
    """Where its gradient enters."""
    path: tuple[Node, ...]
    """From there to the leaf."""

    @property
    def leaf(self) -> Tensor:
        leaf: Tensor = self.path[-1].variable
        return leaf


class _Deferred(NamedTuple):
    """The weights of one operator."""

    compute: Callable[[], Sequence[Tensor]]
    """Their gradients."""
    claims: Sequence[_Claim]
    alone: bool
    """Whether no other gradients go to the same weights."""


class WeightBackward:
    """What an input part leaves to do: `deferred`, and the leaves in `made` with gradients that are to be added."""

    __slots__ = ("_deferred", "_made")

    def __init__(self, deferred: Sequence[_Deferred], made: Sequence[tuple[Tensor, Tensor]]) -> None:
        # The last one comes first. Where operators share a weight their gradients are summed up in one run of autograd.
        self._deferred = sorted(deferred, key=lambda work: not work.alone)
        self._made = tuple(made)

    def run(self, hooked: bool = False) -> None:
        """Adds the gradients of the weights to their ``.grad``, and lets go of all that it held. Once.

        `hooked`: whether the weights have hooks that are to run when their gradients are added.
        """
        entering = _Entering(hooked)
        with torch.no_grad():
            for leaf, gradient in self._made:
                if leaf._backward_hooks:
                    # They have been run when autograd made the gradient.
                    _accumulate(leaf, gradient)
                else:
                    entering.add_to(leaf, gradient)
            self._made = ()
            while self._deferred:
                if self._deferred[-1].alone:
                    entering.leave(GROUP_BYTES)
                work = self._deferred.pop()
                for claim, gradient in zip(work.claims, work.compute(), strict=True):
                    if work.alone and len(claim.path) == 1:
                        entering.add_to(claim.leaf, gradient)
                    elif work.alone and len(claim.path) == 2 and type(claim.path[0]) is _TRANSPOSED:
                        entering.add_to(claim.leaf, gradient.t())
                    else:
                        entering.enter(claim.entry, gradient)
            entering.leave()


class _Entering:
    """Gradients on their way to leaves: those that autograd has to bring there, in groups."""

    __slots__ = ("_gradients", "_hooked", "_roots", "_size")

    def __init__(self, hooked: bool) -> None:
        self._hooked = hooked
        self._roots: list[Tensor | GradientEdge] = []
        self._gradients: list[Tensor] = []
        self._size = 0

    def add_to(self, leaf: Tensor, gradient: Tensor) -> None:
        """Does what autograd does for a gradient that is a leaf's only one; it takes six times as long for it."""
        own = leaf.grad
        hooked = self._hooked or leaf._backward_hooks or leaf._post_accumulate_grad_hooks
        if hooked or gradient.layout is not torch.strided or gradient.dtype is not leaf.grad_dtype:
            self.enter(leaf, gradient)
        elif own is None:
            # A copy that is laid out like the leaf: others may hold this gradient.
            leaf.grad = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
        elif own.layout is torch.strided:
            own.add_(gradient)
        else:
            self.enter(leaf, gradient)

    def enter(self, root: Tensor | GradientEdge, gradient: Tensor) -> None:
        self._roots.append(root)
        self._gradients.append(gradient)
        self._size += gradient.numel() * gradient.element_size()

    def leave(self, least: int = 0) -> None:
        """Has autograd take the gradients that are there, if they have more bytes than `least`."""
        if self._roots and self._size >= least:
            torch.autograd.backward(self._roots, self._gradients)  # type: ignore[arg-type]
            self._roots, self._gradients, self._size = [], [], 0


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Adds `gradient` to that of `leaf`, and runs the hooks that are run after that."""
    if leaf.grad is None:
        leaf.grad = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
    else:
        leaf.grad.add_(gradient)
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


def go_backward_to_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], received: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
    """The input part of the backward of `outputs`, whose `gradients` are given: the gradients of `received`, which are
    leaves (None where nothing depends on one), and the weight part. The graph is used up.
    """
    leaves = [leaf for leaf in received if leaf.requires_grad]
    operators, others = _survey(outputs, {id(leaf) for leaf in leaves})
    wanted = [*leaves, *others, *(GradientEdge(operator.node, 0) for operator in operators)]
    if not wanted or not outputs:
        return (None,) * len(received), WeightBackward((), ())
    # Read before the run of autograd, which lets go of what it saved.
    formulas = [OPERATORS[type(operator.node)].read(operator.node, operator.slots) for operator in operators]
    boxes = [operator.catch() for operator in operators]
    found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)  # type: ignore[arg-type]
    deferred = []
    ends = found[len(leaves) + len(others) :]
    for operator, formula, box, end in zip(operators, formulas, boxes, ends, strict=True):
        caught = box[0][0] if box else end
        if caught is not None:
            deferred.append(_Deferred(partial(formula, caught), operator.claims, operator.alone))
    made = zip(others, found[len(leaves) :], strict=False)
    part = WeightBackward(deferred, [(leaf, gradient) for leaf, gradient in made if gradient is not None])
    by_leaf = {id(leaf): _laid_out(gradient, leaf) for leaf, gradient in zip(leaves, found, strict=False)}
    return tuple(by_leaf.get(id(leaf)) for leaf in received), part


def _laid_out(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """`gradient` as autograd would leave it in ``leaf.grad``."""
    if gradient is None or gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf, requires_grad=False).copy_(gradient)


@dataclass(slots=True, eq=False)
class _Operator:
    """A node, and its arguments that may be weights."""

    node: Node
    claims: list[_Claim]
    alone: bool = True
    """Whether no other edges lead to these weights."""

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(claim.slot for claim in self.claims)

    def catch(self) -> list[tuple[Tensor | None]]:
        """Where the gradient of its result will be if the node runs. What autograd itself returns for a node that runs
        has not been through the hooks of the user's on the result, and for one that does not run it has.
        """
        box: list[tuple[Tensor | None]] = []
        self.node.register_prehook(box.append)
        return box


def _survey(outputs: Sequence[Tensor], received: Collection[int]) -> tuple[list[_Operator], list[Tensor]]:
    """Of the graph behind `outputs`: the operators whose weights are deferred, in the order of their forwards, and the
    leaves that are not deferred. `received`: the ids of the leaves that are not asked for.
    """
    edges, operators, leaves = _walk(outputs)
    left = {leaf: leaf.variable for leaf in leaves}
    left = {leaf: variable for leaf, variable in left.items() if id(variable) not in received}
    shared = []
    for operator in operators:
        operator.claims = [claim for claim in operator.claims if claim.path[-1] in left]
        operator.alone = all(edges[node] == 1 for claim in operator.claims for node in claim.path)
        if not operator.alone:
            shared.append(operator)
    if shared:
        wrong = _disordered(shared, edges)
        for operator in shared:
            operator.claims = [claim for claim in operator.claims if claim.path[-1] not in wrong]
    operators = [operator for operator in operators if operator.claims]
    if shared:
        operators.sort(key=lambda operator: operator.node._sequence_nr())
    for operator in operators:
        for claim in operator.claims:
            left.pop(claim.path[-1], None)
    return operators, list(left.values())


def _disordered(operators: Sequence[_Operator], edges: Mapping[Node, int]) -> set[Node]:
    """The leaves whose gradients a weight part could not sum up in the order of a whole backward."""
    # How many of the edges that end at a node come from operators, and how many from moves between them and a leaf.
    direct = Counter(claim.path[0] for operator in operators for claim in operator.claims)
    moves = {pair for operator in operators for claim in operator.claims for pair in pairwise(claim.path)}
    between = Counter(end for _, end in moves)
    return {
        claim.path[-1]
        for operator in operators
        for claim in operator.claims
        if not all(_is_in_order(direct[node], between[node], edges[node]) for node in claim.path)
    }


def _is_in_order(direct: int, between: int, edges: int) -> bool:
    """Whether a node that `edges` end at gets its gradients in the weight part only, and sums them up in the order of a
    whole backward. Those that enter at it come before those that come to it, which tells from three on.
    """
    return direct + between == edges and (edges <= 2 or not direct or not between)


def _walk(outputs: Sequence[Tensor]) -> tuple[dict[Node, int], list[_Operator], list[Node]]:
    """Every node behind `outputs` with the edges that end at it; the operators, with all arguments that may be weights;
    the leaves.
    """
    roots = [get_gradient_edge(output).node for output in outputs]
    edges: dict[Node, int] = dict.fromkeys(roots, 0)
    found, leaves, stack = [], [], list(edges)
    for root in roots:
        edges[root] += 1
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
        claims = [claim for slot in known.slots if (claim := _claim(following, slot))]
        if claims and known.accepts(node):
            operators.append(_Operator(node, claims))
    return edges, operators, leaves


def _claim(following: Sequence[tuple[Node, int]], slot: int) -> _Claim | None:
    """The argument `slot` of an operator with these edges, if moves and casts alone lead from there to a leaf."""
    node, number = following[slot]
    path: list[Node] = []
    while node is not None:
        path.append(node)
        kind = type(node)
        if kind is _LEAF:
            return _Claim(slot, GradientEdge(path[0], number), tuple(path))
        if kind not in _MOVES:
            return None
        ((node, _),) = node.next_functions
    return None
