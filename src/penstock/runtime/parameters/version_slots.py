"""The memory of all versions of one stage's weights: a slot for each version, masters, and windows.

A stage whose schedule keeps n versions has n *slots*, each a full set of memory for the parameters. Version x lives in
slot x mod n. Parameters that are not trained are one tensor in all slots.

Where forwards read other numbers than the optimizer steps (a lower precision, a prediction), a parameter has memory of
its own: its *master*, which the optimizer steps. An update writes the numbers for forwards into the next slot.

Where the versions are on the host, so are all slots, and the device has one *window*, to which the version is copied
that a forward or a backward reads. What autograd saved as a view of it reads what its forward read, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import eq
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.runtime.devices.staging import Memory, layout_of
from penstock.runtime.parameters.shards import local_shard, set_local_shard
from penstock.torch_internals.tensors import copy_each, set_times_written, times_each_written
from penstock.torch_internals.unimported import is_dtensor


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
class Window:
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
class Slots:
    """The memory of all versions, and which version is the newest."""

    parameters: dict[str, nn.Parameter]
    trained: dict[str, nn.Parameter]
    stepped: dict[str, nn.Parameter]
    """Those that are trained and updated here."""
    lenders: Mapping[str, "Slots"]
    """The slots of the stage that updates a parameter, where that is another stage of this process."""
    masters: dict[str, Tensor]
    tensors: list[dict[str, Tensor]]
    """By slot, the local shard of each."""
    windows: dict[str, Window]
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
        lenders: Mapping[str, "Slots"],
        weights: ComputeWeights,
        host: Memory | None,
    ) -> "Slots":
        masters = {name: local_shard(p) for name, p in parameters.items() if weights.differs(p)}
        tensors: list[dict[str, Tensor]] = [{} for _ in range(versions)]
        windows: dict[str, Window] = {}
        for name, parameter in parameters.items():
            own = local_shard(parameter)
            if host is not None and versions > 1 and parameter.requires_grad:
                memory = own.to(weights.dtype_of(parameter), copy=True) if name in masters else own
                lent = lenders[name].windows[name] if name in lenders else None
                windows[name] = lent or Window(memory, [host(layout_of(memory)) for _ in tensors])
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
