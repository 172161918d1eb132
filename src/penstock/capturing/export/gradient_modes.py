"""Blocks that a model's code calls under ``torch.no_grad()``.

A trace keeps the operators of such a region in a graph of its own, which is one node of the trace. Where blocks are
called in it, the region is opened: its operators take detached tensors, and its blocks run without gradients.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from penstock.capturing.export.opaque_blocks import OpaqueBlocks, call_of, is_block
from penstock.errors import CaptureError


def open_regions(program: ExportedProgram, blocks: OpaqueBlocks) -> None:
    """Opens the regions of `program` that call blocks. Raises `CaptureError` for one that is not of ``no_grad``."""
    root = program.graph_module
    waiting = [node for node in root.graph.nodes if node.op == "call_function"]
    while waiting:
        node = waiting.pop()
        for inner in [each for each in node.all_input_nodes if each.op == "get_attr"]:
            graph = root.get_submodule(str(inner.target)) if _is_module(root, str(inner.target)) else None
            if isinstance(graph, GraphModule) and _calls_blocks(graph):
                if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
                    raise CaptureError(
                        f"blocks are called inside {node.target}, which can be run with operators only. If this is "
                        "torch.autocast around the blocks, pass autocast= to Pipeline instead; else do it inside of "
                        "a block, or pass the model as a list of layers"
                    )
                waiting += _open(node, inner, graph, blocks)
                break
    root.recompile()


def _is_module(root: GraphModule, target: str) -> bool:
    try:
        root.get_submodule(target)
    except AttributeError:
        return False
    return True


def _calls_blocks(graph: GraphModule) -> bool:
    inner = [module for module in graph.modules() if isinstance(module, GraphModule)]
    return any(is_block(node) for each in inner for node in each.graph.nodes)


def _open(node: Node, region: Node, graph: GraphModule, blocks: OpaqueBlocks) -> list[Node]:
    """Puts the nodes of `graph` in place of `node`, and returns them."""
    enabled, _, *given = node.args
    copies: dict[Node, Node] = {}
    made: list[Node] = []
    operands = iter(cast("list[Node]", given))
    outer = node.graph
    with outer.inserting_before(node):
        for inner in graph.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = _taken(next(operands), bool(enabled))
                continue
            if inner.op == "output":
                break
            copy = copies[inner] = outer.node_copy(inner, copies.__getitem__)
            if inner.op == "get_attr":
                copy.target = f"{region.target}.{inner.target}"
            if is_block(copy):
                call, _ = call_of(copy)
                blocks.traced[call] = replace(blocks.traced[call], gradients=bool(enabled))
            made.append(copy)
    results = next(iter(reversed(graph.graph.nodes))).args[0]
    for user in list(node.users):
        index = cast(int, user.args[1])
        user.replace_all_uses_with(copies[cast("tuple[Node, ...]", results)[index]])
        outer.erase_node(user)
    outer.erase_node(node)
    return made


def _taken(operand: Node, enabled: bool) -> Node:
    """What an operator in a region sees of `operand`, a node outside of it."""
    value = operand.meta.get("val")
    if enabled or not isinstance(value, Tensor):
        return operand
    detached = operand.graph.call_function(torch.ops.aten.detach.default, (operand,))
    # The same memory: what is written in it is written in the operand. It belongs where it stands, and not to the
    # modules that made the operand.
    detached.meta = {key: value for key, value in operand.meta.items() if key != "nn_module_stack"}
    return detached
