"""Arguments that a block gets in a trace, and not in a run.

Models leave out a mask where they can see that it hides nothing. In a trace they cannot see it, and pass the mask. A
mask that follows from sizes alone is left out here as well, so that blocks compute what they compute in a run. One that
follows from the values of inputs is kept: for other values the model would pass it.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from penstock.capturing.export.dependence import is_random, node_memory
from penstock.capturing.export.opaque_blocks import is_block
from penstock.capturing.export.tracing import Trace, is_mutating
from penstock.capturing.sequential import Flag
from penstock.torch_internals.dispatch import schema_of

_SIZES = (
    *("aten::sym_size", "aten::sym_numel", "aten::sym_stride", "aten::sym_storage_offset"),
    *("aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full"),
    *("aten::zeros_like", "aten::ones_like", "aten::full_like"),
)
"""Operators that look at the sizes of their arguments only."""


def leave_out_optional_arguments(trace: Trace) -> None:
    """Changes the calls of blocks in `trace` that get such arguments."""
    blocks = trace.blocks
    if not any(call.unrecorded for call in blocks.traced):
        return
    valued = _valued(trace)
    for node in trace.graph.graph.find_nodes(op="call_function", target=torch.ops.penstock.block.default):
        tensors, numbers, call = cast("tuple[Sequence[Node], Any, int]", node.args)
        found = blocks.traced[call]
        leaves = found.tensor_leaves()
        out = {
            leaf
            for leaf, tensor in zip(leaves, tensors, strict=True)
            if leaf in found.unrecorded and found.takes.constants[leaf] is not Flag and tensor not in valued
        }
        if out:
            kept = [tensor for leaf, tensor in zip(leaves, tensors, strict=True) if leaf not in out]
            node.args = (kept, numbers, call)
            blocks.traced[call] = found.with_recorded(out)


def _valued(trace: Trace) -> set[Node]:
    """What depends on the values of inputs, parameters and buffers, and not on sizes alone."""
    found = {node for node, source in trace.sources.items() if not source.is_constant}
    written: set[int] = set()
    while True:
        before = len(found)
        for node in trace.graph.graph.nodes:
            if (
                is_block(node)
                or is_random(node)
                or node_memory(node) in written
                or (any(each in found for each in node.all_input_nodes) and not _of_sizes(node))
            ):
                found.add(node)
        written = {node_memory(node.args[0]) for node in found if is_mutating(node)} - {0}
        if len(found) == before:
            return found


def _of_sizes(node: Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and schema.name in _SIZES
