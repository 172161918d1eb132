"""The live versions of one stage's weights.

The module is the user's own, and so are its parameters: the optimizer steps the objects that forwards read. Each
version has memory of its own, a *slot* (`version_slots`). Before a forward or a backward that reads another version
than the last one, the parameters are pointed at its slot: ``.data`` is set. Autograd saves a parameter itself, and its
views with their memory, so that a backward reads what its forward read. Between steps the parameters are the newest
version. With one version nothing is pointed or copied.

Gradients accumulate in ``.grad``. Replicas of a stage that live in one process share its slots and parameters, and
stages may share a weight. Such *sharers* set their gradients aside before another one of them accumulates. All
replicas but the first are copies of the module, with buffers and state of their own. The first of them to come to an
update makes it; the others find it made.

Laws of this file:
  1. Version x lives in slot x mod n. The schedule guarantees, and the verifier proves, that no slot is overwritten
     while it is needed; nothing is checked again here. It holds for replicas together: all of them have added their
     gradients before one of them updates.
  2. An update copies the newest slot to the next one and steps in place: one copy of the weights, none where n is 1.
     With masters the copy comes after the step, and casts. In a window it steps what is there, and writes no slot: a
     version that was made there is copied to its slot when another one is to be there.
  3. Gradients have the type of the parameters between steps: autograd casts them before it adds them up.
  4. A stage takes its microbatches in ascending order, so that it accumulates for one update at a time.
  5. Between calls of the pipeline ``.grad`` is the user's. As in a loop that calls ``zero_grad()`` before its backward,
     what the user left there is dropped, and what is accumulated for a coming update is kept elsewhere.
  6. It depends on no microbatch, peer or optimizer.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn

from penstock.capturing.chain import StageModule
from penstock.capturing.module_copies import Copies
from penstock.errors import PenstockError
from penstock.runtime.devices.staging import Memory
from penstock.runtime.parameters.shards import local_shard, redistributed_like
from penstock.runtime.parameters.version_slots import AS_STEPPED, ComputeWeights, Slots
from penstock.torch_internals.modules import TENSOR_TABLES, tensor_tables
from penstock.torch_internals.unimported import PLAIN

_Place: TypeAlias = tuple[MutableMapping[str, Any], str, nn.Parameter]
"""The table of a module, the key in it, and the parameter there."""


@dataclass(slots=True, eq=False)
class Sharers:
    """Weights of stages and replicas of this process that have trained parameters in common, or of one alone."""

    pointed: Slots | None = None
    """Those whose parameters are pointed at a slot; None while all are as between steps."""
    slot: int = 0
    accumulating: "VersionedWeights | None" = None
    """Those whose gradients are in ``.grad``."""


class VersionedWeights:
    """Holds `versions` slots for the parameters of `module`, which are named by `parameters`.

    `lent`: the parameters that another stage of this process uses too and updates, with the weights of that stage,
    which must have equally many versions, and `sharers` in common. `compute_weights`: the weights that forwards read
    instead of the optimizer's parameters. `swapped`: whether the module itself puts others in the place of its
    parameters. `host`: returns memory of the host, for several versions; without it they are on the device.
    """

    def __init__(
        self,
        module: StageModule,
        parameters: Mapping[str, nn.Parameter],
        versions: int,
        *,
        lent: Mapping[str, "VersionedWeights"] | None = None,
        sharers: Sharers | None = None,
        compute_weights: ComputeWeights = AS_STEPPED,
        swapped: bool = False,
        host: Memory | None = None,
    ) -> None:
        lenders = {name: weights._slots for name, weights in (lent or {}).items()}
        slots = Slots.of(dict(parameters), versions, lenders, compute_weights, host)
        self._hold(slots, module, sharers or Sharers(), compared=not swapped)

    def replica(self) -> "VersionedWeights":
        """Another replica of the stage in this process: the same weights, with buffers and state of its own."""
        other = VersionedWeights.__new__(VersionedWeights)
        other._hold(self._slots, Copies([self.stage]).of(self.stage), self._sharers, compared=False)
        return other

    def _hold(self, slots: Slots, module: StageModule, sharers: Sharers, *, compared: bool) -> None:
        self._slots, self._sharers = slots, sharers
        self.aside: dict[str, Tensor] = {}
        """Accumulated gradients that are not in ``.grad``."""
        self.stage = module
        """The stage's module, over the weights that its parameters were last pointed at."""
        self.parameters = slots.parameters
        """The model's own parameters, which the optimizer steps."""
        self.trained = slots.trained
        """Those that are trained, here or by another stage of this process."""
        self.stepped = slots.stepped
        """Those that are trained, and not updated by another stage of this process."""
        self._read_module(compared=compared)

    def _read_module(self, *, compared: bool) -> None:
        """Notes where the module has its parameters, unless they are not `compared`."""
        own = set(map(id, self.parameters.values()))
        tables = [tensor_tables(inner)[0] for inner in self.stage.modules()] if compared else []
        self._places: list[_Place] = [(table, key, p) for table in tables for key, p in table.items() if id(p) in own]
        held = [vars(inner).get(name) for inner in self.stage.modules() for name in TENSOR_TABLES if compared]
        self._tables = [table for table in held if isinstance(table, dict)]
        """What its modules register."""
        self._sizes = list(map(len, self._tables))

    def replace(self, module: StageModule) -> None:
        """Puts `module`, with the same parameters, in the place of the stage's."""
        self.stage = module
        self._read_module(compared=bool(self._places))

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The module's buffers, of which there is one version only."""
        return tuple(self.stage.buffers())

    def begin(self) -> None:
        """Prepares for a segment that trains, and drops the gradients that the user's own backwards have left.

        Raises `PenstockError` if a parameter was replaced or frozen since the pipeline was built.
        """
        slots, same = self._slots, list(map(len, self._tables)) == self._sizes
        try:
            for table, key, parameter in self._places:
                same = same and table[key] is parameter
        except KeyError:
            same = False
        if not same:
            self._check_places()
        for name, parameter in slots.parameters.items():
            if parameter.requires_grad is not (name in slots.trained):
                raise PenstockError(
                    f"parameter {name}: requires_grad is {parameter.requires_grad} and was {name in slots.trained} "
                    "when the pipeline was built. Expected no change. Freeze or unfreeze parameters before the "
                    "pipeline is built, or build a new Pipeline"
                )
            if parameter.requires_grad:
                parameter.grad = None
        if not slots.moved:
            return
        if not slots.at_rest():
            self._refuse_memory()
        for window in slots.windows.values():
            # By the user, between steps.
            window.written = True
        if slots.written:
            slots.forget_writes()

    def _refuse_memory(self) -> NoReturn:
        found = ((name, local_shard(p), self._slots.between_steps(name)) for name, p in self._slots.moved.items())
        name = next(name for name, own, expected in found if own.data_ptr() != expected.data_ptr())
        raise PenstockError(
            f"parameter {name}: its memory was replaced after the pipeline was built (parameter.data = ...), and its "
            "schedule keeps several versions of the weights in memory of their own. Expected the same memory. Write in "
            "it instead (with torch.no_grad(): parameter.copy_(...)), or build a new Pipeline"
        )

    def _check_places(self) -> None:
        """Raises `PenstockError` unless the modules have the parameters that they had, under the same names."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        moved = [names[id(p)] for table, key, p in self._places if table.get(key) is not p]
        now = {id(parameter): path for path, parameter in self.stage.named_parameters()}
        lost = [*moved, *(name for name, parameter in self.parameters.items() if id(parameter) not in now)]
        added = now.keys() - set(map(id, self.parameters.values()))
        if lost or added:
            what = f"parameter {lost[0]}: it was replaced, renamed or removed" if lost else f"a new {now[added.pop()]}"
            raise PenstockError(
                f"{what}, after the pipeline was built. Expected the parameters that it was built with, which its "
                "optimizer steps. Write in them instead (with torch.no_grad(): parameter.copy_(...)), or build a new "
                "Pipeline"
            )
        self._read_module(compared=True)

    def point(self, version: int) -> None:
        """Points the parameters at the weights of `version`, for a forward, or for a backward of one: autograd reads
        them, and code such as `torch.utils.checkpoint` computes a forward again.
        """
        slots, sharers = self._slots, self._sharers
        if not slots.moved:
            return
        slot = slots.slot_of(version)
        if sharers.pointed is not slots or sharers.slot != slot:
            if sharers.pointed is not slots:
                self._unpoint()
            slots.point(slot)
            sharers.pointed, sharers.slot = slots, slot

    def accumulate(self, version: int) -> None:
        """Prepares for a backward at `version` that adds to the gradients of the weights."""
        sharers = self._sharers
        if sharers.accumulating is not self:
            self.set_aside()
            for name, gradient in self.aside.items():
                self.trained[name].grad = gradient
            self.aside, sharers.accumulating = {}, self
        if self._slots.moved:
            self.point(version)

    def set_aside(self) -> None:
        """Takes gradients that have accumulated out of ``.grad``, until the next backward that adds to them."""
        holder, self._sharers.accumulating = self._sharers.accumulating, None
        if holder is not None and holder is not self:
            holder.set_aside()
        for name, parameter in self.trained.items():
            if (gradient := parameter.grad) is not None:
                # A backward of another stage may have reached the parameter before, through the loss.
                self.aside[name] = self.aside[name] + gradient if name in self.aside else gradient
                parameter.grad = None

    def rest(self) -> None:
        """Ends a segment: the user finds the newest weights in the parameters, and no gradients."""
        self.set_aside()
        if self._sharers.pointed is not None:
            self._unpoint()
        if self._slots.moved:
            self._slots.count_writes()

    def _unpoint(self) -> None:
        """Makes the parameters the newest version."""
        if self._sharers.pointed is not None:
            self._sharers.pointed.rest()
            self._sharers.pointed = None

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients that the backwards since the last call have accumulated, by name; parameters without one are
        left out.
        """
        gradients = {}
        for name, parameter in self.trained.items():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                # Autograd may leave it as a sum over the mesh that is still to be taken.
                gradients[name] = gradient if type(gradient) in PLAIN else redistributed_like(gradient, parameter)
        return gradients

    def begin_update(self, version: int, gradients: Mapping[str, Tensor]) -> None:
        """Makes the parameters a copy of version `version - 1` in the slot of `version`, with `gradients`; others have
        been set aside.
        """
        slots = self._slots
        if self._sharers.pointed is not None:
            self._unpoint()
        if slots.moved:
            slots.count_writes()
            slots.advance(version)
        else:
            slots.newest = version
        for name, parameter in self.stepped.items():
            parameter.grad = gradients.get(name)

    def end_update(self, published: Mapping[str, Tensor] | None = None) -> None:
        """Ends an update: removes the gradients of the optimizer's parameters, and publishes the newest version.

        `published`: by name, the weights that forwards read instead of those parameters.
        """
        for parameter in self.stepped.values():
            parameter.grad = None
        if self._slots.written:
            self._slots.forget_writes()
        if self._slots.masters:
            self._publish(published or {})

    def _publish(self, published: Mapping[str, Tensor]) -> None:
        """Writes the newest version of the parameters with masters into its slot."""
        slots = self._slots
        slot = slots.slot_of(slots.newest)
        for name in self.stepped.keys() & slots.masters.keys():
            if name in slots.windows:
                slots.windows[name].make(slot)
            slots.stored(slot, name).copy_(local_shard(published[name]) if name in published else slots.masters[name])

    @property
    def newest(self) -> int:
        """The newest version of the present run of the schedule."""
        return self._slots.newest

    def history(self, delay: int) -> dict[str, dict[str, Tensor]]:
        """What forwards that read versions up to `delay` behind the newest need beside the optimizer's parameters.

        By name of the parameter, and by the number of the version where the newest is 0: the tensors themselves.
        """
        slots = self._slots
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in self.stepped}
        for behind in range(delay + 1):
            slot = slots.slot_of(max(slots.newest - behind, slots.oldest))
            for name in self.stepped if behind else self.stepped.keys() & slots.masters.keys():
                kept[name][str(-behind)] = slots.stored(slot, name)
        return {name: versions for name, versions in kept.items() if versions}

    def restart(self, history: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Makes the newest version the version 0 of a new run of the schedule.

        `history`: the versions before it, as `history` returned them, for a run that continues another one.
        """
        slots = self._slots
        slots.first, slots.newest, slots.oldest = slots.slot_of(slots.newest), 0, 0
        self._publish({})
        for name in self.stepped.keys() & (history or {}).keys():
            for version, tensor in (history or {})[name].items():
                slots.stored(slots.slot_of(int(version)), name).copy_(tensor)
                slots.oldest = min(slots.oldest, int(version))
