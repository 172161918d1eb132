"""The mathematics that a schedule promises, in one process and without the runtime.

`reference_train` is what "correct" means: the runtime must equal it bit for bit (float64, CPU). It runs one microbatch
after the other through the whole model, keeps every stage's weights of each version in a list, and reads them by the
formulas of the papers. No stage module, no slots, no messages, no schedule.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from penstock.capturing import capture
from penstock.capturing.chain import LayerChain
from penstock.capturing.randomness import microbatch_seed, part_seed, seeded
from penstock.errors import PlanError
from penstock.values.plans import Plan

__all__ = ["Reference", "reference_train"]


@dataclass(frozen=True, slots=True)
class Reference:
    """What `reference_train` returns."""

    losses: tuple[float, ...]
    """Of every minibatch, the mean over its samples."""
    state: dict[str, Tensor]
    """The final parameters and buffers, by the keys of the model's state dict."""


def reference_train(
    model: nn.Module | Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    *,
    sample: tuple[Any, ...] | dict[str, Any],
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    schedule: str = "1f1b-flush",
    stages: int = 1,
    microbatches: int = 1,
    plan: Plan | None = None,
    vertical_sync: bool = False,
    scale_learning_rates: bool = False,
    seed: int = 0,
    drain_after: Collection[int] = (),
) -> Reference:
    """Trains a copy of `model` on `batches` of (inputs, target) as the schedule promises.

    Arguments are those of `Pipeline`. `drain_after`: the numbers of the minibatches (from 0) after which the pipeline
    is drained. With W(x) for version x, k for the microbatch and t for the minibatch since the last drain, s for the
    stage:

    ========================  =====================================================================
    gpipe, 1f1b-flush,        W(t+1) = W(t) - update of the mean gradient at W(t)
    interleaved, spp
    1f1b                      W(k+1) = W(k) - update of the gradient with stage s at max(0, k-(p-1-s))
    1f1b with vertical sync   W(k+1) = W(k) - update of the gradient with every stage at max(0, k-(p-1))
    2bw                       W(t+1) = W(t) - update of the mean gradient at W(max(t-1, 0))
    ========================  =====================================================================

    Where stage s has r replicas that take microbatches in turn, the updates of `1f1b` are of r microbatches, k counts
    these rounds, and instead of p-s there are d(s) = ceil(replicas of this and all later stages / r) rounds in flight.
    The last round before a drain may be of fewer. Where replicas split microbatches, r counts as 1, and a stage is
    computed part by part. Either way the gradients of replicas are summed in their order.

    Sources: PipeDream (SOSP 2019), sections 3.2 and 3.3; PipeDream-2BW (ICML 2021), section 3.1; SPP (INFOCOM 2022),
    section III.
    """
    chain = capture(copy.deepcopy(model), sample)
    if plan is None:
        plan = Plan.uniform(len(chain.layers), stages, microbatches=microbatches)
    else:
        schedule, microbatches, vertical_sync = plan.schedule, plan.microbatches, plan.vertical_sync
    if plan.layers != len(chain.layers):
        raise PlanError(
            f"the plan is for {plan.layers} layers and the model has {len(chain.layers)}: plan for this model"
        )
    training = _Training(chain, plan, optimizer, scale_learning_rates and schedule == "1f1b")
    losses = []
    versions: list[int] = []
    seen = before = minibatch = 0

    def drain() -> None:
        if schedule == "1f1b":
            training.update_rounds(versions, seen - before, last=True)
        training.share_buffers()
        if schedule in ("1f1b", "2bw"):
            training.restart()

    for number, (inputs, target) in enumerate(batches):
        total = 0.0
        parts = _cut(chain, inputs, target, microbatches)
        samples = sum(part.size for part in parts)
        for k, part in enumerate(parts, minibatch * microbatches):
            versions = _versions(plan, schedule, vertical_sync, k, minibatch)
            outputs = training.forward(part.values, part.size, versions, k, microbatch_seed(seed, before + k))
            # A microbatch weighs as much as it has samples; under 1f1b, where an update takes one of a replica, one.
            weighs = part.size if schedule == "1f1b" else samples
            for loss, size in _backward(outputs, part, loss_fn, weighs):
                total += loss * (size / samples)
            if schedule == "1f1b":
                training.update_rounds(versions, k + 1)
        if schedule != "1f1b":
            training.update(dict(enumerate(versions)))
        losses.append(total)
        seen += microbatches
        minibatch += 1
        if number in drain_after:
            drain()
            if schedule in ("1f1b", "2bw"):
                before, minibatch = seen, 0
    drain()
    return Reference(tuple(losses), training.state())


