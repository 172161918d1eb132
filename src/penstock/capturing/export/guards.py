"""Checks that PyTorch's Python makes in a forward and that a trace of its operators leaves out.

BatchNorm in training divides by the number of values per channel less one. Its Python refuses a single value; the
operator writes NaN in the running variance and goes on. A ragged last batch easily makes a microbatch of one sample.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from penstock.errors import PenstockError
from penstock.torch_internals.modules import is_batch_norm


def lost_check(node: Node) -> Callable[[Tensor], None] | None:
    """What to ask of the first argument of `node` before it runs; None for almost every operator."""
    if node.target is torch.ops.aten.batch_norm.default and node.args[5] is True:
        return _check_statistics
    return None


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
    for inner in module.modules():
        if is_batch_norm(inner):
            return True
        if isinstance(inner, GraphModule) and any(node.target is _check_statistics for node in inner.graph.nodes):
            return True
    return False
