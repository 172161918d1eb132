"""The mathematics that a schedule promises, in one process and without the runtime.

`reference_train` is what "correct" means: the runtime must equal it bit for bit (float64, CPU). It runs one microbatch
after the other through the whole model, keeps every stage's weights of each version in a list, and reads them by the
formulas of the papers. No stage module, no slots, no messages, no schedule.
"""

import copy
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
from penstock.capturing.randomness import microbatch_seed, seeded
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

    Sources: PipeDream (SOSP 2019), section 3.3; PipeDream-2BW (ICML 2021), section 3.1.
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
    training = _Training(chain, plan, optimizer)
    losses = []
    seen = before = minibatch = 0
    for number, (inputs, target) in enumerate(batches):
        total = 0.0
        parts = _cut(chain, inputs, target, microbatches)
        samples = sum(size for _, _, size in parts)
        for k, (values, part, size) in enumerate(parts, minibatch * microbatches):
            versions = _versions(schedule, vertical_sync, len(plan.stages), k, minibatch)
            output = training.forward(values, versions, microbatch_seed(seed, before + k))
            loss = loss_fn(output, part)
            alone = schedule == "1f1b"
            torch.autograd.backward(loss, torch.full_like(loss, 1.0 if alone else size / samples))
            total += float(loss.detach().double()) * (size / samples)
            if alone:
                training.update(versions)
        if schedule != "1f1b":
            training.update(versions)
        losses.append(total)
        seen += microbatches
        minibatch += 1
        if number in drain_after and schedule in ("1f1b", "2bw"):
            training.restart()
            before, minibatch = seen, 0
    return Reference(tuple(losses), training.state())


def _versions(schedule: str, vertical_sync: bool, stages: int, microbatch: int, minibatch: int) -> list[int]:
    """The version of each stage's weights that a microbatch uses."""
    match schedule:
        case "gpipe" | "1f1b-flush" | "interleaved" | "spp":
            return [minibatch] * stages
        case "1f1b" if vertical_sync:
            return [max(0, microbatch - (stages - 1))] * stages
        case "1f1b":
            return [max(0, microbatch - (stages - 1 - stage)) for stage in range(stages)]
        case "2bw":
            return [max(minibatch - 1, 0)] * stages
        case _:
            raise PlanError(
                f"no reference for the schedule {schedule!r}: expected gpipe, 1f1b-flush, interleaved, spp, 1f1b or 2bw"
            )


Weights = dict[str, nn.Parameter]


@dataclass(slots=True)
class _Stage:
    """All the versions of one stage's weights."""

    newest: Weights
    """What the optimizer steps."""
    optimizer: torch.optim.Optimizer | None
    versions: list[Weights] = field(default_factory=list)
    """Version x is entry x; a copy of its own each, with the gradients that were taken at it."""

    def publish(self) -> None:
        self.versions.append(_copy(self.newest))


class _Training:
    """The weights of every stage in every version."""

    def __init__(
        self, chain: LayerChain, plan: Plan, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._chain = chain
        self._stage_of = [index for index, stage in enumerate(plan.stages) for _ in range(stage.start, stage.stop)]
        self._names: dict[int, str] = {}
        for name, parameter in chain.parameters.items():
            self._names.setdefault(id(parameter), name)
        self._stages = []
        for index in range(len(plan.stages)):
            layers = [layer for layer, stage in zip(chain.layers, self._stage_of, strict=True) if stage == index]
            used = {id(p) for layer in layers for p in layer.module.parameters()}
            newest = _copy({n: p for n, p in chain.parameters.items() if id(p) in used and self._names[id(p)] == n})
            trained = [p for p in newest.values() if p.requires_grad]
            stage = _Stage(newest, optimizer(trained) if trained else None)
            stage.publish()
            self._stages.append(stage)

    def forward(self, values: dict[str, Tensor], versions: Sequence[int], seed: int) -> Any:
        """The model's output for one microbatch."""
        for index, layer in enumerate(self._chain.layers):
            stage = self._stage_of[index]
            weights = self._stages[stage].versions[versions[stage]]
            named = layer.module.named_parameters(remove_duplicate=False)
            local: dict[str, Tensor] = {name: weights[self._names[id(parameter)]] for name, parameter in named}
            arguments = tuple(values[name] for name in layer.inputs)
            with seeded(seed, index, arguments) if layer.random else nullcontext():
                results = functional_call(layer.module, local, arguments)
            values.update(zip(layer.outputs, results, strict=True))
        return self._chain.output.build(values)

    def update(self, versions: Sequence[int]) -> None:
        """One optimizer step of every stage on its newest weights, with the gradients accumulated at `versions`."""
        gradients: dict[str, Tensor] = {}
        for stage, version in zip(self._stages, versions, strict=True):
            for name, weight in stage.versions[version].items():
                if weight.grad is not None:
                    # Weights that several stages share take the sum of their gradients, in the order of the stages.
                    gradients[name] = gradients[name] + weight.grad if name in gradients else weight.grad
        for stage, version in zip(self._stages, versions, strict=True):
            for name, parameter in stage.newest.items():
                parameter.grad = gradients.get(name)
            if stage.optimizer is not None:
                stage.optimizer.step()
            for weight in stage.versions[version].values():
                weight.grad = None
            stage.publish()

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


def _cut(chain: LayerChain, inputs: Any, target: Any, count: int) -> list[tuple[dict[str, Tensor], Any, int]]:
    """`count` microbatches of (inputs by value name, target, samples); the first ones take the remainder."""
    arguments = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    tensors = chain.inputs.bind(arguments, inputs if isinstance(inputs, Mapping) else {})
    samples = next(tensors[name].shape[0] for name in tensors if name in chain.inputs.batched)

    def pieces(tensor: Tensor) -> list[Tensor]:
        return list(tensor.clone().tensor_split(count)) if tensor.ndim and len(tensor) == samples else [tensor] * count

    columns = {name: pieces(t) if name in chain.inputs.batched else [t] * count for name, t in tensors.items()}
    leaves, structure = pytree.tree_flatten(target)
    targets = [pieces(leaf) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return [
        (
            {name: column[index] for name, column in columns.items()},
            pytree.tree_unflatten([column[index] for column in targets], structure),
            samples // count + (index < samples % count),
        )
        for index in range(count)
    ]
