"""The norm of the gradients of all stages, made of a vector from each, for clipping and loss scaling.

Each stage makes one vector for an update: the scale of the loss, and the norm of each of its parameters' gradients. The
schedule sends these vectors between stages, so that every stage has all of them before it updates. The norm over all is
taken in the order of the model's parameters: it has the bits of ``torch.nn.utils.clip_grad_norm_`` on one device, with
``foreach=True`` on a GPU, as is its default there.

Many tensors are taken in few calls: on a GPU, launching a small operation takes longer than the operation. Tensors are
grouped by the properties that one kernel needs alike: device, type and layout. Sparse tensors can be multiplied and
divided; PyTorch has no norm of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from penstock.runtime.parameters.shards import local_shard, whole
from penstock.runtime.parameters.weight_shares import WeightShares
from penstock.runtime.transport.transport import Message
from penstock.scheduling.actions import carried_norms
from penstock.torch_internals.tensors import divide_each, multiply_each, norm_of_each
from penstock.torch_internals.unimported import is_dtensor

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


ABSENT = -1.0
"""Takes the place of the norm of an absent gradient."""


class GradientNorms:
    """Holds the gradient norms of updates on one rank.

    `counted`: by stage, its trained parameters that no earlier stage shares, by name. `order`: the names of all
    parameters in the order of the model. `max_norm`: gradients of a larger norm are clipped; None clips none.
    `device`: of the gradients.
    """

    def __init__(
        self,
        counted: Mapping[int, Mapping[str, nn.Parameter]],
        order: Iterable[str],
        max_norm: float | None,
        device: torch.device,
    ) -> None:
        self._counted, self._max_norm, self._device = counted, max_norm, device
        self._parameters = [item for stage in sorted(counted) for item in counted[stage].items()]
        position = {name: index for index, name in enumerate(order)}
        places = sorted(range(len(self._parameters)), key=lambda place: position[self._parameters[place][0]])
        self._order = torch.tensor(places, dtype=torch.int64, device=device)
        """The places of the norms in the joined vectors of all stages, in the order of the model."""
        self._vectors: dict[tuple[int, int], Tensor] = {}
        """By stage and version."""
        self.newest: Tensor | None = None
        """The norm at the last update of this rank."""
        self.newest_scale: Tensor | None = None
        """The scale of that update's losses."""

    def has(self, stage: int, version: int) -> bool:
        """Whether the vector of `stage` for the update to `version` is here."""
        return (stage, version) in self._vectors

    def add_shares(self, stage: int, version: int, gradients: Mapping[str, Tensor], shares: WeightShares) -> None:
        """Adds the vector of this rank's `stage`, made from the final `gradients` of what each replica owns. Blocks."""
        self.add(stage, version, gradients, float(shares.is_first), shares.own)
        self._vectors[stage, version] = shares.sum_norms(self._vectors[stage, version])

    def add(
        self, stage: int, version: int, gradients: Mapping[str, Tensor], scale: float, of: Collection[str] | None = None
    ) -> None:
        """Adds the vector of this rank's `stage`, made from its final `gradients`. `scale`: of the losses. `of`: the
        parameters that are not zero in it, by default all.
        """
        own = {name: gradients[name] for name in self._counted[stage] if name in gradients}
        plain = {name: gradient for name, gradient in own.items() if not is_dtensor(gradient)}
        norms = dict(zip(plain, norms_of(list(plain.values())), strict=True))
        for name, gradient in own.items():
            if name not in plain:
                # Computing it sums over the processes of the mesh.
                norms[name] = whole(torch.linalg.vector_norm(gradient)).double()
        if any(norm.device.type != self._device.type for norm in norms.values()):
            # Gradients of streamed stages are on the host.
            norms = {name: norm.to(self._device) for name, norm in norms.items()}
        absent = torch.full((), ABSENT, dtype=torch.float64, device=self._device)
        scaled = torch.full((), scale, dtype=torch.float64, device=self._device)
        if of is not None:
            norms.update(dict.fromkeys(self._counted[stage].keys() - of, torch.zeros_like(absent)))
        vector = torch.stack([scaled, *(norms.get(name, absent) for name in self._counted[stage])])
        self._vectors[stage, version] = vector

    def scale(self, version: int) -> float:
        """The loss scale of the update to `version`, from the vector of the last stage."""
        return float(self._vectors[max(self._counted), version][0])

    def overflow(self, version: int) -> bool:
        """Whether a norm for the update to `version` is not finite."""
        # One read, for which the host waits for the device.
        return not torch.cat(self._of(self._counted, version)).isfinite().all()

    def vectors_for(self, stage: int, version: int, target: int) -> tuple[Tensor, ...]:
        """The vectors that `stage` sends its neighbour `target`."""
        return tuple(self._of(carried_norms(len(self._counted), stage, target), version))

    def add_received(self, stage: int, version: int, source: int, message: Message) -> None:
        """Adds the vectors that `stage` received from `source`."""
        others = carried_norms(len(self._counted), source, stage)
        vectors = (vector for vector in message if vector is not None)
        self._vectors.update(((other, version), vector) for other, vector in zip(others, vectors, strict=True))

    def clip(self, version: int, gradients: Mapping[str, Tensor]) -> None:
        """Scales `gradients` of a stage for the update to `version` down in place if the norm of all is too large."""
        norms = torch.cat([vector[1:] for vector in self._of(self._counted, version)])[self._order]
        self.newest = torch.zeros((), device=self._device)
        if self._parameters:
            dtype = reduce(torch.promote_types, (p.grad_dtype or p.dtype for _, p in self._parameters))
            self.newest = torch.linalg.vector_norm(drop_absent(norms, norms.device.type == "cpu").to(dtype))
        self.newest_scale = self._vectors[max(self._counted), version][0]
        # Another stage of this rank may still make the update before this one.
        self._vectors = {of: vector for of, vector in self._vectors.items() if of[1] >= version - 1}
        if self._max_norm is not None:
            clip([local_shard(gradient) for gradient in gradients.values()], self._max_norm, self.newest)

    def restart(self) -> None:
        """Begins a new run, in which versions are counted anew."""
        self._vectors.clear()

    def _of(self, stages: Iterable[int], version: int) -> list[Tensor]:
        return [self._vectors[stage, version] for stage in sorted(stages)]


def drop_absent(norms: Tensor, shorter: bool) -> Tensor:
    """`norms` without those of absent gradients.

    If not `shorter`, they are zero instead: the sum of squares is the same except for the order of its summands. On a
    GPU the host would have to wait to learn how many there are.
    """
    if shorter:
        return norms[norms != ABSENT]
    return norms.where(norms != ABSENT, 0.0)
