"""Tensors that are at home on the host while they are not used: the state of optimizers, weights and gradients.

A tensor stays the same object, and its memory is exchanged: users and checkpoints read it where the model or the
optimizer has it, on the host. Which weights and gradients are at home, and when they are on the device for
computations, `residence.py` says.

An update goes through the parameters part by part, in the order of the optimizer, and each part begins with the same
options: what is at home of a part (state, weights, gradients) is copied to the device, the part is stepped, and its
state and weights are copied back. That is exact for optimizers that step each parameter by itself: it is tried. The
copies of the next part run beside the step of this one.

Laws of this file:
  1. In an update what is at home of two parts at most is on the device.
  2. When `settle` has returned, all copies have ended: the host may read what is at home.
  3. Of a state only memory that nothing else holds is moved: what else holds it would keep it, and not see the next
     step.
  4. Memory that a copy reads or writes is kept until the stream of the caller comes after the copy.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import PenstockError
from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.devices.host_stores import MemoryStore
from penstock.runtime.devices.staging import NOTHING_STAGED, Staged, layout_of
from penstock.runtime.parameters.group_options import options_of, set_options
from penstock.runtime.parameters.shards import by_size, local_shard, set_local_shard
from penstock.torch_internals.modules import step_hooks
from penstock.torch_internals.pytrees import tree_leaves
from penstock.torch_internals.tensors import storage_references
from penstock.torch_internals.unimported import is_dtensor

Key = TypeVar("Key")
_Part: TypeAlias = Mapping[Any, nn.Parameter]
_PART_BYTES, _PARTS = 2**26, 8


def in_parts(parameters: Mapping[Key, nn.Parameter], most_bytes: int = _PART_BYTES) -> list[dict[Key, nn.Parameter]]:
    """`parameters` in their order, in parts of `most_bytes` and of an eighth of them at most; a larger one is a part
    alone.
    """
    most = min(most_bytes, sum(local_shard(parameter).nbytes for parameter in parameters.values()) / _PARTS)
    return [{key: parameters[key] for key in part} for part in by_size(parameters.items(), most)]


class HostStates:
    """Moves tensors between `device` and homes in `store`."""

    def __init__(self, store: MemoryStore, device: torch.device) -> None:
        self.store, self._staging, self._device = store, store.staging, device
        self._homes = WeakIdKeyDictionary()
        """By tensor: its memory on the host."""
        self._reserved: defaultdict[Layout, list[Tensor]] = defaultdict(list)
        """Homes of states that are to come."""
        self._leaving: Staged = NOTHING_STAGED
        """What `send` copies."""
        self._sent: Sequence[Tensor] = ()
        """What it returned."""

    def memory(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A home for one such as `tensor`."""
        return self.store.memory((tensor.shape, _dense_strides(tensor), dtype or tensor.dtype))

    def move_home(self, tensors: Iterable[Tensor]) -> None:
        """Moves `tensors` home, one after the other: their memory is free then. Those in such memory stay in it."""
        for tensor in tensors:
            own = local_shard(tensor)
            if not self.store.holds(own):
                own, home = dense(own), self.memory(own)
                self._staging.follow(self._staging.to_host([own], lambda _, home=home: home, kept=True))  # type: ignore[misc]
                self.settle()
                own = home
            self._homes[tensor] = own
            set_local_shard(tensor, own)

    def send(self, tensors: Sequence[Tensor], homes: Sequence[Tensor]) -> Sequence[Tensor]:
        """Starts to copy `tensors` to `homes`. Returns tensors that are at home there. What was sent before is dropped,
        in the stream of the caller when it has been copied.
        """
        self._staging.follow(self._leaving)
        self._sent = [home.data for home in homes]
        for tensor, home in zip(self._sent, homes, strict=True):
            self._homes[tensor] = home
        given = iter(homes)
        self._leaving = tensors, self._staging.to_host(tensors, lambda _: next(given), kept=True)[1]
        return self._sent

    def drop_sent(self) -> None:
        """Drops what was sent, if it has been copied by now."""
        if self._leaving[1].query():
            self._leaving = NOTHING_STAGED

    def bring(self, tensors: Iterable[Any]) -> tuple[Sequence[Tensor], Staged]:
        """What is at home of `tensors`, and the copies of its memory, which have begun."""
        away = [tensor for tensor in tensors if self.is_home(tensor)]
        if {*map(id, away)} & {*map(id, self._sent)}:
            # The copies home and back are on streams that know nothing of each other.
            self._staging.follow(self._leaving)
        return away, self._staging.back_to_device([local_shard(tensor) for tensor in away])

    def arrive(self, tensors: Sequence[Tensor], copies: Staged) -> None:
        """Has what is computed from now on find `tensors` in what `bring` has copied."""
        self._staging.follow(copies)
        for tensor, memory in zip(tensors, copies[0], strict=True):
            set_local_shard(tensor, memory)

    def leave(self, tensors: Iterable[Any]) -> None:
        """Drops the memory of `tensors` on the device, of those that have homes: there they are as they were."""
        for tensor in tensors:
            if tensor in self._homes:
                set_local_shard(tensor, self._homes[tensor])

    def visit(
        self, parts: Sequence[_Part], states: Mapping[Tensor, Any], gradients: Mapping[Any, Tensor]
    ) -> Iterator[_Part]:
        """Each of `parts`, while it is on the device with what `states` and `gradients` have of its parameters."""

        def all_of(part: _Part) -> list[Any]:
            return [*_tensors_of(states, part), *part.values(), *map(gradients.get, part)]

        coming, leaving = self.bring(all_of(parts[0])), NOTHING_STAGED
        for part, following in zip(parts, (*parts[1:], {}), strict=True):
            self.arrive(*coming)
            # The part before the present one has left when the next one comes.
            self._staging.follow(leaving)
            leaving = NOTHING_STAGED
            coming = self.bring(all_of(following))
            try:
                yield part
            except GeneratorExit:
                # The step has failed.
                self._staging.follow(coming[1])
                self.settle()
                self.leave(all_of(part))
                raise
            self.leave(map(gradients.get, part))
            leaving = self._send([*_tensors_of(states, part), *part.values()])
        self._staging.follow(leaving)

    def steps(
        self, optimizers: Iterable[torch.optim.Optimizer], stepped: Mapping[str, nn.Parameter]
    ) -> Iterator[torch.optim.Optimizer]:
        """Each optimizer for every part of what it steps: while nothing else has gradients, and the state is there."""
        gradients = {id(parameter): parameter.grad for parameter in stepped.values() if parameter.grad is not None}
        for parameter in stepped.values():
            parameter.grad = None
        for optimizer in optimizers:
            own = {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) in gradients}
            # The values themselves: a tensor among them may be the user's.
            begun = [dict(group) for group in optimizer.param_groups]
            # With them come their gradients, and the weights themselves.
            most = _PART_BYTES // 4 if any(map(self.is_home, own.values())) else _PART_BYTES
            for part in self.visit(in_parts(own, most), optimizer.state, gradients):
                set_options(optimizer, begun)
                for key, parameter in part.items():
                    parameter.grad = gradients[key]
                yield optimizer
                for parameter in part.values():
                    parameter.grad = None

    def reserve(self, states: Iterable[tuple[nn.Parameter, torch.dtype]]) -> None:
        """Takes room for states as large as their parameters: without it no update shall begin."""
        for parameter, dtype in states:
            home = self.memory(local_shard(parameter), dtype)
            self._reserved[layout_of(home)].append(home)

    def put_away(self, states: Mapping[Tensor, Any]) -> None:
        """Moves what is on the device of `states` to the host."""
        for parameter, state in states.items() if self._device.type != "cpu" else ():
            if parameter in self._homes:
                # Made where the parameter is, at home.
                large = [each for each in tree_leaves(state) if isinstance(each, Tensor) and each.numel() > 1]
                self.move_home(each for each in large if each.device.type == "cpu" and not self.is_home(each))
        self._staging.follow(self._send(tree_leaves([*states.values()])))
        self.settle()

    def settle(self) -> None:
        """Waits for all that is in the stream of the caller, and for what was sent."""
        self._staging.follow(self._leaving)
        self._leaving = NOTHING_STAGED
        self._staging.in_place(())[1].synchronize()
        self.store.check()

    def _send(self, state: Iterable[Any]) -> Staged:
        """Starts to copy `state` to the host. Returns its memory on the device, to be kept until that is done."""
        present = [tensor for tensor in state if self._is_movable(tensor)]
        memories = [local_shard(tensor) for tensor in present]
        for tensor, memory in zip(present, memories, strict=True):
            if tensor not in self._homes or layout_of(self._homes[tensor]) != layout_of(memory):
                reserved = self._reserved[layout_of(memory)]
                self._homes[tensor] = reserved.pop() if reserved else self.store.memory(layout_of(memory))
            set_local_shard(tensor, self._homes[tensor])
        homes = iter([self._homes[tensor] for tensor in present])
        return memories, self._staging.to_host(memories, lambda _: next(homes), kept=True)[1]

    def is_home(self, tensor: Any) -> bool:
        """Whether `tensor` has a home, and is there."""
        if tensor not in self._homes:
            return False
        memory, home = local_shard(tensor), self._homes[tensor]
        return bool(memory.device == home.device and memory.data_ptr() == home.data_ptr())

    def _is_movable(self, value: Any) -> bool:
        """Whether `value` is on the device and has a home; or is of a state, of some size, in memory of its own."""
        if not isinstance(value, Tensor) or self.is_home(value):
            return False
        if isinstance(value, nn.Parameter):
            return value in self._homes
        memory = local_shard(value)
        if type(memory) is not Tensor or memory.layout is not torch.strided or memory.numel() < 2:
            return False
        if memory.stride() != _dense_strides(memory):
            return False
        # `memory` is another tensor of the same storage.
        return memory.device.type == self._device.type and storage_references(memory.untyped_storage()) == 2


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