def _backward(
    outputs: Sequence[Any], part: "_Microbatch", loss_fn: Callable[[Any, Any], Tensor], samples: int
) -> list[tuple[float, int]]:
    """Goes backward from the losses of the parts of a microbatch; each weighs its share of `samples`.

    Returns each part's loss and its number of samples.
    """
    targets, sizes = _pieces(part.target, part.size, len(outputs)), _sizes(part.size, len(outputs))
    losses = [loss_fn(output, target) for output, target in zip(outputs, targets, strict=True)]
    weights = [torch.full_like(loss, size / samples) for loss, size in zip(losses, sizes, strict=True)]
    torch.autograd.backward(losses, weights)
    return [(float(loss.detach().double()), size) for loss, size in zip(losses, sizes, strict=True)]


def _versions(plan: Plan, schedule: str, vertical_sync: bool, microbatch: int, minibatch: int) -> list[int]:
    """The version of each stage's weights that a microbatch uses."""
    stages = range(len(plan.stages))
    strides = [1 if plan.routing == "split" else count for count in plan.replicas]
    behind = [math.ceil(sum(strides[stage:]) / strides[stage]) - 1 for stage in stages]
    rounds = [microbatch // stride for stride in strides]
    match schedule:
        case "gpipe" | "1f1b-flush" | "interleaved" | "spp":
            return [minibatch for _ in stages]
        case "1f1b" if vertical_sync:
            return [max(0, rounds[0] - behind[0]) for _ in stages]
        case "1f1b":
            return [max(0, rounds[stage] - behind[stage]) for stage in stages]
        case "2bw":
            return [max(minibatch - 1, 0) for _ in stages]
        case _:
            raise PlanError(
                f"no reference for the schedule {schedule!r}: expected gpipe, 1f1b-flush, interleaved, spp, 1f1b or 2bw"
            )


Weights = dict[str, nn.Parameter]


@dataclass(slots=True)
class _Stage:
    """All the versions of one stage's weights, and what each replica has of its own."""

    newest: Weights
    """What the optimizer steps."""
    optimizer: torch.optim.Optimizer | None
    buffers: list[dict[int, Tensor]]
    """Of each replica: the tensor that stands for each of the model's buffers, which are given by id."""
    replicas: int
    split: bool
    versions: list[list[Weights]] = field(default_factory=list)
    """Version x is entry x: for each replica a copy of its own, with the gradients that it took at it."""

    @property
    def stride(self) -> int:
        return 1 if self.split else self.replicas

    def publish(self) -> None:
        self.versions.append([_copy(self.newest) for _ in range(self.replicas)])

    def runners(self, microbatch: int) -> list[int]:
        """The replicas that take `microbatch`."""
        return list(range(self.replicas)) if self.split else [microbatch % self.replicas]


class _Training:
    """The weights of every stage in every version."""

    def __init__(
        self,
        chain: LayerChain,
        plan: Plan,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        scales: bool,
    ) -> None:
        self._chain = chain
        self._stage_of = [index for index, stage in enumerate(plan.stages) for _ in range(stage.start, stage.stop)]
        self._names: dict[int, str] = {}
        for name, parameter in chain.parameters.items():
            self._names.setdefault(id(parameter), name)
        self._stages: list[_Stage] = []
        for index, replicas in enumerate(plan.replicas):
            modules = [
                layer.module for layer, stage in zip(chain.layers, self._stage_of, strict=True) if stage == index
            ]
            used = {id(p) for module in modules for p in module.parameters()}
            newest = _copy({n: p for n, p in chain.parameters.items() if id(p) in used and self._names[id(p)] == n})
            trained = [p for p in newest.values() if p.requires_grad]
            own = {id(buffer): buffer for module in modules for buffer in module.buffers()}
            buffers = [own, *({key: buffer.clone() for key, buffer in own.items()} for _ in range(1, replicas))]
            split = plan.routing == "split" and max(plan.replicas) > 1
            made = optimizer(trained) if trained else None
            stage = _Stage(newest, made, buffers, replicas, split)
            if scales and not split and made is not None:
                for group in made.param_groups:
                    group["lr"] = group["lr"] * (replicas / plan.replicas[0])
            stage.publish()
            self._stages.append(stage)

    def forward(
        self, inputs: dict[str, Tensor], samples: int, versions: Sequence[int], microbatch: int, seed: int
    ) -> list[Any]:
        """The model's output for one microbatch: one, or one for each part that the last stage's replicas take."""
        # Of every value its parts: the rows that each of the replicas of the stage at hand takes.
        values = {name: [tensor] for name, tensor in inputs.items()}
        parts = 1
        for index, layer in enumerate(self._chain.layers):
            stage = self._stages[self._stage_of[index]]
            runners = stage.runners(microbatch)
            if len(runners) != parts:
                parts = len(runners)
                values = {name: self._part(name, pieces, samples, parts) for name, pieces in values.items()}
            results = []
            for part, replica in enumerate(runners):
                arguments = tuple(values[name][part] for name in layer.inputs)
                with seeded(part_seed(seed, part), index, arguments) if layer.random else nullcontext():
                    results.append(self._run(layer.module, stage, replica, versions[self._stage_of[index]], arguments))
            values.update(zip(layer.outputs, map(list, zip(*results, strict=True)), strict=True))
        return [
            self._chain.output.build({name: values[name][part] for name in self._chain.output.values})
            for part in range(parts)
        ]

    def _part(self, name: str, pieces: list[Tensor], samples: int, parts: int) -> list[Tensor]:
        """The value `name`, so far in `pieces`, in `parts`; an input without a batch dimension goes whole to each."""
        if name in self._chain.inputs.names and name not in self._chain.inputs.batched:
            return pieces[:1] * parts
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return list(torch.split(whole, _sizes(samples, parts)))

    def _run(
        self, module: nn.Module, stage: _Stage, replica: int, version: int, arguments: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        weights, buffers = stage.versions[version][replica], stage.buffers[replica]
        local: dict[str, Tensor] = {name: buffers[id(b)] for name, b in module.named_buffers(remove_duplicate=False)}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            local[name] = weights[self._names[id(parameter)]]
        return tuple(functional_call(module, local, arguments))

    def update_rounds(self, versions: Sequence[int], microbatches: int, last: bool = False) -> None:
        """The updates of the stages for which a round ends after so many microbatches since the last drain.

        `last`: no more come, so that rounds that are not full end too; the full ones have been updated before.
        """
        for index, stage in enumerate(self._stages):
            rest = microbatches % stage.stride
            if bool(rest) == last:
                self.update({index: versions[index]}, rest or stage.stride)

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
        for index, version in versions.items():
            stage = self._stages[index]
            for name, parameter in stage.newest.items():
                parameter.grad = gradients[name] / count if name in gradients else None
            if stage.optimizer is not None:
                stage.optimizer.step()
            for weights in stage.versions[version]:
                for weight in weights.values():
                    weight.grad = None
            stage.publish()

    def share_buffers(self) -> None:
        """Replicas take over the buffers of the first one."""
        for stage in self._stages:
            for buffers in stage.buffers[1:]:
                for key, buffer in buffers.items():
                    buffer.copy_(stage.buffers[0][key])

    def restart(self) -> None:
        """The newest version becomes version 0: the pipeline was drained."""
        for stage in self._stages:
            del stage.versions[:-1]

    def state(self) -> dict[str, Tensor]:
        """The final weights and buffers under all the model's names."""
        weights = {name: p.detach() for stage in self._stages for name, p in stage.newest.items()}
        # What no layer uses is as it was.
        named = {name: weights.get(self._names[id(p)], p.detach()) for name, p in self._chain.parameters.items()}
        return {**named, **self._chain.buffers}


def _copy(weights: Mapping[str, nn.Parameter]) -> Weights:
    return {
        name: nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        for name, weight in weights.items()
    }


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """Inputs by value name, the target, and how many samples they are of."""

    values: dict[str, Tensor]
    target: Any
    size: int


def _cut(chain: LayerChain, inputs: Any, target: Any, count: int) -> list[_Microbatch]:
    """The batch in `count` microbatches."""
    arguments = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    tensors = chain.inputs.bind(arguments, inputs if isinstance(inputs, Mapping) else {})
    samples = next(tensors[name].shape[0] for name in tensors if name in chain.inputs.batched)
    columns = {
        name: list(t.clone().tensor_split(count)) if name in chain.inputs.batched else [t] * count
        for name, t in tensors.items()
    }
    targets = _pieces(target, samples, count)
    return [
        _Microbatch({name: column[index] for name, column in columns.items()}, targets[index], size)
        for index, size in enumerate(_sizes(samples, count))
    ]


def _pieces(target: Any, samples: int, count: int) -> list[Any]:
    """`target` in `count` pieces; what does not count the samples goes whole to each."""
    leaves, structure = pytree.tree_flatten(target)
    columns = [
        list(leaf.clone().tensor_split(count))
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == samples
        else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[index] for column in columns], structure) for index in range(count)]


def _sizes(samples: int, count: int) -> list[int]:
    """So many samples in `count` parts; the first ones take the remainder."""
    return [samples // count + (index < samples % count) for index in range(count)]
