"""Every stage's weights in every version, kept in lists: what the formulas of the papers read."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.lr_scheduler import LRScheduler

from penstock.capturing.chain import LayerChain
from penstock.capturing.randomness import part_seed, seeded
from penstock.oracle.batches import sizes_of
from penstock.scheduling.definitions import Guarantees
from penstock.torch_internals.modules import tensor_tables
from penstock.training.optimizers import make_optimizers, make_scheduler
from penstock.training.recipes import Recipe
from penstock.training.scaling import LossScaler
from penstock.training.update_corrections import HookStates
from penstock.training.wire_codecs import WireCodec, encodes, round_to_wire
from penstock.values.plans import Plan

Weights = dict[str, nn.Parameter]
Buffers = dict[tuple[nn.Module, str], Tensor]
"""By the module that holds each, and its name there: a forward may assign another tensor."""
Hooks = tuple[Sequence[Any], Sequence[Any]]
"""The hooks on a gradient, and those after it was added up."""


@dataclass(slots=True)
class _Stage:
    """All the versions of one stage's weights, and what each replica has of its own."""

    newest: Weights
    stepped: Weights
    """What its optimizers step: `newest`; or where all stages update at once those of all at the first, none later."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: list[LRScheduler]
    modules: Sequence[nn.Module]
    """Its layers."""
    buffers: list[Buffers]
    """What each replica has in the places of the model's buffers; nothing for the first one, which has these."""
    replicas: int
    split: bool
    size: int
    """The microbatches that an update is of, where that is not a minibatch."""
    delay: int
    """How old gradients are when they are used, once the pipeline is full."""
    hooks: HookStates
    dtype: torch.dtype | None
    """The type in which versions keep float32 tensors of two dimensions or more that are trained."""
    hooks_on: Mapping[str, Hooks]
    """By parameter name, the user's hooks on it."""
    versions: list[list[Weights]] = field(default_factory=list)
    """Version x is entry x: for each replica a copy of its own, with the gradients that it took at it."""

    def step(self) -> dict[str, Tensor]:
        """One update; what forwards read of it where that is not `newest`."""
        before = {name: p.detach().clone() for name, p in self.stepped.items() if p.grad is not None}
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return self.hooks.after_step(before, self.stepped, self.delay)

    def publish(self, readings: Mapping[str, Tensor] | None = None) -> None:
        """A new version: of `readings` where there are any, else of the newest weights."""
        read = {name: (readings or {}).get(name, weights) for name, weights in self.newest.items()}
        self.versions.append([{name: self._version(name, read[name]) for name in read} for _ in range(self.replicas)])

    def end_update(self, version: int, readings: Mapping[str, Tensor]) -> None:
        """Drops the gradients at `version`, and makes a new one."""
        for weights in self.versions[version]:
            for weight in weights.values():
                weight.grad = None
        self.publish(readings)

    def _version(self, name: str, weights: Tensor) -> nn.Parameter:
        own = self.newest[name]
        if not own.requires_grad:
            # There is one of it: a forward may write it, such as the average of other weights, or pack it.
            return own
        lowered = self.dtype is not None and own.ndim > 1 and own.dtype == torch.float32
        version = nn.Parameter(weights.detach().to(self.dtype if lowered else own.dtype, copy=True))
        if lowered:
            setattr(version, "grad_dtype", own.dtype)  # noqa: B010
        before, after = self.hooks_on.get(name, ((), ()))
        for hook in before:
            version.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in after:
            version.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return version

    def runners(self, microbatch: int) -> list[int]:
        """The replicas that take `microbatch`."""
        return list(range(self.replicas)) if self.split else [microbatch % self.replicas]


