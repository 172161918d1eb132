"""The live versions of one stage's weights.

A stage whose schedule keeps n versions has n *slots*, each a full set of parameter tensors, and for each slot a copy
of the stage's module whose parameters are leaves of autograd over that slot; buffers are shared by all. A forward runs
the copy of its version, so what autograd saves for the backward are exactly those tensors: stashing needs no copying
and no swapping. The optimizer holds the model's own parameters, and their data is always the newest slot.

Replicas of a stage that live in one process share its slots, since their weights are the same, and each has leaves and
buffers of its own. The first of them to come to an update makes it; the others find it made.

Laws of this file:
  1. Version x lives in slot x mod n. That no slot is overwritten while it is needed is the schedule's promise, proved
     by the verifier; nothing is checked again here. Replicas keep to it together: all of them have given their
     gradients before one of them updates.
  2. An update copies the newest slot to the next one and steps in place: one copy of the weights, none where n is 1.
  3. It knows no microbatch, no peer and no optimizer.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.capturing.chain import StageModule
from penstock.runtime.shards import of_part, part_of, point, settled

__all__ = ["VersionedWeights"]


@dataclass(slots=True, eq=False)
class _Slots:
    """The tensors of all versions, and which version is the newest."""

    parameters: dict[str, nn.Parameter]
    stepped: dict[str, nn.Parameter]
    tensors: list[dict[str, Tensor]]
    """By slot, this process's part of each."""
    first: int = 0
    """The slot of version 0 of the present run of the schedule."""
    newest: int = 0

    def place(self, version: int) -> int:
        return (self.first + version) % len(self.tensors)


class VersionedWeights:
    """`versions` slots for the parameters of `module`, which are named by `parameters`.

    `lent`: those that another stage of this process uses too and updates, with the weights of that stage, which must
    have equally many versions.
    `copied`: whether the modules are copies; one that cannot be copied runs itself, and has one version and no replica.
    """

    def __init__(
        self,
        module: StageModule,
        parameters: Mapping[str, nn.Parameter],
        versions: int,
        lent: Mapping[str, "VersionedWeights"] | None = None,
        copied: bool = True,
    ) -> None:
        lenders = lent or {}
        slots = [{name: part_of(parameter) for name, parameter in parameters.items()}]
        for slot in range(1, versions):
            slots.append(
                {
                    name: lenders[name].slot(slot)[name] if name in lenders else torch.empty_like(tensor)
                    for name, tensor in slots[0].items()
                }
            )
        stepped = {name: p for name, p in parameters.items() if name not in lenders}
        self._slots, self._module = _Slots(dict(parameters), stepped, slots), module
        if copied:
            self._make(self._slots, module, {id(buffer): buffer for buffer in module.buffers()})
            return
        assert versions == 1, "a module that is not copied has one version"
        self._leaves, self._modules = [dict(parameters)], [module]

    def replica(self) -> "VersionedWeights":
        """Another replica of the stage in this process: the same weights, gradients and buffers of its own."""
        other = VersionedWeights.__new__(VersionedWeights)
        other._make(self._slots, self._module, {})
        return other

    def _make(self, slots: _Slots, module: StageModule, buffers: Mapping[int, Tensor]) -> None:
        self._slots = slots
        self._leaves = [
            {
                name: nn.Parameter(of_part(slot[name], p), requires_grad=p.requires_grad)
                for name, p in slots.parameters.items()
            }
            for slot in slots.tensors
        ]
        first = _copy(module, slots.parameters, self._leaves[0], buffers)
        own = {id(buffer): buffer for buffer in first.buffers()}
        self._modules = [first, *(_copy(first, self._leaves[0], leaves, own) for leaves in self._leaves[1:])]
        self._module = module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The optimizer's view: the model's own parameters, always the newest version."""
        return self._slots.parameters

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The module's buffers, of which there is one version only."""
        return tuple(self._modules[0].buffers())

    def module(self, version: int) -> StageModule:
        """The stage's module over the weights of `version`."""
        return self._modules[self._slots.place(version)]

    def leaves(self, version: int) -> Mapping[str, nn.Parameter]:
        """The leaves of autograd that gradients taken at `version` are added to, by parameter name."""
        return self._leaves[self._slots.place(version)]

    def slot(self, number: int) -> Mapping[str, Tensor]:
        """This process's part of each parameter in a slot."""
        return self._slots.tensors[number]

    def gradients(self, version: int) -> dict[str, Tensor]:
        """The gradients accumulated at `version`, by parameter name; a parameter that had none is left out."""
        leaves = self.leaves(version)
        return {name: settled(leaf.grad, leaf) for name, leaf in leaves.items() if leaf.grad is not None}

    def begin_update(self, version: int, gradients: Mapping[str, Tensor]) -> bool:
        """Makes the optimizer's parameters a copy of version `version - 1` in the slot of `version`, with `gradients`.

        False if another replica has made this version already.
        """
        slots = self._slots
        if slots.newest >= version:
            return False
        slots.newest = version
        current, following = slots.place(version - 1), slots.place(version)
        for name, parameter in slots.stepped.items():
            if following != current:
                target = slots.tensors[following][name]
                target.copy_(part_of(parameter))
                point(parameter, target)
            parameter.grad = gradients.get(name)
        return True

    def take_gradients(self, version: int) -> dict[str, Tensor]:
        """The gradients accumulated at `version`, which are forgotten here: the next ones begin anew."""
        gradients = self.gradients(version)
        for leaf in self.leaves(version).values():
            leaf.grad = None
        return gradients

    def end_update(self) -> None:
        """Forgets the gradients of the optimizer's parameters."""
        for parameter in self._slots.stepped.values():
            parameter.grad = None

    @contextmanager
    def hidden_gradients(self) -> Iterator[None]:
        """Keeps the gradients from an optimizer that steps other stages in its body.

        Only a module that is not a copy accumulates them in the optimizer's own parameters.
        """
        own = self._slots.parameters.values() if self._modules[0] is self._module else ()
        held = [(parameter, parameter.grad) for parameter in own]
        for parameter, _ in held:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient

    def restart(self) -> None:
        """Makes the newest version the version 0 of a new run of the schedule."""
        self._slots.first = self._slots.place(self._slots.newest)
        self._slots.newest = 0


def _copy(
    module: StageModule,
    parameters: Mapping[str, nn.Parameter],
    leaves: Mapping[str, nn.Parameter],
    buffers: Mapping[int, Tensor],
) -> StageModule:
    """A copy of `module` with `leaves` for its parameters; those of its buffers that are in `buffers`, by id, are kept
    and not copied.
    """
    memo: dict[int, Any] = {id(parameter): leaves[name] for name, parameter in parameters.items()}
    memo.update(buffers)
    _copy_generated(module, memo)
    return copy.deepcopy(module, memo)


def _copy_generated(module: nn.Module, memo: dict[int, Any]) -> None:
    """Puts copies of the generated modules in `module` into `memo`, which share their code; fx would generate it again.

    The code is what PyTorch keeps compiled graphs by, so that all versions of a stage use one.
    """
    for inner in module.children():
        if id(inner) not in memo:
            _copy_generated(inner, memo)
    if isinstance(module, GraphModule):
        made = memo[id(module)] = object.__new__(type(module))
        memo[id(module._graph)] = module._graph
        made.__dict__.update(copy.deepcopy(module.__dict__, memo))
