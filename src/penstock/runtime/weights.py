"""The live versions of one stage's weights.

A stage whose schedule keeps n versions has n *slots*, each a full set of parameter tensors, and for each slot a replica
of the stage's module whose parameters are leaves of autograd over that slot; buffers are shared by all. A forward runs
the replica of its version, so what autograd saves for the backward are exactly those tensors: stashing needs no copying
and no swapping. The optimizer holds the model's own parameters, and their data is always the newest slot.

Laws of this file:
  1. Version x lives in slot x mod n. That no slot is overwritten while it is needed is the schedule's promise, proved
  by
     the verifier; nothing is checked again here.
  2. An update copies the newest slot to the next one and steps in place: one copy of the weights, none where n is 1.
  3. It knows no microbatch, no peer and no optimizer.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.chain import StageModule

__all__ = ["VersionedWeights"]


class VersionedWeights:
    """`versions` slots for the parameters of `module`, which are named by `parameters`.

    `lent`: those that another stage of this process uses too and updates; there must be one version only.
    """

    def __init__(
        self,
        module: StageModule,
        parameters: Mapping[str, nn.Parameter],
        versions: int,
        lent: frozenset[str] = frozenset(),
    ) -> None:
        assert not lent or versions == 1, "stages that share weights flush"
        self.parameters = dict(parameters)
        """The optimizer's view: the model's own parameters, always the newest version."""
        self._stepped = {name: p for name, p in parameters.items() if name not in lent}
        slots = [{name: parameter.data for name, parameter in self.parameters.items()}]
        for _ in range(1, versions):
            slots.append({name: torch.empty_like(tensor) for name, tensor in slots[0].items()})
        self._leaves = [
            {name: nn.Parameter(slot[name], requires_grad=p.requires_grad) for name, p in self.parameters.items()}
            for slot in slots
        ]
        self._replicas = [_replicate(module, self.parameters, leaves) for leaves in self._leaves]
        self._first = 0
        """The slot of version 0 of the present run of the schedule."""

    def module(self, version: int) -> StageModule:
        """The stage's module over the weights of `version`."""
        return self._replicas[self._slot(version)]

    def gradients(self, version: int) -> dict[str, Tensor]:
        """The gradients accumulated at `version`, by parameter name; a parameter that had none is left out."""
        leaves = self._leaves[self._slot(version)]
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def begin_update(self, version: int, gradients: Mapping[str, Tensor]) -> None:
        """Makes the optimizer's parameters a copy of version `version - 1` in the slot of `version`, with
        `gradients`.
        """
        current, following = self._slot(version - 1), self._slot(version)
        for name, parameter in self._stepped.items():
            if following != current:
                target = self._leaves[following][name].data
                target.copy_(parameter.data)
                parameter.data = target
            parameter.grad = gradients.get(name)

    def end_update(self, gradient_version: int) -> None:
        """Forgets the gradients: those of the optimizer's parameters and those accumulated at `gradient_version`."""
        for parameter in self._stepped.values():
            parameter.grad = None
        for leaf in self._leaves[self._slot(gradient_version)].values():
            leaf.grad = None

    def restart(self, newest: int) -> None:
        """Makes version `newest` the version 0 of a new run of the schedule."""
        self._first = self._slot(newest)

    def _slot(self, version: int) -> int:
        return (self._first + version) % len(self._leaves)


def _replicate(
    module: StageModule, parameters: Mapping[str, nn.Parameter], leaves: Mapping[str, nn.Parameter]
) -> StageModule:
    """A copy of `module` with `leaves` for its parameters and the very same buffers."""
    memo: dict[int, Any] = {id(parameter): leaves[name] for name, parameter in parameters.items()}
    memo.update({id(buffer): buffer for buffer in module.buffers()})
    return copy.deepcopy(module, memo)