class Training:
    """The weights of every stage in every version."""

    def __init__(
        self, chain: LayerChain, plan: Plan, recipe: Recipe, guarantees: Guarantees, hooks_on: Mapping[str, Hooks]
    ) -> None:
        """`hooks_on`: the user's hooks by parameter name."""
        sizes = guarantees.microbatches_per_update
        self._clip, self._codec = recipe.clip_grad_norm, recipe.codec
        self._overflown: list[tuple[int, bool]] = []
        """The updates of the last stage that the loss scale has not settled, and whether each was skipped."""
        self.scales = None if recipe.scaling is None else LossScaler(recipe.scaling)
        self._chain = chain
        self._stage_of = [index for index, stage in enumerate(plan.stages) for _ in range(stage.start, stage.stop)]
        self._names: dict[int, str] = {}
        for name, parameter in chain.parameters.items():
            self._names.setdefault(id(parameter), name)
        self._stages: list[_Stage] = []
        at_once = plan.definition.updates_at_once
        # What is not trained is one tensor for all stages, since a forward may write it.
        common = _copy({name: p for name, p in chain.parameters.items() if at_once or not p.requires_grad})
        every: Weights = {}
        for index, replicas in enumerate(plan.replicas):
            modules = [
                layer.module for layer, stage in zip(chain.layers, self._stage_of, strict=True) if stage == index
            ]
            used = {id(p) for module in modules for p in module.parameters()}
            newest = _copy({n: p for n, p in chain.parameters.items() if id(p) in used and self._names[id(p)] == n})
            newest |= {name: common[name] for name in newest if name in common}
            every |= newest
            split = plan.routing == "split" and max(plan.replicas) > 1
            stage = _Stage(
                newest=newest,
                stepped={} if at_once else newest,
                optimizers=(),
                schedulers=[],
                modules=modules,
                buffers=[{}, *(_copies_of_buffers(modules) for _ in range(1, replicas))],
                replicas=replicas,
                split=split,
                size=sizes[index],
                delay=guarantees.delays[index],
                hooks=HookStates(recipe.hooks),
                dtype=recipe.version_dtype,
                hooks_on=hooks_on,
            )
            stage.publish()
            self._stages.append(stage)
        if at_once:
            self._stages[0].stepped = every
        for stage in self._stages:
            stage.optimizers = make_optimizers(recipe.optimizer, stage.stepped)
            stage.schedulers = [make_scheduler(recipe.lr_scheduler, o) for o in stage.optimizers if recipe.lr_scheduler]

    def forward(
        self, inputs: dict[str, Tensor], samples: int, versions: Sequence[int], microbatch: int, seed: int
    ) -> list[Any]:
        """The model's output for one microbatch: one, or one for each part that the last stage's replicas take."""
        # Of every value its parts: the rows that each of the replicas of the stage at hand takes.
        values = {name: [tensor] for name, tensor in inputs.items()}
        places: dict[str, int] = {}
        """By value that a layer made, the last stage that made or read it."""
        parts = 1
        for index, layer in enumerate(self._chain.layers):
            stage = self._stages[self._stage_of[index]]
            runners = stage.runners(microbatch)
            if len(runners) != parts:
                parts = len(runners)
                values = {name: self._part(name, pieces, samples, parts) for name, pieces in values.items()}
            self._carry(values, places, layer.inputs, self._stage_of[index])
            results = []
            for part, replica in enumerate(runners):
                arguments = tuple(values[name][part] for name in layer.inputs)
                with seeded(part_seed(seed, part), index, arguments) if layer.random else nullcontext():
                    results.append(self._run(layer.module, stage, replica, versions[self._stage_of[index]], arguments))
            values.update(zip(layer.outputs, map(list, zip(*results, strict=True)), strict=True))
            places.update(dict.fromkeys(layer.outputs, self._stage_of[index]))
        self._carry(values, places, self._chain.output.values, self._stage_of[-1])
        return [
            self._chain.output.build([values[name][part] for name in self._chain.output.values])
            for part in range(parts)
        ]

    def _carry(self, values: dict[str, list[Tensor]], places: dict[str, int], names: Iterable[str], stage: int) -> None:
        """Rounds those of the values `names` that come to `stage` from another one."""
        for name in names:
            if self._codec is not None and places.get(name, stage) != stage:
                values[name] = [_rounded(piece, self._codec) for piece in values[name]]
                places[name] = stage

    def _part(self, name: str, pieces: list[Tensor], samples: int, parts: int) -> list[Tensor]:
        """The value `name`, so far in `pieces`, in `parts`; an input without a batch dimension goes whole to each."""
        if name in self._chain.inputs.names and name not in self._chain.inputs.batched:
            return pieces[:1] * parts
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return list(torch.split(whole, sizes_of(samples, parts)))

    def _run(
        self, module: nn.Module, stage: _Stage, replica: int, version: int, arguments: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        with self._put(module, stage, replica, version):
            return tuple(module(*arguments))

    @contextmanager
    def pointed(self, versions: Sequence[int], microbatch: int) -> Iterator[None]:
        """All modules hold the weights of `versions` in this block: what is computed again in a backward reads them."""
        with ExitStack() as stack:
            for layer, index in zip(self._chain.layers, self._stage_of, strict=True):
                stage = self._stages[index]
                runner = stage.runners(microbatch)[0]
                stack.enter_context(self._put(layer.module, stage, runner, versions[index]))
            yield

    @contextmanager
    def _put(self, module: nn.Module, stage: _Stage, replica: int, version: int) -> Iterator[None]:
        """`module` holds the weights of `version` and the buffers of `replica` in this block."""
        own, buffers = stage.versions[version][replica], stage.buffers[replica]
        put: list[tuple[Any, Any, nn.Parameter]] = []
        """Where a module holds a parameter, and that parameter."""
        kept: list[tuple[Any, tuple[nn.Module, str], Tensor]] = []
        for inner in module.modules():
            parameters, own_buffers = tensor_tables(inner)
            put += [(parameters, key, p) for key, p in parameters.items() if id(p) in self._names]
            if replica:
                kept += [(own_buffers, (inner, key), b) for key, b in own_buffers.items() if b is not None]
            # Recurrent modules hold their parameters in a list, too.
            lists = [value for value in vars(inner).values() if isinstance(value, list)]
            put += [(found, i, p) for found in lists for i, p in enumerate(found) if id(p) in self._names]
        for table, key, parameter in put:
            table[key] = own[self._names[id(parameter)]]
        for table, place, buffer in kept:
            table[place[1]] = buffers.setdefault(place, buffer.clone())
        try:
            yield
        finally:
            for table, key, parameter in put:
                table[key] = parameter
            for table, place, buffer in kept:
                buffers[place] = table[place[1]]
                table[place[1]] = buffer

    def update_rounds(self, versions: Sequence[int], microbatches: int, last: bool = False) -> None:
        """The updates of the stages for which a round ends after `microbatches` since the last drain.

        `last`: no more come, so that rounds that are not full end too; the full ones have been updated before.
        """
        due: dict[int, dict[int, int]] = {}
        for index, stage in enumerate(self._stages):
            rest = microbatches % stage.size
            if bool(rest) == last:
                due.setdefault(rest or stage.size, {})[index] = versions[index]
        for count, together in due.items():
            self.update(together, count)

    def update(self, versions: Mapping[int, int], count: int = 1) -> None:
        """One optimizer step of the stages in `versions` on their newest weights, with the gradients accumulated there
        divided by `count`.
        """
        gradients: dict[str, Tensor] = {}
        replicas = max(self._stages[index].replicas for index in versions)
        for replica in range(replicas):
            own: dict[str, Tensor] = {}
            for index, version in versions.items():
                if replica < self._stages[index].replicas:
                    for name, weight in self._stages[index].versions[version][replica].items():
                        if weight.grad is not None:
                            # Weights that several stages share take the sum of their gradients, in the stages' order.
                            own[name] = own[name] + weight.grad if name in own else weight.grad
            for name, gradient in own.items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        for index in versions:
            scale = 1.0 if self.scales is None else self.scales.scale_of(len(self._stages[index].versions))
            for name, parameter in self._stages[index].newest.items():
                parameter.grad = gradients[name] / count / scale if name in gradients else None
        norms = self._norms(versions)
        overflow = self.scales is not None and not all(norm.isfinite() for norm in norms)
        readings: dict[str, Tensor] = {}
        for index in versions:
            stage = self._stages[index]
            if self._clip is not None:
                trained = [parameter for parameter in stage.stepped.values() if parameter.grad is not None]
                total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
                clip_grads_with_norm_(trained, self._clip, total)
            if not overflow:
                readings |= stage.step()
            if self.scales is not None and index == len(self._stages) - 1:
                self._overflown.append((len(stage.versions), overflow))
        for index, version in versions.items():
            self._stages[index].end_update(version, readings)

    def _norms(self, indices: Iterable[int]) -> list[Tensor]:
        """The norms of the gradients of the stages `indices`, in the order of the model's parameters."""
        if self._clip is None and self.scales is None:
            return []
        newest = {name: p for index in indices for name, p in self._stages[index].newest.items()}
        ordered = (newest[name].grad for name in self._chain.parameters if name in newest)
        return [torch.linalg.vector_norm(gradient) for gradient in ordered if gradient is not None]

    def settle_scale(self, wait: int = 0) -> None:
        """Lowers or raises the scale by the updates so far, except the last `wait`."""
        while self.scales is not None and len(self._overflown) > wait:
            self.scales.update(*self._overflown.pop(0))

    def share_buffers(self) -> None:
        """Replicas take over the buffers of the first one."""
        for stage in self._stages:
            stage.buffers[1:] = [_copies_of_buffers(stage.modules) for _ in stage.buffers[1:]]

    def restart(self) -> None:
        """The newest version becomes version 0: the pipeline was drained."""
        for stage in self._stages:
            stage.versions.clear()
            stage.publish()
        self.settle_scale()
        if self.scales is not None:
            self.scales.restart()

    def state(self) -> dict[str, Tensor]:
        """The final weights and buffers under all the model's names."""
        weights = {name: p.detach() for stage in self._stages for name, p in stage.newest.items()}
        # What no layer uses is as it was.
        named = {name: weights.get(self._names[id(p)], p.detach()) for name, p in self._chain.parameters.items()}
        return {**named, **self._chain.buffers}


def _copies_of_buffers(modules: Iterable[nn.Module]) -> Buffers:
    """A buffer that several modules hold has one copy."""
    copies: dict[int, Tensor] = {}
    return {
        (inner, key): copies.setdefault(id(buffer), buffer.clone())
        for module in modules
        for inner in module.modules()
        for key, buffer in tensor_tables(inner)[1].items()
        if buffer is not None
    }


class _Rounding(torch.autograd.Function):
    """Rounds a value on its way to another stage, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, codec: WireCodec) -> Tensor:
        ctx.codec = codec
        return round_to_wire(codec, value.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return round_to_wire(ctx.codec, gradients[0]), None


def _rounded(value: Tensor, codec: WireCodec) -> Tensor:
    if not encodes(codec, value.shape, value.dtype):
        return value
    rounded: Tensor = _Rounding.apply(value, codec)  # type: ignore[no-untyped-call]
    return rounded


def _copy(weights: Mapping[str, nn.Parameter]) -> Weights:
    # Frozen ones with their class and what they hold, such as scales.
    return {
        name: nn.Parameter(weight.detach().clone()) if weight.requires_grad else copy.deepcopy(weight)
        for name, weight in weights.items()
    }
