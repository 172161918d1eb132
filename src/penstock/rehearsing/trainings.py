"""The trainings of a rehearsal, and fresh copies of all that they train.

A plain loop of PyTorch, the chain of layers in one loop, and pipelines: each trains the model of its options in place,
and returns what it computed.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import numpy
import torch
from torch import Tensor, nn

from penstock.arguments import SEED, function, text_of
from penstock.capturing.initialization import rooted
from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.model_kinds import check_model, first_device
from penstock.capturing.module_copies import Copies
from penstock.capturing.preservation import generator_states
from penstock.capturing.samples import flatten, read_sample
from penstock.errors import PenstockError
from penstock.oracle.batches import cut
from penstock.oracle.references import reference_train
from penstock.pipeline import build_pipeline
from penstock.rehearsing.training_records import TrainingRecord
from penstock.runtime.assembly.pipeline_options import ModelOptions, PipelineOptions, PlanOptions, RunOptions
from penstock.torch_internals.autograd import leaves_behind
from penstock.torch_internals.dispatch import OperatorMode
from penstock.torch_internals.pytrees import tree_leaves, tree_map_only
from penstock.torch_internals.unimported import compiled_code_runs_eagerly
from penstock.training.losses import Microbatches, amounts_of, compute_loss
from penstock.training.optimizers import make_optimizers, make_scheduler
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan

Batch: TypeAlias = tuple[Any, Any]
"""What `Pipeline.step` takes."""
Between: TypeAlias = Callable[[Any, int], object] | None
"""What a loop does before each step but the first, with the model and the number of the step."""
Options = TypeVar("Options", ModelOptions, Recipe, PlanOptions, RunOptions)

_OWNED = ("loss_fn", "optimizer", "lr_scheduler", "loss_weight", "update_hooks")
"""Arguments that may hold the model or state of their own, and are copied with it."""
_NAMES = {kind: [each.name for each in fields(kind)] for kind in (ModelOptions, Recipe, PlanOptions, RunOptions)}
_BETWEEN = function(("model", "step"), "a function of the model and the number of the step").optional
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """A training that can be begun any number of times."""

    make: Callable[[], tuple[PipelineOptions, Between]]
    batches: tuple[Batch, ...]
    remade: bool
    """Whether a function of the user's makes them; otherwise they are deep copies."""
    drops: bool
    """Whether there is dropout, which fresh copies do without."""
    widened: bool = False
    """Whether the copies are float64."""

    def fresh(self, shaken: float = 0.0) -> PipelineOptions:
        """The options of a training that is about to begin: its weights times 1 + `shaken` or 1 - `shaken`."""
        return self.begin(shaken)[0]

    def begin(self, shaken: float = 0.0) -> tuple[PipelineOptions, Between]:
        """The same with what is done between its steps."""
        _seed(0)
        options, between = self.make()
        module = rooted(options.model.model)
        if self.widened:
            module.double()
            options = replace(options, model=replace(options.model, sample=_widen(options.model.sample)))
            if isinstance(options.recipe.loss_fn, nn.Module):
                options.recipe.loss_fn.double()
        for inner, name in _dropout_rates(module):
            setattr(inner, name, 0.0)
        with torch.no_grad():
            for parameter in module.parameters() if shaken else ():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.mul_(1 + shaken * torch.randn_like(parameter).sgn())
        _seed(1)
        return options, between

    def in_float64(self) -> "Setup":
        """The same with copies in float64."""
        return replace(self, batches=_widen(self.batches), widened=True)


def read_setup(model: Any, batches: Any, steps: int, /, **arguments: Any) -> Setup:
    """The training that was passed to `rehearse`. Raises `PenstockError` unless it is whole."""
    remade = callable(model) and not isinstance(model, nn.Module | type)

    def make() -> dict[str, Any]:
        if remade:
            made = model()
            if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], tuple | Mapping):
                found = "found (model, sample), as profile takes it: batches, loss_fn and optimizer are missing"
                raise _unread(f"a dict with model, sample, batches, loss_fn and optimizer, {found}")
            return {**arguments, **(made if isinstance(made, Mapping) else {"model": made})}
        try:
            copies = Copies([model], parameters=True)
            own = {"model": copies.of(model)}
            own |= {name: copies.of(arguments[name]) for name in _OWNED if name in arguments}
        except Exception as error:
            fix = "pass a function that makes the model, and returns all arguments in a dict"
            raise PenstockError(f"rehearse: copying the model fails with {error!r}: {fix}") from error
        return {**arguments, **own}

    _seed(0)
    first = make()
    check_model(first["model"], "rehearse")
    found: Any = batches if batches is not None else first.get("batches")
    if not isinstance(found, Iterable) or isinstance(found, str | Mapping | Tensor):
        raise _unread(f"batches, found {text_of(found)}")
    own_target = _read_options(first)[0].recipe.reads_model_loss
    kept = tuple(_pair(batch, own_target) for batch in islice(found, steps))
    if not kept:
        raise PenstockError("rehearse(batches=): expected at least one batch, found none: pass what a step takes")
    drops = bool(_dropout_rates(rooted(first["model"])))
    return Setup(lambda: _read_options(make()), kept, remade, drops)


