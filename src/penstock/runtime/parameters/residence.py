"""Weights of streamed stages: at home on the host, and on the device from a fetch to a release.

A schedule says when (`penstock.scheduling.residence`). A fetch starts to copy, and the first computation of the stage
comes after the copy. A release drops the memory: nothing writes weights on the device but an update, which brings them
by itself (`HostStates.steps`). The gradients that are there go home with a release, and come back with the next fetch
if more are to be added to them.

Laws of this file:
  1. Between steps, in updates and behind a failure weights are at home.
  2. A weight is on the device while one of the stages and replicas of this process that use it has fetched it.
  3. Memory on the device is kept while it is copied: that of gradients until the next computation after that.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import PenstockError
from penstock.runtime.devices.staging import Staged, layout_of
from penstock.runtime.parameters.host_states import HostStates, dense
from penstock.runtime.parameters.version_slots import ComputeWeights
from penstock.torch_internals.unimported import PLAIN

_Coming: TypeAlias = tuple[Sequence[Tensor], Staged]
_PACKED = "bitsandbytes.nn.modules.Params4bit"
"""A class of parameters with its numbers in the memory that moves; the scales beside it stay on the device."""


class StreamedWeights:
    """The weights of all streamed stages of a process, which `host` moves."""

    def __init__(self, host: HostStates) -> None:
        self.host = host
        self._users: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        """By weight, how many have fetched it and not released it."""
        self._coming: MutableMapping[Tensor, _Coming] = WeakIdKeyDictionary()
        """By weight that is on its way, the copies of which it is one."""

    def adopt(self, weights: Mapping[str, nn.Parameter], stage: int, computed: ComputeWeights) -> None:
        """Moves `weights`, those of `stage` by name, home. `computed`: what forwards read in their place.

        Raises `PenstockError` for what cannot move by itself, before any has moved.
        """
        for name, weight in weights.items():
            kind = f"{type(weight).__module__}.{type(weight).__qualname__}"
            found = "" if type(weight) in PLAIN or kind == _PACKED else f"{kind}, whose memory is not its own"
            if computed.differs(weight):
                found = "one with a second form that forwards read: version_dtype=, or a hook that predicts"
            if found:
                raise PenstockError(
                    f"parameter {name}: expected a plain parameter, or Params4bit of bitsandbytes, in stage {stage}, "
                    f"whose weights are on the host between its visits (streamed), found {found}. Leave the stage out "
                    "of the streamed stages of the plan"
                )
        self.host.move_home(weights.values())

    def fetch(self, weights: Mapping[str, nn.Parameter], gradients: Iterable[Tensor]) -> None:
        """Starts to copy `weights`, and what is at home of `gradients`."""
        first = {name: weight for name, weight in weights.items() if not self._users.get(weight)}
        for name, weight in first.items():
            if not self.host.is_home(weight):
                raise PenstockError(
                    f"parameter {name}: its memory was replaced after the pipeline was built (parameter.data = ...), "
                    "and its plan keeps it on the host between steps. Expected the same memory. Write in it instead "
                    "(with torch.no_grad(): parameter.copy_(...)), or build a new Pipeline"
                )
        coming = self.host.bring([*first.values(), *gradients])
        for tensor in coming[0]:
            self._coming[tensor] = coming
        for weight in weights.values():
            self._users[weight] = self._users.get(weight, 0) + 1

    def arrive(self, tensors: Iterable[Tensor]) -> None:
        """Has what is computed from now on find `tensors` on the device."""
        for tensor in tensors:
            if (coming := self._coming.get(tensor)) is not None:
                self.host.arrive(*coming)
                for each in coming[0]:
                    del self._coming[each]

    def release(self, weights: Iterable[nn.Parameter]) -> None:
        """Drops the memory of those of `weights` that nothing else has fetched."""
        weights = list(weights)
        # Who keeps the copies keeps both ends, until they are made.
        self.arrive(weights)
        for weight in weights:
            self._users[weight] -= 1
        self.host.leave(weight for weight in weights if not self._users[weight])


class Residence:
    """The residence of one stage of one rank, with the parameters `weights` by name, which are home."""

    def __init__(self, streamed: StreamedWeights, weights: Mapping[str, nn.Parameter]) -> None:
        self.streamed, self._weights = streamed, weights
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self._homes = {name: streamed.host.memory(p.data, p.grad_dtype) for name, p in trained.items()}
        """Of the gradients."""
        self._aside: dict[str, Tensor] = {}
        """The gradients that came with the weights."""
        self.fetched = False

    def fetch(self, gradients: dict[str, Tensor]) -> None:
        """Starts to bring the weights, and those of `gradients` that are at home."""
        self.streamed.fetch(self._weights, gradients.values())
        self._aside, self.fetched = gradients, True

    def arrive(self) -> None:
        """Has what is computed from now on find them on the device."""
        self.streamed.arrive([*self._weights.values(), *self._aside.values()])
        self._aside = {}

    def release(self, gradients: Iterable[dict[str, Tensor]]) -> None:
        """Drops the memory of the weights. Starts to move `gradients` home, and has the dicts name them there."""
        self.arrive()
        self.fetched = False
        self.streamed.release(self._weights.values())
        places = [(held, name) for held in gradients for name, tensor in held.items() if self._is_present(tensor)]
        if places:
            tensors = [dense(held[name].data) for held, name in places]
            homes = [self._home(name, tensor) for (_, name), tensor in zip(places, tensors, strict=True)]
            for (held, name), sent in zip(places, self.streamed.host.send(tensors, homes), strict=True):
                held[name] = sent

    def end(self) -> None:
        """Ends a segment, which may have failed."""
        if self.fetched:
            self.release(())

    def _home(self, name: str, gradient: Tensor) -> Tensor:
        if layout_of(self._homes[name]) != layout_of(gradient):
            self._homes[name] = self.streamed.host.memory(gradient)
        return self._homes[name]

    def _is_present(self, gradient: Any) -> bool:
        """Whether it is on the device, and dense: others are few rows, which stay."""
        return gradient.layout is torch.strided and not self.streamed.host.is_home(gradient)
