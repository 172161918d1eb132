"""Which operators of a trace belong to one place, and which can be repeated wherever they are needed.

A *step* is an operator that must run once, in its layer: it touches a parameter, a random generator or a buffer that
the model writes, or it depends on a step. Everything else follows from the model's inputs and constants alone: masks,
position tables, sizes. It is computed again in every layer that reads it, so that it never crosses a cut.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from penstock.capturing.export.opaque_blocks import Untraceable, calls_before, is_block
from penstock.capturing.export.tracing import Trace, is_mutating
from penstock.torch_internals.dispatch import schema_of
from penstock.torch_internals.tensors import storage_key

_ASSERTIONS = ("aten::_assert", "aten::sym_constrain")


@dataclass(frozen=True, slots=True, eq=False)
class Dependence:
    """The operators of a trace by kind."""

    order: Mapping[Node, int]
    steps: tuple[Node, ...]
    """Those that run once, in the order of the model's own run."""
    free: frozenset[Node]
    """Those that any layer may repeat, and the inputs, constants and unwritten buffers."""
    writers: Mapping[Node, frozenset[Node]]
    """For a free node whose memory is written in place: the free operators that write it."""

    def closure(self, nodes: Iterable[Node]) -> set[Node]:
        """`nodes` and all free operators and sources that they need."""
        found: set[Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found.add(node)
            waiting += [i for i in node.all_input_nodes if i in self.free or i.op in ("get_attr", "placeholder")]
            waiting += self.writers.get(node, ())
        return found


def depend(trace: Trace, parameters: Collection[int], written_buffers: Collection[int]) -> Dependence:
    """Sorts the operators of `trace`; `parameters` and `written_buffers` are ids of tensors."""
    nodes = list(trace.graph.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    operators = [node for node in nodes if node.op == "call_function" and not _is_assertion(node)]
    bound = {
        n
        for n, source in trace.sources.items()
        if id(source.tensor) in parameters or id(source.tensor) in written_buffers
    }
    families = _families(nodes)
    writers = [node for node in operators if is_mutating(node)]
    while True:
        fixed = _fixed(operators, bound)
        more = set(fixed)
        for writer in writers:
            family = families[node_memory(writer.args[0])]
            if writer in fixed or any(member in fixed or member in bound for member in family):
                more |= {writer, *(member for member in family if member.op == "call_function")}
        if more == fixed:
            break
        bound |= more
    live = _live(operators, fixed, trace)
    free = frozenset(node for node in nodes if node not in fixed and node not in bound and node.op != "output")
    by_node: dict[Node, frozenset[Node]] = {}
    for writer in writers:
        if writer in free:
            for member in families[node_memory(writer.args[0])]:
                by_node[member] = by_node.get(member, frozenset()) | {writer}
    return Dependence(order, tuple(node for node in operators if node in fixed and node in live), free, by_node)


def size_bytes(node: Node) -> float:
    """Bytes of the tensor that `node` makes of the sample; infinite for what cannot be sent."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return float("inf")
    count = value.numel()
    # A size that depends on data has no hint.
    known = count if isinstance(count, int) else count.node.hint
    return float(1 if known is None else known) * value.element_size()


def _fixed(operators: list[Node], bound: set[Node]) -> set[Node]:
    fixed: set[Node] = set()
    for node in operators:
        if (
            node in bound
            or is_block(node)
            or is_random(node)
            or any(i in fixed or i in bound for i in node.all_input_nodes)
        ):
            fixed.add(node)
    return fixed


def _live(operators: list[Node], fixed: set[Node], trace: Trace) -> set[Node]:
    """What the results need, or what changes something that lasts."""
    live = {node for node in trace.results if isinstance(node, Node)}
    for node in reversed(operators):
        # A block may change what only Python sees.
        if node in live or is_block(node) or (node in fixed and is_mutating(node)):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _families(nodes: list[Node]) -> dict[int, list[Node]]:
    """The nodes by the memory that their tensors share."""
    families: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        memory = node_memory(node)
        if memory:
            families[memory].append(node)
    families[0] = []
    return families


def node_memory(node: Any) -> int:
    """The key of the memory of the tensor that `node` makes; 0 for no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        return 0
    try:
        return storage_key(value.untyped_storage())
    except RuntimeError as error:
        raise Untraceable(
            calls_before(node),
            f"the code between blocks computes {node.name} inside of a transform such as torch.vmap, which a trace "
            "does not keep. Apply it inside of a block, or pass the model as a list of layers",
        ) from error


def is_random(node: Node) -> bool:
    """Whether `node` draws random numbers, itself or in a graph inside of it."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        # dropout(input, p, train) draws nothing in evaluation mode.
        return not (node.target is torch.ops.aten.dropout.default and node.args[2] is False)
    return any(
        is_random(inner) or is_mutating(inner)
        for graph in _inner_graphs(node)
        for inner in graph.graph.nodes
        if inner.op == "call_function"
    )


def _inner_graphs(node: Node) -> list[GraphModule]:
    owner: nn.Module | None = node.graph.owning_module
    graphs: list[GraphModule] = []
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and owner is not None:
            inner = getattr(owner, str(argument.target), None)
            if isinstance(inner, GraphModule):
                graphs.append(inner)
    return graphs


def _is_assertion(node: Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and schema.name.startswith(_ASSERTIONS)