def _read_options(arguments: Mapping[str, Any]) -> tuple[PipelineOptions, Between]:
    """The options of the pipeline with these arguments, which a function of the user's may have returned."""
    known = {name for names in _NAMES.values() for name in names}
    if strange := next((name for name in arguments if name not in known | {"batches", "between"}), ""):
        raise _unread(f"an argument of Pipeline, found {strange}=")
    if missing := next((name for name in ("sample", "loss_fn", "optimizer") if name not in arguments), ""):
        raise _unread(f"{missing}=")

    def chosen(kind: type[Options]) -> Options:
        return kind(**{name: arguments[name] for name in _NAMES[kind] if name in arguments})

    between = _BETWEEN.check("rehearse(between=)", arguments.get("between"))
    return PipelineOptions(chosen(ModelOptions), chosen(Recipe), chosen(PlanOptions), chosen(RunOptions)), between


def _unread(expected: str) -> PenstockError:
    return PenstockError(
        f"rehearse: expected {expected}: pass rehearse(model, batches, sample=..., loss_fn=..., optimizer=...), with "
        "the arguments of Pipeline, and pairs (inputs, target) as batches; or a function that returns all in a dict"
    )


def _pair(batch: Any, own_target: bool) -> Batch:
    if isinstance(batch, Microbatches) or (own_target and not (isinstance(batch, tuple) and batch[1:] == (None,))):
        return batch, None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise PenstockError(
            f"rehearse(batches=): expected pairs (inputs, target), found {text_of(batch)}: give what pipe.step takes"
        )
    return batch[0], batch[1]


def _widen(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, tree)


