"""A trace cut into layers.

The run of a model is a sequence of steps, and the calls of its blocks are intervals in it. Between two neighbouring
blocks the cut falls where the fewest bytes cross. Each interval becomes a graph of its own over the model's own
parameters, and brings along the free operators that it reads. Where it is the call of one block, it is that block.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode

from penstock.capturing.chain import Layer
from penstock.capturing.export.dependence import Dependence, size_bytes
from penstock.capturing.export.opaque_blocks import OpaqueBlocks, call_of, is_block
from penstock.capturing.export.tracing import Trace
from penstock.capturing.sequential import EagerLayer
from penstock.errors import CaptureError, PenstockError
from penstock.torch_internals.modules import is_batch_norm

Partition = tuple[tuple[str, tuple[str, ...]], ...]
"""The layers by name, each with the keys of the block calls in it."""

_ROOT = "L__self__"
_WRAPPER = "model"


def call_stacks(steps: Sequence[Node], blocks: OpaqueBlocks, model: nn.Module) -> list[list[tuple[str, str]]]:
    """The module calls that each step ran in, outermost first, as (path, key of the call).

    A module that `model` holds in several places, such as ``ModuleList([block] * 12)``, has the path of the first.
    """
    places: dict[nn.Module, str] = {}
    first = {path: places.setdefault(module, path) for path, module in model.named_modules(remove_duplicate=False)}
    stacks: list[list[tuple[str, str]]] = []
    last: list[tuple[str, str]] = []
    for step in steps:
        entries = [
            (value[0].removeprefix(_WRAPPER).removeprefix("."), key)
            for key, value in step.meta.get("nn_module_stack", {}).items()
            if key.startswith(_ROOT) and value[0]
        ]
        # A step that PyTorch added itself has no stack: it belongs where it stands.
        last = [(first.get(path, path), key) for path, key in entries] or last
        # PyTorch does not note a call of a forward, and the opening runs around its blocks.
        called = _forward_called(step, blocks)
        stacks.append(called if called and not called[0][0] else [*last, *called])
    return stacks


def _forward_called(step: Node, blocks: OpaqueBlocks) -> list[tuple[str, str]]:
    """The call that `step` belongs to, if it is of a block's forward."""
    source = step.args[0] if step.target is operator.getitem else step
    if not (isinstance(source, Node) and is_block(source)):
        return []
    call, _ = call_of(source)
    traced = blocks.traced[call]
    noted = traced.path and not traced.recorded.by_forward
    return [] if noted else [(traced.path, blocks.call_name(call))]


def cut(
    trace: Trace, dependence: Dependence, stacks: Sequence[Sequence[tuple[str, str]]], partition: Partition
) -> list[Layer]:
    """The layers of `partition`; their random draws and writes in place are not known yet."""
    layers = []
    for name, start, stop in _intervals(dependence, stacks, partition):
        later = set(dependence.steps[stop:])
        own = dependence.steps[start:stop]
        sent = [step for step in own if any(user in later or user.op == "output" for user in step.users)]
        if stop == len(dependence.steps):
            sent += [node for node in dict.fromkeys(trace.results) if _made_last(node, dependence, trace)]
        layers.append(_layer(name, own, tuple(dict.fromkeys(sent)), trace, dependence))
    return layers


def _made_last(node: Node, dependence: Dependence, trace: Trace) -> bool:
    """Whether a result is made in no layer's steps: a free operator, a parameter or a buffer."""
    source = trace.sources.get(node)
    return source.tensor is not None if source else node in dependence.free


def _intervals(
    dependence: Dependence, stacks: Sequence[Sequence[tuple[str, str]]], partition: Partition
) -> list[tuple[str, int, int]]:
    """Every layer's name, the position of its first step, and that after its last.

    A layer joins the one before it where only a number could be sent, such as the result of ``.item()``.
    """
    group = {key: index for index, (_, keys) in enumerate(partition) for key in keys}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, stack in enumerate(stacks):
        for _, key in stack:
            if key in group:
                first.setdefault(group[key], position)
                last[group[key]] = position
                break
    crossing = _crossing(dependence, len(stacks))
    intervals: list[tuple[str, int, int]] = []
    start, name = 0, partition[0][0]
    for index in range(len(partition) - 1):
        low = max((last[other] + 1 for other in last if other <= index), default=start)
        high = min((first[other] for other in first if other > index), default=len(stacks))
        if high < low:
            raise CaptureError(
                f"the blocks {partition[index][0]} and {partition[index + 1][0]} run in another order than when the "
                "model was first traced (in evaluation mode, for example): pass the model as a list of layers"
            )
        best = min(range(low, high + 1), key=lambda position: (crossing[position], -position))
        best = max(best, start)
        if crossing[best] < float("inf"):
            intervals.append((name, start, best))
            start, name = best, partition[index + 1][0]
    return [*intervals, (name, start, len(stacks))]


def _crossing(dependence: Dependence, count: int) -> list[float]:
    """The bytes that are made before and read after each position between steps."""
    positions = {step: position for position, step in enumerate(dependence.steps)}
    crossing = [0.0] * (count + 1)
    for step, made in positions.items():
        reads = [count if user.op == "output" else positions.get(user, made) for user in step.users]
        weight = size_bytes(step)
        for position in range(made + 1, min(max(reads, default=made), count - 1) + 1):
            crossing[position] += weight
    return crossing


