"""One training of a case, by a plain loop, a pipeline or the oracle: the same weights and the same batches."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import penstock
from model_cases.cases import Case
from penstock.capturing.samples import flatten
from penstock.torch_internals.pytrees import tree_map_only, tree_unflatten

__all__ = ["Batches", "Outcome", "state_of", "train_by_oracle", "train_plainly", "train_staged"]

RATE = 0.05
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class Batches:
    """The sizes of the batches, and what is drawn for them."""

    sizes: Sequence[tuple[int, int]]
    """Samples and length: of the sample, and of every step."""
    dtype: torch.dtype

    def draw(self, case: Case) -> list[Any]:
        """The sample, the batches, and the inputs of a prediction."""
        generator_state = torch.get_rng_state()
        torch.manual_seed(7)
        found = [_cast(case.draw(*size), self.dtype) for size in (*self.sizes, self.sizes[0])]
        torch.set_rng_state(generator_state)
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training leaves."""

    losses: tuple[float, ...]
    state: dict[str, Any]
    """Parameters, buffers and plain attributes by name."""
    prediction: Any = None
    """The output in evaluation mode, of as many samples as the sample has."""

    def saved(self) -> "Outcome":
        """Only what `Pipeline.state_dict` has, by its names there."""
        found = {name.removeprefix("saved "): value for name, value in self.state.items() if name.startswith("saved ")}
        return Outcome(self.losses, found)


def build(case: Case, dtype: torch.dtype) -> nn.Module:
    _seed(5)
    return case.build().to(dtype).train()


def train_plainly(case: Case, batches: Batches, delayed: bool = False) -> Outcome:
    """A loop as PyTorch's users write it. `delayed`: with gradients at the weights before the last update, as 2bw."""
    model = build(case, batches.dtype)
    optimizer = _sgd(_trained(model))
    sample, *data, last = batches.draw(case)
    losses = []
    before: list[Tensor] | None = None
    _seed(6)
    for number, inputs in enumerate(data):
        if case.between is not None:
            case.between(model, number)
        if case.rebuilds:
            optimizer = _sgd(_trained(model))
        newest = [parameter.detach().clone() for parameter in _trained(model)]
        if delayed and before is not None:
            _write(model, before)
        total, samples = 0.0, batches.sizes[number + 1][0]
        for part, size in _cut(inputs, sample, batches.sizes[0][0], samples, case.microbatches):
            loss = case.loss(_call(model, part), None)
            if loss.requires_grad:
                loss.backward(torch.full_like(loss, size / samples))
            total += float(loss.detach().double()) * (size / samples)
        if delayed:
            _write(model, newest)
        before = newest
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    state = state_of(model)
    model.eval()
    with torch.no_grad():
        prediction = _predict(model, last)
    return Outcome(tuple(losses), state, prediction)


def train_staged(
    case: Case,
    batches: Batches,
    note: Callable[[str, Any], None] = lambda name, value: None,
    predicts: bool = False,
    **options: Any,
) -> Outcome:
    """The same by a pipeline with `options`; `note` hears facts of it as soon as they are known."""
    model = build(case, batches.dtype)
    sample, *data, last = batches.draw(case)
    options = _with_microbatches(case, options) | {"seed": None if case.draws else 0}
    start = time.process_time()
    with ExitStack() as stack:

        def open_pipeline() -> penstock.Pipeline:
            stack.close()
            return stack.enter_context(penstock.Pipeline(model, sample, case.loss, _sgd, **options))

        pipe = open_pipeline()
        note("layers", pipe.plan.layers)
        note("seconds", time.process_time() - start)
        _seed(6)
        losses = []
        for number, inputs in enumerate(data):
            if case.between is not None:
                case.between(model, number)
            if case.rebuilds:
                pipe = open_pipeline()
            losses.append(pipe.step(inputs, None).loss.item())
        pipe.drain()
        state = state_of(model)
        saved = {f"saved {name}": tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
        prediction = None
        if predicts:
            note("predicts", True)
            with torch.no_grad():
                prediction = pipe.predict(last)
    return Outcome(tuple(losses), {**state, **saved}, prediction)


def train_by_oracle(case: Case, batches: Batches, **options: Any) -> Outcome:
    """The same by `penstock.reference_train`."""
    sample, *data, _ = batches.draw(case)
    model = build(case, batches.dtype)
    _seed(6)
    found = penstock.reference_train(
        model,
        [(inputs, None) for inputs in data],
        sample=sample,
        loss_fn=case.loss,
        optimizer=_sgd,
        **_with_microbatches(case, options),
    )
    return Outcome(found.losses, dict(found.state))


def _with_microbatches(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """A plan in `options` has their number already."""
    return options if "plan" in options else {"microbatches": case.microbatches, **options}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Copies of everything that a training may change: parameters, buffers, tensors and numbers in attributes."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[prefix + name] = tensor.detach().clone()
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training":
                found.update(_plain(f"attribute {prefix}{name}", value))
    return found


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
    elif isinstance(value, bool | int | float):
        yield name, value
    elif isinstance(value, list | tuple) and len(value) < 100:
        for index, each in enumerate(value):
            yield from _plain(f"{name}[{index}]", each)
        yield f"{name} length", len(value)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _write(model: nn.Module, values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(_trained(model), values, strict=True):
            parameter.copy_(value)


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs)


def _predict(model: nn.Module, inputs: Any) -> Any:
    try:
        return _call(model, inputs)
    except Exception as error:
        return error


def _cut(inputs: Any, sample: Any, unit: int, samples: int, parts: int) -> Iterator[tuple[Any, int]]:
    """The microbatches of a batch and their sizes; the first ones are the larger."""
    leaves, structure = flatten(inputs)
    flat, _ = flatten(sample)
    batched = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == unit for leaf in flat]
    start = 0
    for part in range(parts):
        size = samples // parts + (part < samples % parts)
        own = [
            leaf[start : start + size] if cut and parts > 1 else leaf for leaf, cut in zip(leaves, batched, strict=True)
        ]
        start += size
        yield tree_unflatten(own, structure), size
