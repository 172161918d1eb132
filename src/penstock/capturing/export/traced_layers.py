"""A layer out of a trace: a graph of PyTorch's operators, and the Python that runs it.

The graph keeps the operators as they were traced, since much is asked of it: which buffers are written, where tensors
are made. What runs is generated from the graph and does the same in less time. A parameter is read from the table of
the module that holds it, and not through attributes of modules in modules. An operator is called by PyTorch's own
Python function for it, where there is one; the operators in ``torch.ops`` look for a schema that fits at every call,
which takes some microseconds, more than many a small operator itself.
"""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode

from penstock.torch_internals.modules import tensor_tables

__all__ = ["FUNCTIONS", "TracedLayer"]

_OWNERS = "_owners"
"""The attribute with the tables that parameters and buffers are read from."""


class TracedLayer(GraphModule):
    """`graph` over `attributes`: tensors and modules, by the names that it gets them by.

    Copies made by `copy.deepcopy` read their own tensors, also where a copy shares the generated code.
    """

    def __init__(self, attributes: Mapping[str, Tensor | nn.Module], graph: Graph) -> None:
        super().__init__(dict(attributes), graph, "TracedLayer")

    def recompile(self) -> PythonCode:
        """Generates the code anew after the graph has changed."""
        code = super().recompile()
        owners, graph = _quick(self)
        object.__setattr__(self, _OWNERS, owners)
        type(self).forward = type(GraphModule(self, graph)).forward
        # As other modules are called: a GraphModule's own call prints errors and cuts their tracebacks.
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code


def _quick(layer: GraphModule) -> tuple[tuple[Mapping[str, Any], ...], Graph]:
    """A graph that does what that of `layer` does, over the tables that are returned with it."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in layer.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    tables = graph.get_attr(_OWNERS)
    owners: list[Mapping[str, Any]] = []
    places: dict[int, Node] = {}
    for node in layer.graph.nodes:
        if node.op == "placeholder":
            continue
        found = _table(layer, str(node.target)) if node.op == "get_attr" else None
        if found is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function":
                copies[node].target = FUNCTIONS.get(node.target, node.target)
            continue
        table, name = found
        if id(table) not in places:
            places[id(table)] = graph.call_function(operator.getitem, (tables, len(owners)))
            owners.append(table)
        copies[node] = graph.call_function(operator.getitem, (places[id(table)], name))
    return tuple(owners), graph


def _table(layer: GraphModule, target: str) -> tuple[Mapping[str, Any], str] | None:
    """Where the parameter or buffer `target` is registered, and its name there; None for something else."""
    path, _, name = target.rpartition(".")
    owner = layer.get_submodule(path)
    for table in tensor_tables(owner):
        if name in table:
            return table, name
    return None


def _functions() -> dict[Any, Callable[..., Any]]:
    """By operator, the function for it that takes the same arguments and calls the same operator."""
    aten, native, tensor = torch.ops.aten, torch.nn.functional, torch.Tensor
    found: dict[Any, Callable[..., Any]] = {
        aten.add.Tensor: torch.add,
        aten.sub.Tensor: torch.sub,
        aten.mul.Tensor: torch.mul,
        aten.div.Tensor: torch.div,
        aten.pow.Tensor_Scalar: torch.pow,
        aten.where.self: torch.where,
        aten.cat.default: torch.cat,
        aten.stack.default: torch.stack,
        aten.mean.dim: torch.mean,
        aten.softmax.int: torch.softmax,
        aten.log_softmax.int: torch.log_softmax,
        aten.transpose.int: torch.transpose,
        aten.unbind.int: torch.unbind,
        aten.select.int: torch.select,
        aten.squeeze.dim: torch.squeeze,
        aten.flatten.using_ints: torch.flatten,
        aten.masked_fill.Scalar: torch.masked_fill,
        aten.sym_size.int: tensor.size,
        aten.view.default: tensor.view,
        aten.expand.default: tensor.expand,
        aten.contiguous.default: tensor.contiguous,
        aten.relu_.default: torch.relu_,
        aten.add_.Tensor: tensor.add_,
    }
    alike = (
        *("matmul", "bmm", "layer_norm", "group_norm", "batch_norm", "embedding", "dropout", "relu", "tanh", "sigmoid"),
        *("reshape", "permute", "t", "unsqueeze", "chunk", "split_with_sizes", "clone", "neg", "exp", "sqrt", "rsqrt"),
        *("sin", "cos", "conv1d", "conv2d", "max_pool2d"),
    )
    found.update({getattr(aten, name).default: getattr(torch, name) for name in alike})
    inner = ("linear", "gelu", "silu", "avg_pool2d", "adaptive_avg_pool2d", "scaled_dot_product_attention")
    found.update({getattr(aten, name).default: getattr(native, name) for name in inner})
    return found


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(_functions())