def _layer(name: str, own: Sequence[Node], sent: tuple[Node, ...], trace: Trace, dependence: Dependence) -> Layer:
    needed = dependence.closure((*own, *sent))
    mine = set(own)
    received = [
        node
        for step in sorted(needed, key=dependence.order.__getitem__)
        for node in step.all_input_nodes
        if node.op == "call_function" and node not in mine and node not in dependence.free
    ]
    inputs = {node: _value_name(node, trace) for node in received}
    attributes: dict[str, Tensor | nn.Module] = {}
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in sorted(needed, key=dependence.order.__getitem__):
        if node.op == "placeholder" and trace.sources[node].tensor is None:
            inputs[node] = trace.sources[node].name
    for index, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"value_{index}")
    for node in sorted(needed, key=dependence.order.__getitem__):
        if node in copies:
            continue
        if node.op in ("placeholder", "get_attr"):
            copies[node] = _attribute(graph, node, trace, attributes)
        elif is_block(node):
            call, arguments = call_of(node)
            attributes[f"_blocks.{call}"] = trace.blocks.layer(call)
            given = tuple(copies[each] if isinstance(each, Node) else each for each in arguments)
            copies[node] = graph.call_module(f"_blocks.{call}", given)
        else:
            if node.target is torch.ops.aten.batch_norm.default and node.args[5] is True:
                # BatchNorm in Python refuses a single value; its operator writes NaN in the variance and goes on.
                graph.call_function(_check_statistics, (copies[node.all_input_nodes[0]],))
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in sent))
    for node in graph.nodes:
        # The traced tensors are of no use any more, and a copy of the layer would copy them.
        node.meta = {}
    module = _block_alone(graph, attributes) or TracedLayer(attributes, graph)
    return Layer(name, module, tuple(inputs.values()), tuple(_value_name(node, trace) for node in sent))


def _check_statistics(tensor: Tensor) -> None:
    """Raises `PenstockError` if `tensor` (samples, channels, ...) has one value per channel."""
    if tensor.numel() == tensor.shape[1]:
        raise PenstockError(
            f"BatchNorm in training needs several values per channel and got a tensor of shape {tuple(tensor.shape)}: "
            "a microbatch of one sample. Pass batches of at least two samples for every microbatch (drop_last=True of "
            "a DataLoader leaves out a smaller last one), or use fewer microbatches"
        )


def takes_statistics(module: nn.Module) -> bool:
    """Whether what `module` computes for a sample in training depends on the other samples of its microbatch, by
    BatchNorm. Replicas that split microbatches would train another model than one device does.
    """
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, GraphModule)]
    traced = any(graph.find_nodes(op="call_function", target=_check_statistics) for graph in graphs)
    return traced or any(map(is_batch_norm, module.modules()))


def _block_alone(graph: Graph, attributes: Mapping[str, Tensor | nn.Module]) -> EagerLayer | None:
    """The block that `graph` calls, if it does nothing else: takes its arguments and returns all that it returns."""
    *steps, output = graph.nodes
    calls = [node for node in steps if node.op == "call_module"]
    if len(calls) != 1:
        return None
    call, block = calls[0], attributes[str(calls[0].target)]
    results = [node for node in steps if node.target is operator.getitem and node.args[0] is call]
    given = [node for node in steps if node.op == "placeholder"]
    if not isinstance(block, EagerLayer) or len(steps) != len(given) + 1 + len(results):
        return None
    whole = [node.args[1] for node in results] == list(range(block.returns.tensor_count))
    return block if whole and list(call.args) == given and list(output.args[0]) == results else None


def _attribute(graph: Graph, node: Node, trace: Trace, attributes: dict[str, Tensor | nn.Module]) -> Node:
    if node.op == "placeholder":
        source = trace.sources[node]
        assert source.tensor is not None
        attributes[source.name] = source.tensor
        return graph.get_attr(source.name)
    name = f"_graphs.{node.target}"
    inner = trace.graph.get_submodule(str(node.target))
    if isinstance(inner, GraphModule):
        for step in inner.graph.nodes:
            step.meta = {}
    attributes[name] = inner
    return graph.get_attr(name)


def result_names(trace: Trace) -> tuple[str, ...]:
    """The value names of what the model returns."""
    names: list[str] = []
    for node in trace.results:
        source: Mapping[Node, object] = trace.sources
        is_input = node in source and trace.sources[node].tensor is None
        names.append(trace.sources[node].name if is_input else _value_name(node, trace))
    return tuple(names)


def _value_name(node: Node, trace: Trace) -> str:
    """That of the block which returns the value; else the tracer's."""
    if node.target is operator.getitem and isinstance(block := node.args[0], Node) and is_block(block):
        return trace.blocks.result_name(call_of(block)[0], cast(int, node.args[1]))
    return node.name


class TracedLayer(GraphModule):
    """A layer out of a trace: `graph`, of operators and blocks, over `attributes`: tensors and modules by name."""

    def __init__(self, attributes: Mapping[str, Tensor | nn.Module], graph: Graph) -> None:
        _check_names(graph)
        super().__init__(dict(attributes), graph, "TracedLayer")

    def recompile(self) -> PythonCode:
        """Generates the code anew after the graph has changed."""
        code = super().recompile()
        # As other modules are called: a GraphModule's own call prints errors and cuts their tracebacks.
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code


def _check_names(graph: Graph) -> None:
    """Raises `CaptureError` for a name that would end the text that it is in: torch.fx writes names into code as they
    are.
    """
    for node in graph.nodes:
        name = str(node.target)
        if node.op in ("get_attr", "call_module") and set(name) & set('"\\\n\r\0'):
            raise CaptureError(
                f"the parameter, buffer or module {name!r}: expected a name without double quotes, backslashes and "
                "ends of lines, since the code between the model's blocks is written anew as Python. Rename it, "
                "or pass the model as a list of layers"
            )