def dense(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it if its elements are not all of a piece of memory."""
    return tensor if tensor.stride() == _dense_strides(tensor) else tensor.clone()


def _tensors_of(states: Mapping[Tensor, Any], part: _Part) -> list[Any]:
    return tree_leaves([states.get(parameter) for parameter in part.values()])


def check_steps_apart(
    optimizer: torch.optim.Optimizer, *, of_replicas: bool = False
) -> list[tuple[nn.Parameter, torch.dtype]]:
    """The parameters of `optimizer` and the types of the states as large as each that it will have; not `of_replicas`.

    Raises `PenstockError` if small parameters have other numbers where it steps them in halves, or where two like it
    do, as those `of_replicas`.
    """
    small, states = list[Tensor](), list[Mapping[str, Any]]()
    found = "hooks on its steps" if step_hooks(optimizer) and not of_replicas else ""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"] if not of_replicas]
    if any(is_dtensor(parameter) and parameter.is_cuda for parameter in own):
        found = "DTensors of a GPU, which cannot be put together on the host"
    try:
        small, states = ([], []) if found else _small_steps(optimizer, 1, of_replicas)
        if not all(map(torch.equal, small, _small_steps(optimizer, 2, of_replicas)[0] if small else ())):
            found = "other numbers where small ones are stepped in halves: it counts its steps, or sums over all"
    except Exception as error:
        found = f"a failure where small ones are stepped: {type(error).__name__}: {error}"
    if found:
        option, reason = "state_on_host=", "an update has a step for each part of them"
        if of_replicas:
            option, reason = "shard_optimizer=", "each replica steps a part of them"
        raise PenstockError(
            f"{option}: expected an optimizer that steps each parameter by itself, since {reason}, found "
            f"{type(optimizer).__qualname__} with {found}. Use another one, or leave {option} out"
        )
    return [
        (parameter, value.dtype)
        for parameter, made, state in zip(own, small, states, strict=not of_replicas)
        for value in state.values()
        if isinstance(value, Tensor) and value.shape == made.shape and local_shard(parameter).numel() > 1
    ]


def _small_steps(
    optimizer: torch.optim.Optimizer, parts: int, of_replicas: bool = False
) -> tuple[list[Tensor], list[Mapping[str, Any]]]:
    """Small parameters in the place of those of `optimizer`, after some steps in `parts`, or `of_replicas`, and the
    state of each.
    """
    groups: list[dict[str, Any]] = [{**options, "params": []} for options in options_of(optimizer)]
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        shards = map(local_shard, group["params"])
        shapes = [shard.new_ones([min(size, 2) for size in shard.shape]) for shard in shards]
        # A replica may own a single parameter.
        own["params"] = [nn.Parameter(shape.clone()) for shape in shapes for _ in range(1 + of_replicas)]
    small: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
    homes = {id(parameter): place * parts // len(small) for place, parameter in enumerate(small)}
    takes, defaults = inspect.signature(type(optimizer)).parameters, optimizer.defaults
    states: dict[Tensor, Mapping[str, Any]] = {}
    replicas, parts = (parts, 1) if of_replicas else (1, parts)
    for replica in range(replicas):
        chosen = [[p for p in own["params"] if replicas == 1 or homes[id(p)] == replica] for own in groups]
        made = type(optimizer)(
            [{**own, "params": some} for own, some in zip(groups, chosen, strict=True) if some or replicas == 1],
            **{key: value for key, value in defaults.items() if key in takes},
        )
        with torch.random.fork_rng({parameter.device for parameter in small if parameter.is_cuda}):
            for step in range(1, 4):
                begun = [dict(group) for group in made.param_groups]
                for part in range(parts):
                    set_options(made, begun)
                    for place, parameter in enumerate(small):
                        present = parts == 1 or homes[id(parameter)] == part
                        parameter.grad = torch.full_like(parameter, step + place) if present else None
                    made.step()
        states.update(made.state)
    return [parameter.detach() for parameter in small], [states.get(parameter, {}) for parameter in small]
