"""Arithmetic on many tensors in few calls: on a GPU, launching a small operation takes longer than the operation.

PyTorch's own optimizers and ``clip_grad_norm_`` use the same for-each functions, whose names are private. Tensors are
grouped by the properties that one kernel needs alike: device, type and layout. Sparse tensors can be multiplied and
divided; PyTorch has no norm of them.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.torch_internals.tensors import divide_each, multiply_each, norm_of_each

_EPSILON = 1e-6
"""The constant of ``torch.nn.utils.clip_grad_norm_``."""
_Kind = tuple[torch.device, torch.dtype, torch.layout]


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each of `tensors`, taken in its own type, as float64.

    On a CPU it has the bits of ``torch.linalg.vector_norm``, on a GPU those of ``clip_grad_norm_(foreach=True)``,
    PyTorch's default there, whose last bit may differ.
    """
    found: dict[int, Tensor] = {}
    for indices in _kinds(tensors).values():
        norms = norm_of_each([tensors[index] for index in indices])
        found.update(zip(indices, torch.stack(norms).double().unbind(), strict=True))
    return [found[index] for index in range(len(tensors))]


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies `tensors` in place by `factor`, one number."""
    for (device, *_), members in _memories(tensors):
        multiply_each(members, factor.to(device))


def divide(tensors: Sequence[Tensor], number: float) -> None:
    """Divides `tensors` in place by `number`; the bits are those of ``tensor.div_(number)``."""
    for (device, *_), members in _memories(tensors):
        if device.type == "cpu":
            divide_each(members, number)
        else:
            # `div_` multiplies on a GPU, too. The for-each division divides, and its last bit may differ.
            multiply_each(members, 1 / number)


def clip(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Multiplies `gradients` by ``max_norm / total`` if `total`, their norm, is above `max_norm`.

    It works in place, which takes no memory for a second set of them: nothing else may hold them.
    """
    multiply(gradients, torch.clamp(max_norm / (total + _EPSILON), max=1.0))


def _kinds(tensors: Sequence[Tensor]) -> dict[_Kind, list[int]]:
    """The indices of `tensors` that one call can take, by their kind."""
    found: dict[_Kind, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault((tensor.device, tensor.dtype, tensor.layout), []).append(index)
    return found


def _memories(tensors: Sequence[Tensor]) -> Iterable[tuple[_Kind, list[Tensor]]]:
    """The `tensors` that one call can take, by their kind; of tensors over the same memory only one.

    Autograd may give two parameters one gradient, such as that of ``a.view(-1) + b.view(-1)``: it is changed once.
    """
    for kind, indices in _kinds(tensors).items():
        members = [tensors[index] for index in indices]
        if kind[2] == torch.strided:
            members = list({(tensor.data_ptr(), tensor.numel()): tensor for tensor in members}.values())
        yield kind, members
