"""What the stages of a rank know of all gradients when they update: the norms that clipping and loss scaling need.

Each stage makes one vector for an update: the scale of the loss, and the norm of each of its parameters' gradients. The
schedule carries these vectors between stages; `known_norms` says which have come by an update. The norm over all of
them is taken in the order of the model's parameters, so that where all are known it has the bits of
``torch.nn.utils.clip_grad_norm_`` on one device, with ``foreach=True`` on a GPU, as is its default there.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.runtime.parameters.shards import part_of, whole
from penstock.runtime.transport.transport import Message
from penstock.scheduling.norms import Norm, carried_norms, known_norms
from penstock.scheduling.schedules import Schedule
from penstock.training.clipping import clip
from penstock.training.tensor_lists import norms_of

__all__ = ["Norms", "present"]

ABSENT = -1.0
"""Stands for the norm of a gradient that there is none of."""


class Norms:
    """Of one rank under `schedule`.

    `counted`: by stage, those of its trained parameters that no stage before it shares, by name. `order`: all names of
    the model's parameters in its order. `most`: gradients of a larger norm are clipped; None clips none.
    `device`: of the gradients.
    """

    def __init__(
        self,
        schedule: Schedule,
        counted: Mapping[int, Mapping[str, nn.Parameter]],
        order: Iterable[str],
        most: float | None,
        device: torch.device,
    ) -> None:
        self._schedule, self._counted, self._most, self._device = schedule, counted, most, device
        self._place = {name: index for index, name in enumerate(order)}
        self._vectors: dict[Norm, Tensor] = {}
        self._orders: dict[tuple[int, ...], Tensor] = {}
        """By the stages of some norms in a row: where that of the first parameter is, and so on."""
        self.newest: Tensor | None = None
        """The norm at the last update of this rank."""
        self.newest_scale: Tensor | None = None
        """The scale of that update's losses."""

    def knows(self, stage: int, version: int) -> bool:
        """Whether the vector of `stage` for the update to `version` is here."""
        return (stage, version) in self._vectors

    def know(self, stage: int, version: int, gradients: Mapping[str, Tensor], scale: float) -> None:
        """Makes the vector of this rank's `stage` from its finished `gradients`, of losses times `scale`."""
        own = {name: gradients[name] for name in self._counted[stage] if name in gradients}
        plain = {name: gradient for name, gradient in own.items() if not isinstance(gradient, DTensor)}
        norms = dict(zip(plain, norms_of(list(plain.values())), strict=True))
        for name, gradient in own.items():
            if name not in plain:
                # Each is a sum over its processes.
                norms[name] = whole(torch.linalg.vector_norm(gradient)).double()
        absent = torch.full((), ABSENT, dtype=torch.float64, device=self._device)
        scaled = torch.full((), scale, dtype=torch.float64, device=self._device)
        vector = torch.stack([scaled, *(norms.get(name, absent) for name in self._counted[stage])])
        self._vectors[stage, version] = vector

    def scale(self, version: int) -> float:
        """What the losses of the update to `version` were multiplied with, as the last stage says."""
        return float(self._vectors[self._schedule.stages - 1, version][0])

    def overflown(self, stage: int, version: int) -> list[Norm]:
        """What `stage` knows at its update to `version` of gradients that are not finite."""
        known = known_norms(self._schedule, stage, version)
        return [norm for norm in known if not bool(self._vectors[norm].isfinite().all())]

    def told(self, stage: int, version: int, target: int) -> tuple[Tensor, ...]:
        """What `stage` tells its neighbour `target`."""
        return tuple(self._vectors[norm] for norm in carried_norms(self._schedule, stage, version, target))

    def hear(self, stage: int, version: int, source: int, message: Message) -> None:
        """What `stage` is told by `source`."""
        names = carried_norms(self._schedule, source, version, stage)
        self._vectors.update(zip(names, (vector for vector in message if vector is not None), strict=True))

    def clip(
        self, stage: int, version: int, gradients: Mapping[str, Tensor], apart: Sequence[Norm]
    ) -> dict[str, Tensor]:
        """`gradients` of `stage` as the update to `version` takes them: if the norm is too large, scaled down in place.

        `apart`: what does not count, of updates that were skipped.
        """
        known = [norm for norm in known_norms(self._schedule, stage, version) if norm not in apart]
        self.newest = torch.linalg.vector_norm(self._in_order(known))
        self.newest_scale = self._vectors[self._schedule.stages - 1, version][0]
        self._forget(version)
        if self._most is not None:
            clip([part_of(gradient) for gradient in gradients.values()], self._most, self.newest)
        return dict(gradients)

    def restart(self) -> None:
        """A new run of the schedule: what was known is of other updates."""
        self._vectors.clear()

    def _in_order(self, known: Sequence[Norm]) -> Tensor:
        """The `known` norms, those of all parameters in the model's order."""
        counted = [(name, p.dtype) for stage, _ in known for name, p in self._counted[stage].items()]
        if not counted:
            return torch.zeros(0, device=self._device)
        norms = torch.cat([self._vectors[norm][1:] for norm in known])
        stages = tuple(stage for stage, _ in known)
        if stages not in self._orders:
            order = sorted(range(len(counted)), key=lambda index: self._place[counted[index][0]])
            self._orders[stages] = torch.tensor(order, dtype=torch.int64, device=norms.device)
        dtype = reduce(torch.promote_types, (dtype for _, dtype in counted))
        return present(norms[self._orders[stages]], norms.device.type == "cpu").to(dtype)

    def _forget(self, version: int) -> None:
        # No stage hears of another one later than twice as many updates behind it as there are stages between them.
        for norm in [norm for norm in self._vectors if norm[1] <= version - 2 * self._schedule.stages]:
            del self._vectors[norm]


def present(norms: Tensor, shorter: bool) -> Tensor:
    """`norms` without those of gradients that there are none of.

    If not `shorter`, they are zero instead: the sum of squares is the same but for the order of its summands. How many
    there are only the device knows, and its host would have to wait.
    """
    if shorter:
        return norms[norms != ABSENT]
    return norms.where(norms != ABSENT, 0.0)
