"""What the stages of a rank know of all gradients when they update: the norms that clipping needs.

Each stage makes one vector for an update, the norm of the gradient of each of its parameters, and the schedule carries
these vectors between stages; `known_norms` says which have come by an update. The norm over all of them is taken in the
order of the model's parameters, so that where all are known it has the bits of `torch.nn.utils.clip_grad_norm_` on one
device.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from penstock.runtime.shards import whole
from penstock.runtime.transport import Message
from penstock.scheduling.norms import Norm, carried_norms, known_norms
from penstock.scheduling.schedules import Schedule
from penstock.training.clipping import clipped, total_norm

__all__ = ["Norms"]

ABSENT = -1.0
"""Stands for the norm of a gradient that there is none of."""


class Norms:
    """Of one rank under `schedule`.

    `counted`: by stage, those of its trained parameters that no stage before it shares, by name. `order`: all names of
    the model's parameters in its order. `most`: gradients of a larger norm are clipped.
    """

    def __init__(
        self, schedule: Schedule, counted: Mapping[int, Mapping[str, nn.Parameter]], order: Iterable[str], most: float
    ) -> None:
        self._schedule, self._counted, self._most = schedule, counted, most
        self._place = {name: index for index, name in enumerate(order)}
        self._vectors: dict[Norm, Tensor] = {}
        self.newest: Tensor | None = None
        """The norm at the last update of this rank."""

    def know(self, stage: int, version: int, gradients: Mapping[str, Tensor]) -> None:
        """Takes the norms of this rank's `stage` for the update to `version` from its finished `gradients`."""
        if (stage, version) in self._vectors:
            return
        counted = self._counted[stage]
        device = next((parameter.device for parameter in counted.values()), torch.device("cpu"))
        norms = [
            whole(torch.linalg.vector_norm(gradients[name])).double()
            if name in gradients
            else torch.full((), ABSENT, dtype=torch.float64, device=device)
            for name in counted
        ]
        empty = torch.zeros(0, dtype=torch.float64, device=device)
        self._vectors[stage, version] = torch.stack(norms) if norms else empty

    def told(self, stage: int, version: int, target: int) -> tuple[Tensor, ...]:
        """What `stage` tells its neighbour `target`."""
        return tuple(self._vectors[norm] for norm in carried_norms(self._schedule, stage, version, target))

    def hear(self, stage: int, version: int, source: int, message: Message) -> None:
        """What `stage` is told by `source`."""
        names = carried_norms(self._schedule, source, version, stage)
        self._vectors.update(zip(names, (vector for vector in message if vector is not None), strict=True))

    def clip(self, stage: int, version: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`gradients` of `stage` as the update to `version` takes them: scaled down if the norm is too large."""
        found: dict[str, Tensor] = {}
        for norm in known_norms(self._schedule, stage, version):
            for (name, parameter), value in zip(self._counted[norm[0]].items(), self._vectors[norm], strict=True):
                if float(value) != ABSENT:
                    found[name] = value.to(parameter.dtype)
        self.newest = total_norm([found[name] for name in sorted(found, key=self._place.__getitem__)])
        self._forget(version)
        return clipped(gradients, self._most, self.newest)

    def restart(self) -> None:
        """A new run of the schedule: what was known is of other updates."""
        self._vectors.clear()

    def _forget(self, version: int) -> None:
        # No stage hears of another one later than twice as many updates behind it as there are stages between them.
        for norm in [norm for norm in self._vectors if norm[1] <= version - 2 * self._schedule.stages]:
            del self._vectors[norm]
