"""Nested values: PyTorch's own functions that open and close them.

PyTorch's optimizers, `torch.export` and `register_dataclass` go by this registry of containers. It has no public name
up to torch 2.13, and the `optree` package has another registry.
"""

from penstock.torch_internals.availability import missing

try:
    from torch.utils._pytree import (
        TreeSpec,
        keystr,
        tree_flatten,
        tree_leaves,
        tree_leaves_with_path,
        tree_map_only,
        tree_unflatten,
    )
except ImportError as error:
    raise missing("torch.utils._pytree", "to find the tensors in nested values") from error

__all__ = [
    "TreeSpec",
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map_only",
    "tree_unflatten",
]