def _dropout_rates(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The attributes of modules in `model` that are rates of dropout above 0."""
    return [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value
        if "drop" in name.lower() or (name == "p" and isinstance(module, _DROPOUT))
    ]


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


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


def train_by_loop(
    options: PipelineOptions, batches: Sequence[Batch], between: Between, *, evaluates: bool
) -> TrainingRecord:
    """The training as a user of PyTorch writes it, with the gradients of microbatches added up."""
    recipe, module, record = options.recipe, rooted(options.model.model), TrainingRecord()
    named = dict(module.named_parameters())
    optimizers = make_optimizers(record.watching(recipe.optimizer), named)
    schedulers = [make_scheduler(recipe.lr_scheduler, each) for each in optimizers if recipe.lr_scheduler]
    parts = options.plan.microbatches or 1
    for number, batch in enumerate(batches):
        if number and between is not None:
            between(options.model.model, number)
        module.zero_grad()
        compute_gradients(options, batch, number, record, parts=parts)
        if recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(named.values(), recipe.clip_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    record.finish(len(batches), named, {**named, **dict(module.named_buffers())})
    if evaluates:
        record.note(len(batches) - 1, "evaluation", "loss", _evaluate(options, batches[0], parts))
    return record


def _evaluate(options: PipelineOptions, batch: Batch, parts: int) -> float:
    """The loss of `batch` in evaluation mode, in which the model is left."""
    record = TrainingRecord()
    rooted(options.model.model).eval()
    with torch.no_grad():
        compute_gradients(options, batch, 0, record, parts=parts)
    return float(record.values[0, "loss", ""])


def compute_gradients(
    options: PipelineOptions, batch: Batch, number: int, record: TrainingRecord, *, parts: int
) -> None:
    """The forwards and backwards of step `number`: in equal `parts`, or those that the user has cut."""
    recipe, model, (inputs, target) = options.recipe, options.model.model, batch
    _, spec = read_sample(options.model.sample)
    count = len(inputs.inputs) if isinstance(inputs, Microbatches) else parts
    pieces = cut(spec, inputs, target, count, own_target=recipe.reads_model_loss)
    amounts = amounts_of(recipe.loss_weight, [piece.target for piece in pieces], [piece.size for piece in pieces])
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


def train_by_chain(options: PipelineOptions, batches: Sequence[Batch], *_: Any, **__: Any) -> TrainingRecord:
    """The training of the captured chain in one loop, by `reference_train`: in one stage, or by a plan."""
    record, plan = TrainingRecord(), options.plan.plan
    recipe = replace(options.recipe, optimizer=record.watching(options.recipe.optimizer))
    assert plan is None or isinstance(plan, Plan)
    found = reference_train(
        options.model.model,
        batches,
        sample=options.model.sample,
        **{each.name: getattr(recipe, each.name) for each in fields(recipe)},
        microbatches=options.plan.microbatches or 1,
        plan=plan,
        seed=SEED.check("rehearse(seed=)", options.run.seed),
    )
    for number, loss in enumerate(found.losses):
        record.note(number, "loss", "", loss)
    record.finish(len(batches), dict(rooted(options.model.model).named_parameters()), found.state)
    return record


def train_by_pipeline(
    options: PipelineOptions, batches: Sequence[Batch], between: Between, *, evaluates: bool
) -> TrainingRecord:
    """The training in a pipeline."""
    record, recipe = TrainingRecord(), options.recipe
    watched = replace(options, recipe=replace(recipe, optimizer=record.watching(recipe.optimizer)))
    with build_pipeline(watched) as pipe:
        results = []
        for number, (inputs, target) in enumerate(batches):
            if number and between is not None and pipe.schedule.flushes:
                between(options.model.model, number)
            results.append(pipe.step(inputs, target))
        pipe.drain()
        for number, result in enumerate(results):
            for name, value in {"": float(result.loss), **result.metrics}.items():
                record.note(number, "metric" if name else "loss", name, value)
        names = dict(rooted(options.model.model).named_parameters())
        record.finish(len(batches), names, pipe.state_dict()["model"])
        record.plan = pipe.plan
        if evaluates:
            record.note(len(batches) - 1, "evaluation", "loss", float(pipe.evaluate(*batches[0]).loss))
    return record


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a step without an update shows of a training."""

    eps: float
    """The distance of 1 to the next number in the coarsest type that it computes in."""
    draws: bool
    """Whether it draws random numbers, dropout aside."""
    evaluates: bool
    """Whether it can compute its loss in evaluation mode, without random numbers."""


class _CoarsestType(OperatorMode):  # type: ignore[no-untyped-call]
    """Finds the coarsest type that operators compute in: models may cast to float32 inside."""

    eps = 0.0

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return found


def look(setup: Setup) -> FirstLook:
    """Raises `PenstockError` if the loss is not finite, or reads what copies of the model do not hold."""
    coarsest = _CoarsestType()  # type: ignore[no-untyped-call]
    first, options, record = setup.fresh(), setup.fresh(), TrainingRecord()
    # Without gradients, since torch.cond has no backward after a mode that sees operators.
    with suppress(Exception), compiled_code_runs_eagerly(), coarsest, torch.no_grad():
        compute_gradients(first, setup.batches[0], 0, TrainingRecord(), parts=1)
    module, before = rooted(options.model.model), generator_states()
    compute_gradients(options, setup.batches[0], 0, record, parts=1)
    loss = record.values[0, "loss", ""]
    if not math.isfinite(loss):
        raise PenstockError(
            f"rehearse: expected a loss that is a number, found {loss} in the first step of your own loop: rehearse "
            "with batches and weights that train"
        )
    if not setup.remade and not record.read_by_loss <= {id(parameter) for parameter in module.parameters()}:
        raise PenstockError(
            "rehearse: expected a loss that trains only the copy of the model, found that loss_fn reads a trained "
            "tensor outside of it: pass a function that makes model and loss_fn and returns all arguments in a dict, "
            "since a rehearsal trains each time anew. What the loss itself learns must be part of the model"
        )
    draws, before, evaluates = before != generator_states(), generator_states(), False
    with suppress(Exception):
        evaluates = math.isfinite(_evaluate(options, setup.batches[0], 1)) and before == generator_states()
    return FirstLook(coarsest.eps, draws, evaluates)
