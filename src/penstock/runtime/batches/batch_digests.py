"""Short digests of a batch, by which ranks find out whether they were given the same one.

A digest covers the bytes of a tensor: all of them up to `FULL_BYTES`, and above that elements at equal distances. A
probe covers `PROBE_BYTES` of the first microbatch; it costs microseconds. Tensors on the meta device have
no values, so their digest is empty and is compared with none.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.capturing.samples import flatten
from penstock.runtime.batches.microbatches import Microbatch

FULL_BYTES = 2**20
"""The most bytes of one input, or of the target, that a full digest reads."""
PROBE_BYTES = 2**9
"""The most bytes that a probe reads."""
MOST_INPUTS = 15
"""The inputs that are described one by one; the rest are described together."""
_LONGEST = 64
"""Characters of a shape's text."""


class TensorFacts(NamedTuple):
    """One input, or the target. Both texts are empty where this process was given nothing."""

    shape: str
    """The shapes and dtypes in the microbatches, each once."""
    digest: str


class BatchFacts(NamedTuple):
    """What ranks compare of a batch."""

    samples: int
    inputs: tuple[TensorFacts, ...]
    """In the order of the model's inputs, without those that are not tensors."""
    target: TensorFacts


NO_BATCH = BatchFacts(0, (), TensorFacts("", ""))
"""The facts of a call without a batch."""


def forms_of(microbatches: Sequence[Microbatch]) -> tuple[object, ...]:
    """The samples and the shapes and dtypes of the inputs of each microbatch."""
    return tuple([(each.samples, each.signature) for each in microbatches])


def describe_batch(microbatches: Sequence[Microbatch], *, full: bool) -> BatchFacts:
    """The facts of a batch that was cut into `microbatches`. `full`: whether digests are full ones.

    A full digest of tensors on an accelerator waits for it. A probe does not: their digest is then empty.
    """
    if not microbatches:
        return NO_BATCH
    samples = sum([microbatch.samples for microbatch in microbatches])
    chosen = microbatches if full or len(microbatches) < 2 else (microbatches[0], microbatches[-1])
    names = list(chosen[0].inputs)
    groups = [[name] for name in names[:MOST_INPUTS]] + ([names[MOST_INPUTS:]] if len(names) > MOST_INPUTS else [])
    inputs = [_facts([[each.inputs[name] for name in group] for each in chosen], full) for group in groups]
    return BatchFacts(samples, tuple(inputs), _facts([_leaves(each.target) for each in chosen], full))


def _leaves(target: Any) -> list[Any]:
    return [target] if isinstance(target, Tensor) else flatten(target)[0]


def _facts(values: Sequence[Sequence[Any]], full: bool) -> TensorFacts:
    """The facts of one input, or of all leaves of the targets, by microbatch."""
    tensors = [[value for value in each if isinstance(value, Tensor)] for each in values]
    text = _text_of(tuple([(tensor.shape, tensor.dtype) for each in tensors for tensor in each]))
    return TensorFacts(text, _digest([tensor for each in (tensors if full else tensors[:1]) for tensor in each], full))


@lru_cache(maxsize=64)
def _text_of(forms: tuple[tuple[torch.Size, torch.dtype], ...]) -> str:
    shapes = dict.fromkeys(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in forms)
    text = ", ".join(shapes)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 9]} {_hashed([text.encode()])[:8]}"


def _digest(tensors: Sequence[Tensor], full: bool) -> str:
    if not tensors or not all([_is_readable(tensor, full) for tensor in tensors]):
        return ""
    most = (FULL_BYTES if full else PROBE_BYTES) // len(tensors)
    return _hashed([_sample(tensor, most) for tensor in tensors])


def _sample(tensor: Tensor, most: int) -> bytes:
    """The bytes of elements of `tensor` at equal distances, at most about `most`."""
    step = max(1, -(-tensor.nbytes // max(most, tensor.element_size())))
    sample = tensor
    # Most probes need no copy. They come with every step, and each call of PyTorch costs microseconds.
    if step > 1 or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        flat = tensor.detach().reshape(-1)
        if flat.is_conj() or flat.is_neg():
            flat = flat.resolve_conj().resolve_neg()
        # On the device first, so that only the sample is copied.
        sample = (flat[::step] if step > 1 else flat).cpu().contiguous()
    return ctypes.string_at(sample.data_ptr(), sample.nbytes) if sample.nbytes else b""


def _is_readable(tensor: Tensor, full: bool) -> bool:
    plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    strided = plain and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return strided and not tensor.is_meta and (full or tensor.is_cpu)


def _hashed(pieces: Sequence[bytes]) -> str:
    found = hashlib.blake2b(digest_size=6)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()
