"""The live versions of one stage's weights.

A stage whose schedule keeps n versions has n *slots*, each a full set of parameter tensors, and for each slot a set of
leaves of autograd over it. There is one module, the user's own. Before a forward that reads another version than the
last one, the tables of its modules are pointed at the leaves of that version. Autograd saves the leaves that a forward
read, so that its backward needs no pointing. The optimizer holds the model's own parameters, and their data is the
newest slot. Between steps the tables hold these again.

Where forwards read other numbers than the optimizer steps (a lower precision, a prediction), a parameter has memory of
its own: it is the *master* of its slots, and an update writes the numbers for forwards into the next slot.

Parameters that are not trained are one tensor in all slots.

Replicas of a stage that live in one process share its slots, since their weights are the same. All but the first are
copies of the module, with leaves, buffers and state of their own. The first of them to come to an update makes it; the
others find it made.

Laws of this file:
  1. Version x lives in slot x mod n. The schedule guarantees, and the verifier proves, that no slot is overwritten
     while it is needed; nothing is checked again here. It holds for replicas together: all of them have added their
     gradients before one of them updates.
  2. An update copies the newest slot to the next one and steps in place: one copy of the weights, none where n is 1.
     With masters the copy comes after the step, and casts.
  3. Gradients have the type of the optimizer's parameters: autograd casts them before it adds them up.
  4. It depends on no microbatch, peer or optimizer.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.capturing.chain import StageModule
from penstock.capturing.module_copies import Copier
from penstock.errors import CaptureError, PenstockError
from penstock.runtime.parameters.shards import from_local_shard, local_shard, redistributed_like, set_local_shard
from penstock.torch_internals.modules import tensor_tables
from penstock.torch_internals.tensors import accumulated_hooks, copy_each, gradient_hooks

__all__ = ["ComputeWeights", "VersionedWeights"]


@dataclass(frozen=True, slots=True)
class ComputeWeights:
    """Says which trained parameters forwards read in another form than the one that the optimizer steps.

    `dtype`: the type of float32 parameters with two dimensions or more. `predicted`: forwards may read other numbers.
    """

    dtype: torch.dtype | None = None
    predicted: bool = False

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """The type that forwards read `parameter` in."""
        lowered = self.dtype is not None and parameter.dtype == torch.float32 and parameter.ndim > 1
        return self.dtype if lowered and self.dtype is not None else parameter.dtype

    def differs(self, parameter: Tensor) -> bool:
        """Whether `parameter` needs memory of its own, beside the slots that forwards read."""
        return parameter.requires_grad and (self.predicted or self.dtype_of(parameter) != parameter.dtype)


AS_STEPPED = ComputeWeights()


@dataclass(slots=True, eq=False)
class _Slots:
    """The tensors of all versions, and which version is the newest."""

    parameters: dict[str, nn.Parameter]
    stepped: dict[str, nn.Parameter]
    """Those that are trained and updated here."""
    masters: frozenset[str]
    tensors: list[dict[str, Tensor]]
    """By slot, the local shard of each."""
    first: int = 0
    """The slot of version 0 of the present run of the schedule."""
    newest: int = 0
    oldest: int = 0
    """The first version of the present run; below 0 in one that continues another run."""

    def slot_of(self, version: int) -> int:
        return (self.first + version) % len(self.tensors)


class VersionedWeights:
    """Holds `versions` slots for the parameters of `module`, which are named by `parameters`.

    `lent`: the parameters that another stage of this process uses too and updates, with the weights of that stage,
    which must have equally many versions. `beside`: the weights of other stages of this process that read some of the
    frozen ones.
    `pointed`: whether the module's tables are pointed at leaves; if not, the module runs with the optimizer's
    parameters, one version and no replica.
    `compute_weights`: the weights that forwards read instead of the optimizer's parameters.
    """

    def __init__(
        self,
        module: StageModule,
        parameters: Mapping[str, nn.Parameter],
        versions: int,
        lent: Mapping[str, "VersionedWeights"] | None = None,
        pointed: bool = True,
        compute_weights: ComputeWeights = AS_STEPPED,
        beside: Iterable["VersionedWeights"] = (),
    ) -> None:
        lenders = lent or {}
        masters = frozenset(name for name, parameter in parameters.items() if compute_weights.differs(parameter))
        slots: list[dict[str, Tensor]] = [{} for _ in range(versions)]
        for name, parameter in parameters.items():
            own = local_shard(parameter)
            for number, slot in enumerate(slots):
                if name in lenders:
                    slot[name] = lenders[name].slot(number)[name]
                elif name in masters:
                    slot[name] = own.to(compute_weights.dtype_of(parameter), copy=True)
                else:
                    slot[name] = own if number == 0 or not parameter.requires_grad else torch.empty_like(own)
        stepped = {name: p for name, p in parameters.items() if p.requires_grad and name not in lenders}
        self._slots, self._module = _Slots(dict(parameters), stepped, masters, slots), module
        self._sharing: list[VersionedWeights] = []
        """The weights of other stages of this process that use some of these parameters, perhaps in the same module."""
        self._pointed: int | None = None
        """The slot that the module's tables are pointed at; None while they hold the optimizer's parameters."""
        if pointed:
            self._make(self._slots, module)
            # Stages that borrow from the same one share its module, too.
            self._sharing = list(
                dict.fromkeys(each for other in (*lenders.values(), *beside) for each in (other, *other._sharing))
            )
            for other in self._sharing:
                other._sharing.append(self)
            return
        assert versions == 1 and not masters, "a module with one version of its weights, which the optimizer steps"
        self._leaves, self._tables = [dict(parameters)], _Tables([], [])

    def replica(self) -> "VersionedWeights":
        """Another replica of the stage in this process: the same weights, gradients, buffers and state of its own."""
        self.rest()
        other = VersionedWeights.__new__(VersionedWeights)
        other._make(self._slots, Copier([self._module]).copies().of(self._module))
        return other

    def _make(self, slots: _Slots, module: StageModule) -> None:
        self._slots, self._module, self._sharing = slots, module, []
        self._leaves = [
            {name: _leaf_over(slot[name], parameter) for name, parameter in slots.parameters.items()}
            for slot in slots.tensors
        ]
        for leaves in self._leaves:
            for name in slots.masters:
                cast(Any, leaves[name]).grad_dtype = slots.parameters[name].dtype
        self._tables = _Tables.of(module, slots.parameters)
        self._hooks = {name: _hooks_on(parameter) for name, parameter in slots.parameters.items()}
        self._pointed = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's own parameters, which the optimizer steps; always the newest version."""
        return self._slots.parameters

    @property
    def stepped(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, and not updated by another stage of this process."""
        return self._slots.stepped

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The module's buffers, of which there is one version only."""
        return tuple(self._module.buffers())

    @property
    def stage(self) -> StageModule:
        """The stage's module, over whichever weights it was last pointed at."""
        return self._module

    def module(self, version: int) -> StageModule:
        """The stage's module, pointed at the weights of `version`.

        Raises `PenstockError` if a parameter was replaced or frozen since the pipeline was built.
        """
        slot = self._slots.slot_of(version)
        if self._pointed != slot or self._sharing:
            if self._pointed is None:
                others = [leaves for sharer in self._sharing for leaves in sharer._leaves]
                self._tables.check(self._slots.parameters, self._leaves[slot], others)
                if self._tables.entries:
                    self._check_own()
            self._tables.point(self._leaves[slot])
            self._pointed = slot
        return self._module

    def point(self, version: int) -> None:
        """Points the module at the weights of `version` for a backward: code such as `torch.utils.checkpoint` computes
        a forward again in it.
        """
        self.module(version)

    def _check_own(self) -> None:
        """Raises `PenstockError` if a parameter got other memory or other hooks since the pipeline was built."""
        newest = self._slots.tensors[self._slots.slot_of(self._slots.newest)]
        for name, parameter in self._slots.parameters.items():
            # The stage that lends a parameter moves it to another slot when it updates.
            lent = parameter.requires_grad and name not in self._slots.stepped
            own = name not in self._slots.masters and not lent
            shard = local_shard(parameter) if isinstance(parameter, DTensor) else parameter
            if own and shard.data_ptr() != newest[name].data_ptr():
                raise PenstockError(
                    f"parameter {name}: its memory was replaced after the pipeline was built (parameter.data = ...), "
                    "which steps would not see. Expected the same memory. Write in it instead (with torch.no_grad(): "
                    "parameter.copy_(...)), or build a new Pipeline"
                )
            if _hooks_on(parameter) != self._hooks[name]:
                raise PenstockError(
                    f"parameter {name}: hooks were registered or removed after the pipeline was built, which steps "
                    "would not see. Register them before, or build a new Pipeline"
                )

    def rest(self) -> None:
        """Puts the optimizer's parameters back into the module, where the user finds them."""
        if self._pointed is not None and self._tables.entries:
            self._tables.point(self._slots.parameters)
            self._pointed = None

    def leaves(self, version: int) -> Mapping[str, nn.Parameter]:
        """The leaves of autograd that gradients taken at `version` are added to, by parameter name."""
        return self._leaves[self._slots.slot_of(version)]

    def slot(self, number: int) -> Mapping[str, Tensor]:
        """The local shard of each parameter in a slot."""
        return self._slots.tensors[number]

    def gradients(self, version: int) -> dict[str, Tensor]:
        """The gradients accumulated at `version`, by parameter name; parameters without one are left out."""
        leaves = self.leaves(version)
        return {name: redistributed_like(leaf.grad, leaf) for name, leaf in leaves.items() if leaf.grad is not None}

    def begin_update(self, version: int, gradients: Mapping[str, Tensor]) -> bool:
        """Makes the optimizer's parameters a copy of version `version - 1` in the slot of `version`, with `gradients`.

        False if another replica has made this version already.
        """
        slots = self._slots
        if slots.newest >= version:
            return False
        slots.newest = version
        current, following = slots.slot_of(version - 1), slots.slot_of(version)
        if following != current and (moving := [name for name in slots.stepped if name not in slots.masters]):
            targets = [slots.tensors[following][name] for name in moving]
            parameters = [slots.stepped[name] for name in moving]
            # In one call: on a GPU, launching the copy of a small parameter takes longer than the copy.
            copy_each(targets, [local_shard(parameter) for parameter in parameters])
            for parameter, target in zip(parameters, targets, strict=True):
                set_local_shard(parameter, target)
        for name, parameter in slots.stepped.items():
            parameter.grad = gradients.get(name)
        return True

    def take_gradients(self, version: int) -> dict[str, Tensor]:
        """Returns the gradients accumulated at `version`, and removes them from the leaves."""
        gradients = self.gradients(version)
        for leaf in self.leaves(version).values():
            leaf.grad = None
        return gradients

    def end_update(self, published: Mapping[str, Tensor] | None = None) -> None:
        """Ends an update: removes the gradients of the optimizer's parameters, and publishes the newest version.

        `published`: by name, the weights that forwards read instead of those parameters.
        """
        for parameter in self._slots.stepped.values():
            parameter.grad = None
        self._publish(published or {})

    def _publish(self, published: Mapping[str, Tensor]) -> None:
        """Writes the newest version of the parameters with masters into its slot."""
        slots = self._slots
        newest = slots.tensors[slots.slot_of(slots.newest)]
        for name in slots.masters & slots.stepped.keys():
            newest[name].copy_(local_shard(published[name] if name in published else slots.stepped[name]))

    @contextmanager
    def hidden_gradients(self) -> Iterator[None]:
        """Context manager that hides the gradients from an optimizer that steps other stages.

        Only a module that is not copied accumulates them in the optimizer's own parameters.
        """
        own = () if self._tables.entries else self._slots.parameters.values()
        held = [(parameter, parameter.grad) for parameter in own]
        for parameter, _ in held:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient

    @property
    def newest(self) -> int:
        """The newest version of the present run of the schedule."""
        return self._slots.newest

    def discard(self) -> None:
        """Drops all gradients, and puts the optimizer's parameters back into the module."""
        for leaves in (*self._leaves, self._slots.stepped):
            for leaf in leaves.values():
                leaf.grad = None
        self.rest()

    def history(self, delay: int) -> dict[str, dict[str, Tensor]]:
        """What forwards that read versions up to `delay` behind the newest need beside the optimizer's parameters.

        By name of the parameter, and by the number of the version where the newest is 0: the tensors themselves.
        """
        slots = self._slots
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in slots.stepped}
        for behind in range(delay + 1):
            slot = slots.tensors[slots.slot_of(max(slots.newest - behind, slots.oldest))]
            for name in slots.stepped if behind else slots.masters & slots.stepped.keys():
                kept[name][str(-behind)] = slot[name]
        return {name: versions for name, versions in kept.items() if versions}

    def restart(self, history: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Makes the newest version the version 0 of a new run of the schedule.

        `history`: the versions before it, as `history` returned them, for a run that continues another one.
        """
        slots = self._slots
        slots.first, slots.newest, slots.oldest = slots.slot_of(slots.newest), 0, 0
        self._publish({})
        for name in slots.stepped.keys() & (history or {}).keys():
            for version, tensor in (history or {})[name].items():
                slots.tensors[slots.slot_of(int(version))][name].copy_(tensor)
                slots.oldest = min(slots.oldest, int(version))


@dataclass(frozen=True, slots=True)
class _Tables:
    """Where a module holds its parameters."""

    entries: list[tuple[MutableMapping[str, Any], str, str]]
    """The table of a module, the key in it, and the name of the parameter."""
    lists: list[tuple[list[Any], int, str]]
    """Lists in attributes that hold parameters too, as those of recurrent modules do."""

    @classmethod
    def of(cls, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> "_Tables":
        """Finds the places in `module`. Raises `CaptureError` for a parameter in a place that cannot be pointed."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        found = cls([], [])
        for path, inner in module.named_modules():
            table, _ = tensor_tables(inner)
            found.entries.extend((table, key, names[id(p)]) for key, p in table.items() if id(p) in names)
            for key, value in vars(inner).items():
                if isinstance(value, list):
                    found.lists.extend((value, i, names[id(x)]) for i, x in enumerate(value) if id(x) in names)
                elif isinstance(value, tuple | dict) and not any(value is own for own in tensor_tables(inner)):
                    held = value.values() if isinstance(value, dict) else value
                    for name in (names[id(each)] for each in held if id(each) in names):
                        raise CaptureError(
                            f"{path}.{key} ({type(inner).__name__}) holds the parameter {name} in a "
                            f"{type(value).__name__}, which would keep one version of it: expected parameters in "
                            "attributes, a ParameterList or a list. Look it up in the forward"
                        )
        return found

    def point(self, leaves: Mapping[str, nn.Parameter]) -> None:
        for table, key, name in self.entries:
            table[key] = leaves[name]
        for held, index, name in self.lists:
            held[index] = leaves[name]

    def check(
        self,
        parameters: Mapping[str, nn.Parameter],
        leaves: Mapping[str, nn.Parameter],
        others: Sequence[Mapping[str, nn.Parameter]],
    ) -> None:
        """Raises `PenstockError` if the user changed one of `parameters`. `others`: leaves that other stages put."""
        for table, key, name in self.entries:
            parameter, held = parameters[name], table[key]
            if held is not parameter and not any(held is other.get(name) for other in others):
                raise PenstockError(
                    f"parameter {name}: another tensor was assigned to it after the pipeline was built, which would "
                    "not be trained. Expected the parameter that the pipeline was built with. Write in it instead "
                    "(with torch.no_grad(): parameter.copy_(...)), or build a new Pipeline"
                )
            if parameter.requires_grad is not leaves[name].requires_grad:
                raise PenstockError(
                    f"parameter {name}: requires_grad is {parameter.requires_grad} and was "
                    f"{leaves[name].requires_grad} when the pipeline was built. Expected no change. Freeze or unfreeze "
                    "parameters before the pipeline is built, or build a new Pipeline"
                )


def _hooks_on(parameter: nn.Parameter) -> tuple[Any, ...]:
    return gradient_hooks(parameter) + accumulated_hooks(parameter)


def _leaf_over(slot: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """A leaf over the memory of `slot`, with the hooks of `parameter`."""
    leaf = nn.Parameter(from_local_shard(slot, parameter), requires_grad=parameter.requires_grad)
    for hook in gradient_hooks(parameter):
        leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in accumulated_hooks(parameter):
        leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return leaf
