"""The live versions of one stage's weights.

The module is the user's own, and so are its parameters: the optimizer steps the objects that forwards read. A stage
whose schedule keeps n versions has n *slots*, each a full set of memory for the parameters. Before a forward or a
backward that reads another version than the last one, the parameters are pointed at its slot: ``.data`` is set.
Autograd saves a parameter itself, and its views with their memory, so that a backward reads what its forward read.
Between steps the parameters are the newest version. With one version nothing is pointed or copied.

Where forwards read other numbers than the optimizer steps (a lower precision, a prediction), a parameter has memory of
its own: its *master*, which the optimizer steps. An update writes the numbers for forwards into the next slot.

Parameters that are not trained are one tensor in all slots.

Where the versions are on the host, so are all slots, and the device has one *window*, to which the version is copied
that a forward or a backward reads. What autograd saved as a view of it reads what its forward read, too.

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
from operator import eq
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn

from penstock.capturing.chain import StageModule
from penstock.capturing.module_copies import Copies
from penstock.errors import PenstockError
from penstock.runtime.devices.staging import Memory, layout_of
from penstock.runtime.parameters.shards import local_shard, redistributed_like, set_local_shard
from penstock.torch_internals.modules import TENSOR_TABLES, tensor_tables
from penstock.torch_internals.tensors import copy_each, set_times_written, times_each_written
from penstock.torch_internals.unimported import PLAIN, is_dtensor


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
_Place: TypeAlias = tuple[MutableMapping[str, Any], str, nn.Parameter]
"""The table of a module, the key in it, and the parameter there."""


@dataclass(slots=True, eq=False)
class _Window:
    """Memory of one parameter on the device, for the version in use. All versions have memory on the host."""

    memory: Tensor
    slots: list[Tensor]
    slot: int = 0
    """Of the version that is shown."""
    written: bool = True
    """Whether it may differ from what is in its slot."""

    def show(self, slot: int) -> None:
        if slot != self.slot:
            self._keep()
            self.memory.copy_(self.slots[slot], non_blocking=True)
            self.slot = slot

    def make(self, slot: int) -> None:
        """What is shown will be written, and is the version of `slot` from now on."""
        self._keep()
        self.slot, self.written = slot, True

    def _keep(self) -> None:
        if self.written:
            self.slots[self.slot].copy_(self.memory, non_blocking=True)
            self.written = False


@dataclass(slots=True, eq=False)
class _Slots:
    """The memory of all versions, and which version is the newest."""

    parameters: dict[str, nn.Parameter]
    trained: dict[str, nn.Parameter]
    stepped: dict[str, nn.Parameter]
    """Those that are trained and updated here."""
    lenders: Mapping[str, "_Slots"]
    """The slots of the stage that updates a parameter, where that is another stage of this process."""
    masters: dict[str, Tensor]
    tensors: list[dict[str, Tensor]]
    """By slot, the local shard of each."""
    windows: dict[str, _Window]
    """Of those whose versions are on the host."""
    moved: dict[str, nn.Parameter]
    """Those whose memory is not always the same."""
    rows: list[list[Tensor]]
    """By slot, the memory of `moved`; none where a parameter is a `DTensor`, of another stage, or has a master or a
    window.
    """
    written: tuple[int, ...] = ()
    """How often each of `moved` had been written at the end of the last segment."""
    first: int = 0
    """The slot of version 0 of the present run of the schedule."""
    newest: int = 0
    oldest: int = 0
    """The first version of the present run; below 0 in one that continues another run."""

    @classmethod
    def of(
        cls,
        parameters: dict[str, nn.Parameter],
        versions: int,
        lenders: Mapping[str, "_Slots"],
        weights: ComputeWeights,
        host: Memory | None,
    ) -> "_Slots":
        masters = {name: local_shard(p) for name, p in parameters.items() if weights.differs(p)}
        tensors: list[dict[str, Tensor]] = [{} for _ in range(versions)]
        windows: dict[str, _Window] = {}
        for name, parameter in parameters.items():
            own = local_shard(parameter)
            if host is not None and versions > 1 and parameter.requires_grad:
                memory = own.to(weights.dtype_of(parameter), copy=True) if name in masters else own
                lent = lenders[name].windows[name] if name in lenders else None
                windows[name] = lent or _Window(memory, [host(layout_of(memory)) for _ in tensors])
            for number, slot in enumerate(tensors):
                if name in windows:
                    slot[name] = windows[name].slots[number]
                elif name in lenders:
                    slot[name] = lenders[name].tensors[number][name]
                elif name in masters:
                    slot[name] = own.to(weights.dtype_of(parameter), copy=True)
                else:
                    slot[name] = own if number == 0 or not parameter.requires_grad else torch.empty_like(own)
        for name in masters:
            cast(Any, parameters[name]).grad_dtype = parameters[name].dtype
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        moved = {name: p for name, p in trained.items() if versions > 1 or name in masters}
        apart = lenders or masters or windows or any(is_dtensor(p) for p in moved.values())
        return cls(
            parameters=parameters,
            trained=trained,
            stepped={name: p for name, p in trained.items() if name not in lenders},
            lenders=lenders,
            masters=masters,
            tensors=tensors,
            windows=windows,
            moved=moved,
            rows=[] if apart else [[slot[name] for name in moved] for slot in tensors],
        )

    def slot_of(self, version: int) -> int:
        return (self.first + version) % len(self.tensors)

    def between_steps(self, name: str) -> Tensor:
        """The memory of a parameter between steps: its master, or the newest version."""
        if name in self.lenders:
            return self.lenders[name].between_steps(name)
        return self.masters[name] if name in self.masters else self.shown(self.slot_of(self.newest), name)

    def shown(self, slot: int, name: str) -> Tensor:
        """The memory on the device that has a parameter's version in `slot` now."""
        if name not in self.windows:
            return self.tensors[slot][name]
        self.windows[name].show(slot)
        return self.windows[name].memory

    def stored(self, slot: int, name: str) -> Tensor:
        """The memory that has a parameter's version in `slot`, wherever it is."""
        window = self.windows.get(name)
        return self.tensors[slot][name] if window is None or window.slot != slot else window.memory

    def point(self, slot: int) -> None:
        if self.rows:
            for parameter, memory in zip(self.moved.values(), self.rows[slot], strict=True):
                parameter.data = memory
        else:
            for name, parameter in self.moved.items():
                set_local_shard(parameter, self.shown(slot, name))

    def rest(self) -> None:
        if self.rows:
            self.point(self.slot_of(self.newest))
        else:
            for name, parameter in self.moved.items():
                set_local_shard(parameter, self.between_steps(name))

    def at_rest(self) -> bool:
        """Whether the parameters have the memory that they have between steps."""
        if self.rows:
            own = map(Tensor.data_ptr, self.moved.values())
            return all(map(eq, own, map(Tensor.data_ptr, self.rows[self.slot_of(self.newest)])))
        places = ((local_shard(p), self.between_steps(name)) for name, p in self.moved.items())
        return all(found.data_ptr() == expected.data_ptr() for found, expected in places)

    def advance(self, version: int) -> None:
        """Makes the parameters a copy of the newest version, in the slot of `version`."""
        current, following = self.slot_of(self.newest), self.slot_of(version)
        self.newest = version
        moving = [] if self.rows else [name for name in self.stepped if name not in self.masters]
        if following == current or not (self.rows or moving):
            return
        if self.rows:
            # In one call: on a GPU, launching the copy of a small parameter takes longer than the copy.
            copy_each(self.rows[following], self.rows[current])
        elif self.windows:
            for name in moving:
                self.windows[name].show(current)
                self.windows[name].make(following)
        else:
            copy_each(
                [self.tensors[following][name] for name in moving], [self.tensors[current][name] for name in moving]
            )
        self.rest()

    def count_writes(self) -> None:
        """Notes how often the parameters were written in place."""
        self.written = times_each_written(self.moved.values())

    def forget_writes(self) -> None:
        """Has autograd forget the writes since `count_writes`: they were in another slot than its backwards read."""
        set_times_written(tuple(self.moved.values()), self.written)


@dataclass(slots=True, eq=False)
class Sharers:
    """Weights of stages and replicas of this process that have trained parameters in common, or of one alone."""

    pointed: _Slots | None = None
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
        slots = _Slots.of(dict(parameters), versions, lenders, compute_weights, host)
        self._hold(slots, module, sharers or Sharers(), compared=not swapped)

    def replica(self) -> "VersionedWeights":
        """Another replica of the stage in this process: the same weights, with buffers and state of its own."""
        other = VersionedWeights.__new__(VersionedWeights)
        other._hold(self._slots, Copies([self.stage]).of(self.stage), self._sharers, compared=False)
        return other

    def _hold(self, slots: _Slots, module: StageModule, sharers: Sharers, *, compared: bool) -> None:
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
