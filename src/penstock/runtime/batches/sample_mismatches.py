"""Explains failures on batches that differ from the sample: in type, dimensions or sizes, or by a missing target.

A model decides itself what it takes, and many take other lengths than that of the sample, so a difference alone is no
error. Where the model fails on it, the difference is the likely reason, and the model's own error does not name it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.arguments import text_of
from penstock.capturing.model_forms import ModelInputs
from penstock.errors import PenstockError
from penstock.torch_internals import pytrees as pytree
from penstock.training.user_microbatches import Microbatches

_KINDS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What PyTorch's operators raise for arguments that do not fit."""


@contextmanager
def explained_mismatches(where: str, inputs: Any, *target: Any, spec: ModelInputs, sample: Any) -> Iterator[None]:
    """Turns an error of its body into a `PenstockError` that names what is different in the batch, if anything is.

    `where`: the method that was called with `inputs` and `target`, which is left out where there is none.
    """
    try:
        yield
    except _KINDS as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # A loss need not read a target, and one that does fails on a None.
        given = () if target == (None,) and "None" not in str(error) else target
        found = _differences(spec, sample, inputs, given)
        if not found:
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PenstockError(f"{where}: {'; '.join(found)}. The model or its loss failed on that: {reason}") from error


def _differences(spec: ModelInputs, sample: Any, inputs: Any, target: Sequence[Any]) -> list[str]:
    given = list(inputs.inputs) if isinstance(inputs, Microbatches) else [inputs]
    known = spec.read(sample)
    batches = [spec.read(batch) for batch in given]
    names = [name for name in known if any(not _alike(known[name], batch[name]) for batch in batches)]
    found = [_described(name, known[name], next(b[name] for b in batches if not _alike(known[name], b[name])))
             for name in names]  # fmt: skip
    leaves = pytree.tree_leaves(target)
    if target and not isinstance(inputs, Microbatches) and not any(isinstance(leaf, Tensor) for leaf in leaves):
        found.append(
            f"target: expected a tensor for every sample, or several in a tuple, list or dict, found "
            f"{text_of(target[0])}: pass the second argument of loss_fn"
        )
    return found


def _alike(known: Tensor, found: Tensor) -> bool:
    """Whether two tensors differ in nothing but their number of samples."""
    return known.dtype == found.dtype and known.ndim == found.ndim and known.shape[1:] == found.shape[1:]


def _described(name: str, known: Tensor, found: Tensor) -> str:
    shapes = [f"({', '.join(['samples', *map(str, tensor.shape[1:])])})" for tensor in (known, found)]
    fix = f"pass it as .to({known.dtype})" if known.dtype != found.dtype else "pass inputs of that shape"
    return (
        f"{name}: expected {known.dtype} of shape {shapes[0]}, as in sample=, found {found.dtype} of shape "
        f"{shapes[1]}: {fix}, or build the pipeline with a sample= of this kind"
    )
