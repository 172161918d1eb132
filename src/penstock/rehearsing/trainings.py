"""The trainings of a rehearsal: a plain loop of PyTorch, the chain of layers in one loop, and pipelines.

Each takes the arguments of `Pipeline` as a dict, whose model it trains in place, and returns what it computed.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.samples import flatten, read_sample
from penstock.oracle.batches import ReferenceMicrobatch, cut
from penstock.oracle.references import reference_train
from penstock.pipeline import Pipeline
from penstock.rehearsing.training_records import TrainingRecord, ValueKind
from penstock.training.losses import amount_of, compute_loss
from penstock.training.optimizers import make_optimizers, make_scheduler
from penstock.training.precisions import first_device
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan

Batch: TypeAlias = tuple[Any, Any]
"""What `Pipeline.step` takes."""


def recipe_of(given: Mapping[str, Any]) -> Recipe:
    """The options among the arguments `given` to `Pipeline`."""
    return Recipe(**{name: value for name, value in given.items() if name in Recipe.__dataclass_fields__})


def as_module(model: Any) -> nn.Module:
    """The model, or one module of a list of layers, whose tensors have the names that they have in a pipeline."""
    if isinstance(model, nn.Module):
        return model
    return nn.ModuleDict({str(index): layer for index, layer in enumerate(model) if isinstance(layer, nn.Module)})


def call_model(model: Any, spec: ModelInputs, values: Mapping[str, Tensor]) -> Any:
    """What the model returns for the tensors `values` by name, called as its user calls it."""
    args, kwargs = spec.structure.unflatten([values.get(name, spec.constants.get(name)) for name in spec.names])
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model(*args, **kwargs)
    for layer in model:
        found = layer(*args, **kwargs)
        args = tuple(found) if isinstance(found, tuple | list) else () if isinstance(found, dict) else (found,)
        kwargs = found if isinstance(found, dict) else {}
    return found


def train_by_loop(given: Mapping[str, Any], batches: Sequence[Batch], parts: int) -> TrainingRecord:
    """The training as a user of PyTorch writes it, with the gradients of `parts` microbatches added up."""
    recipe, model, record = recipe_of(given), given["model"], TrainingRecord()
    module = as_module(model)
    named = dict(module.named_parameters())
    optimizers = make_optimizers(record.watching(recipe.optimizer), named)
    schedulers = [make_scheduler(recipe.lr_scheduler, each) for each in optimizers if recipe.lr_scheduler]
    _, spec = read_sample(given["sample"])
    for number, (inputs, target) in enumerate(batches):
        for parameter in named.values():
            parameter.grad = None
        _compute_gradients(given, number, cut(spec, inputs, target, parts, own_target=recipe.reads_model_loss), record)
        if recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(named.values(), recipe.clip_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    record.finish(len(batches), named, dict(module.named_buffers()))
    return record


def _compute_gradients(
    given: Mapping[str, Any], number: int, pieces: Sequence[ReferenceMicrobatch], record: TrainingRecord
) -> None:
    """Forwards and backwards of step `number`; its outputs, loss and metrics are recorded."""
    recipe, model = recipe_of(given), given["model"]
    _, spec = read_sample(given["sample"])
    amounts = [amount_of(recipe.loss_weight, piece.target, piece.size) for piece in pieces]
    weights = [amount / (sum(amounts) or 1.0) for amount in amounts]
    means: dict[str, float] = {}
    outputs = []
    for piece, weight in zip(pieces, weights, strict=True):
        with recipe.autocast_context(first_device(model)):
            output = call_model(model, spec, piece.values)
            # A loss that changes what it reads does so after this.
            outputs.append([leaf.detach().clone() if isinstance(leaf, Tensor) else None for leaf in flatten(output)[0]])
            loss, metrics = compute_loss(recipe.loss_fn, output, piece.target)
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]
        for name, value in {"": loss.detach(), **metrics}.items():
            means[name] = means.get(name, 0.0) + float(value) * weight
    for index, column in enumerate(zip(*outputs, strict=False)):
        rows = [leaf for leaf, piece in zip(column, pieces, strict=True) if _has_rows(leaf, piece.size)]
        if len(rows) == len(pieces) and len({leaf.shape[1:] for leaf in rows}) == 1:
            record.note(number, ValueKind.OUTPUT, f"{index}", torch.cat(rows))
    for name, mean in means.items():
        record.note(number, ValueKind.METRIC if name else ValueKind.LOSS, name, mean)


def _has_rows(leaf: Tensor | None, samples: int) -> bool:
    return leaf is not None and leaf.ndim > 0 and leaf.shape[0] == samples


def train_by_chain(given: Mapping[str, Any], batches: Sequence[Batch], plan: Plan | None = None) -> TrainingRecord:
    """The training of the captured chain in one loop, by `reference_train`. `plan`: that of a pipeline."""
    record = TrainingRecord()
    known = inspect.signature(reference_train).parameters
    options = {name: value for name, value in given.items() if name in known and name != "batches"}
    options |= {"optimizer": record.watching(given["optimizer"]), "plan": plan}
    found = reference_train(batches=batches, **options)
    for number, loss in enumerate(found.losses):
        record.note(number, ValueKind.LOSS, "", loss)
    _finish(record, len(batches), given["model"], found.state)
    return record


def train_by_pipeline(given: Mapping[str, Any], batches: Sequence[Batch]) -> tuple[TrainingRecord, Plan]:
    """The training in a pipeline, and its plan."""
    record = TrainingRecord()
    with Pipeline(**{**given, "optimizer": record.watching(given["optimizer"])}) as pipe:
        results = [pipe.step(inputs, target) for inputs, target in batches]
        pipe.drain()
        for number, result in enumerate(results):
            record.note(number, ValueKind.LOSS, "", float(result.loss))
            for name, value in result.metrics.items():
                record.note(number, ValueKind.METRIC, name, value)
        _finish(record, len(batches), given["model"], pipe.state_dict()["model"])
        return record, pipe.plan


def _finish(record: TrainingRecord, steps: int, model: Any, state: Mapping[str, Tensor]) -> None:
    named = dict(as_module(model).named_parameters())
    buffers = {name: tensor for name, tensor in state.items() if name not in named}
    record.finish(steps, {name: tensor for name, tensor in state.items() if name in named}, buffers)
