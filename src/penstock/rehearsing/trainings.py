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
from penstock.oracle.batches import cut
from penstock.oracle.references import reference_train
from penstock.pipeline import Pipeline
from penstock.rehearsing.training_records import TrainingRecord
from penstock.torch_internals.autograd import leaves_behind
from penstock.training.losses import amount_of, compute_loss
from penstock.training.optimizers import make_optimizers, make_scheduler
from penstock.training.precisions import first_device
from penstock.training.recipes import Recipe
from penstock.training.user_microbatches import Microbatches

Batch: TypeAlias = tuple[Any, Any]
"""What `Pipeline.step` takes."""


def as_module(model: Any) -> nn.Module:
    """The model, or one module of a list of layers, whose tensors have the names that they have in a pipeline."""
    if isinstance(model, nn.Module):
        return model
    return nn.ModuleDict({str(index): layer for index, layer in enumerate(model) if isinstance(layer, nn.Module)})


def _recipe_of(given: Mapping[str, Any]) -> Recipe:
    """The options among the arguments `given` to `Pipeline`."""
    return Recipe(**{name: value for name, value in given.items() if name in Recipe.__dataclass_fields__})


def _call_model(model: Any, spec: ModelInputs, values: Mapping[str, Tensor]) -> Any:
    """What the model returns for the tensors `values` by name, called as its user calls it."""
    args, kwargs = spec.structure.unflatten([values.get(name, spec.constants.get(name)) for name in spec.names])
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model(*args, **kwargs)
    for layer in model:
        found = layer(*args, **kwargs)
        args = tuple(found) if isinstance(found, tuple | list) else () if isinstance(found, dict) else (found,)
        kwargs = found if isinstance(found, dict) else {}
    return found


def train_by_loop(given: Mapping[str, Any], batches: Sequence[Batch]) -> TrainingRecord:
    """The training as a user of PyTorch writes it, with the gradients of microbatches added up."""
    recipe, module, record = _recipe_of(given), as_module(given["model"]), TrainingRecord()
    named = dict(module.named_parameters())
    optimizers = make_optimizers(record.watching(recipe.optimizer), named)
    schedulers = [make_scheduler(recipe.lr_scheduler, each) for each in optimizers if recipe.lr_scheduler]
    for number, batch in enumerate(batches):
        module.zero_grad()
        compute_gradients(given, batch, number, record)
        if recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(named.values(), recipe.clip_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    record.finish(len(batches), named, {**named, **dict(module.named_buffers())})
    return record


def compute_gradients(given: Mapping[str, Any], batch: Batch, number: int, record: TrainingRecord) -> None:
    """The forwards and backwards of step `number`: of ``microbatches=``, or of those that the user has cut."""
    recipe, model, (inputs, target) = _recipe_of(given), given["model"], batch
    _, spec = read_sample(given["sample"])
    count = len(inputs.inputs) if isinstance(inputs, Microbatches) else given["microbatches"]
    pieces = cut(spec, inputs, target, count, own_target=recipe.reads_model_loss)
    amounts = [amount_of(recipe.loss_weight, piece.target, piece.size) for piece in pieces]
    outputs = []
    for piece, amount in zip(pieces, amounts, strict=True):
        weight = amount / (sum(amounts) or 1.0)
        with recipe.autocast_context(first_device(model)):
            output = _call_model(model, spec, piece.values)
            leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
            ends = [leaf.grad_fn for leaf in leaves]
            # A loss that changes what it reads does so after this.
            outputs.append([leaf.detach().clone() if leaf.shape[:1] == (piece.size,) else None for leaf in leaves])
            loss, metrics = compute_loss(recipe.loss_fn, output, piece.target)
        record.dtype = str(loss.dtype).removeprefix("torch.")
        record.read_by_loss.update(id(leaf) for leaf in leaves_behind(loss, ends))
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]
        for name, value in {"": loss.detach(), **metrics}.items():
            key = number, "metric" if name else "loss", name
            record.values[key] = record.values.get(key, 0.0) + float(value) * weight
    for index, column in enumerate(zip(*outputs, strict=False)):
        rows = [leaf for leaf in column if leaf is not None]
        if len(rows) == len(outputs) and len({leaf.shape[1:] for leaf in rows}) == 1:
            record.note(number, "output", f"{index}", torch.cat(rows))


def train_by_chain(given: Mapping[str, Any], batches: Sequence[Batch]) -> TrainingRecord:
    """The training of the captured chain in one loop, by `reference_train`."""
    record = TrainingRecord()
    known = inspect.signature(reference_train).parameters.keys() - {"batches", "optimizer"}
    options = {name: value for name, value in given.items() if name in known}
    found = reference_train(batches=batches, optimizer=record.watching(given["optimizer"]), **options)
    for number, loss in enumerate(found.losses):
        record.note(number, "loss", "", loss)
    record.finish(len(batches), dict(as_module(given["model"]).named_parameters()), found.state)
    return record


def train_by_pipeline(given: Mapping[str, Any], batches: Sequence[Batch]) -> TrainingRecord:
    """The training in a pipeline."""
    record = TrainingRecord()
    with Pipeline(**{**given, "optimizer": record.watching(given["optimizer"])}) as pipe:
        results = [pipe.step(inputs, target) for inputs, target in batches]
        pipe.drain()
        for number, result in enumerate(results):
            for name, value in {"": float(result.loss), **result.metrics}.items():
                record.note(number, "metric" if name else "loss", name, value)
        record.finish(len(batches), dict(as_module(given["model"]).named_parameters()), pipe.state_dict()["model"])
        record.plan = pipe.plan
    return record
