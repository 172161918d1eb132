"""How a model calls its blocks: seen by running it on the sample, and on samples of other sizes.

Nothing here is traced. Hooks note, for every call of every module, the structure of the arguments and results and the
sizes of the tensors in them. A dispatch mode notes in which modules something is computed that depends on parameters:
these are the modules that blocks are chosen from.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from penstock.capturing.export.escapes import TensorOwners
from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.module_state import ModuleState, is_plain_memory
from penstock.capturing.observation import memory_of
from penstock.capturing.preservation import python_generators
from penstock.capturing.sampled_models import SampledModel
from penstock.capturing.samples import Call, flatten
from penstock.errors import CaptureError
from penstock.torch_internals.dispatch import TorchDispatchMode, schema_of
from penstock.torch_internals.pytrees import TreeSpec, tree_leaves, tree_unflatten

__all__ = [
    "BlockCall",
    "Dimension",
    "ModelRun",
    "RecordedCalls",
    "ResultTensor",
    "failures_explained",
    "is_plain",
    "record_calls",
    "run_on_sample",
]

Dimension: TypeAlias = tuple[str, int]
"""An input and the index of one of its dimensions."""
Sizes: TypeAlias = tuple[int, ...]
"""One size in each of the runs."""


@dataclass(frozen=True, slots=True, eq=False)
class ResultTensor:
    """One tensor that a call of a module returns."""

    sizes: tuple[Sizes, ...]
    """For every dimension."""
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    """The dimensions by their stride, the largest first."""


@dataclass(slots=True, eq=False)
class BlockCall:
    """One call of a module."""

    arguments: tuple[tuple[Sizes, ...], ...]
    """For every tensor among the arguments, its dimensions."""
    numbers: tuple[Sizes, ...]
    """The whole numbers among the arguments."""
    structure: TreeSpec
    """Of what it returns."""
    leaves: tuple[Any, ...]
    """Of what it returns: a `ResultTensor`, the `Sizes` of a whole number, or a constant."""
    objects: tuple[Any, ...]
    """For every leaf of the arguments: the class `Tensor` for a tensor, else the object in the first run."""
    lasting: tuple[bool, ...]
    """For every leaf of the arguments: whether it is the same object, or a tensor, in every run."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call in one run."""

    arguments: list[torch.Size]
    numbers: list[int]
    objects: list[Any]
    """For every leaf: the class `Tensor` for a tensor, else the object."""
    structure: TreeSpec | None = None
    leaves: list[Any] = field(default_factory=list)
    """A `_Shape`, or what is not a tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    size: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]


_Calls: TypeAlias = dict[str, list[_Call]]
"""The calls in one run, by path of the module."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelRun:
    """What two consecutive runs of a model on the sample showed."""

    working: frozenset[str]
    """Paths of the modules that compute something that depends on parameters."""
    drawing: frozenset[str]
    """Paths of the modules that draw PyTorch's random numbers themselves; not of those around them."""
    drawing_elsewhere: frozenset[str]
    """The same of Python's and NumPy's random numbers."""
    changed: frozenset[str]
    """Attributes that the second run changed, such as ``encoder.count``."""
    written: frozenset[str]
    """Tensors in attributes that the second run wrote in place."""
    calls: tuple[_Calls, _Calls]
    """All calls of modules in the two runs."""
    escapes: frozenset[tuple[str, str]]
    """Modules that a tensor escaped from, each with one that used it."""


@contextmanager
def failures_explained(model: nn.Module) -> Iterator[None]:
    """Raises `CaptureError` if `model` fails on the sample in this block."""
    try:
        yield
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} fails on the sample: {type(error).__name__}: {error}. sample= must hold "
            "arguments that the model accepts"
        ) from error


def run_on_sample(sampled: SampledModel) -> ModelRun:
    """Runs the model on the sample. Raises `CaptureError` if it fails on it."""
    model, call = sampled.model, sampled.call
    watch, again = _Watch(model, draws=True), _Watch(model)
    with sampled.preserved(), torch.no_grad():
        with failures_explained(model):
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            with _Dependence(list(model.parameters()), watch.note_computation, sampled.save_parameter) as dependence:
                watch.run(call.copied())
            # What is changed by the first run only is a cache.
            state = ModuleState([model])
            for parameter in dependence.written:
                state.save_content(names[id(parameter)], parameter)
            again.run(call.copied())
        changes = list(state.changes())
    return ModelRun(
        working=frozenset(watch.working),
        drawing=frozenset(watch.drawing),
        drawing_elsewhere=frozenset(watch.drawing_elsewhere),
        changed=frozenset(path for path, written in changes if not written),
        written=frozenset(path for path, written in changes if written),
        calls=(watch.calls, again.calls),
        escapes=frozenset(watch.owners.escapes),
    )


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCalls:
    """The calls of blocks, and what sizes of inputs the model takes."""

    calls: Mapping[str, list[BlockCall]]
    """By path of the module, in the order of the run."""
    fixed: frozenset[Dimension]
    """Dimensions of inputs that may only have the size of the sample."""
    equal: tuple[tuple[Dimension, ...], ...]
    """Groups of dimensions of inputs that may only have one size together."""


def record_calls(
    sampled: SampledModel, paths: Collection[str], run: ModelRun, free: Literal["sizes", "samples", "nothing"] = "sizes"
) -> RecordedCalls:
    """The calls of the modules `paths` in `run`, and in runs with other sizes of each dimension of the sample.

    `free`: with ``"samples"`` only their number is changed, and all other dimensions are fixed.
    """
    first, again = ({path: calls[path] for path in paths} for calls in run.calls)
    _check_repeatable(first, again)
    runs, fixed, equal = [first, again], set[Dimension](), []
    groups = list(_size_groups(sampled))
    tried = {"sizes": len(groups), "samples": 1, "nothing": 0}[free]
    fixed.update(*groups[tried:])
    groups = groups[:tried]
    while groups:
        group = groups.pop(0)
        found = _record_resized(sampled, group, paths, first)
        # Dimensions may have one size by chance.
        if found is None and len(apart := {index for _, index in group}) > 1:
            groups.extend(frozenset(each for each in group if each[1] == index) for index in sorted(apart))
            continue
        if found is None:
            fixed.update(group)
        else:
            runs.append(found)
            if len({name for name, _ in group}) > 1 and not _may_differ(sampled, group):
                equal.append(tuple(sorted(group)))
    return RecordedCalls({path: _merged([run[path] for run in runs]) for path in paths}, frozenset(fixed), tuple(equal))


def _check_repeatable(first: _Calls, again: _Calls) -> None:
    for path, calls in first.items():
        if not _alike({path: calls}, {path: again[path]}):
            raise CaptureError(
                f"block {path} was called {len(calls)} times in one run on the sample and {len(again[path])} times, or "
                "with or for other things, in the next one: expected the same calls in every run. If the model skips "
                "blocks at random (layerdrop), set this probability to 0, or skip inside of the block; or pass the "
                "model as a list of layers"
            )


def is_plain(leaf: Any) -> bool:
    """Whether `leaf` is a constant that two calls can be compared by."""
    return leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype | torch.device)


class _Watch:
    """Watches one run of a model.

    `paths`: the modules whose calls are noted; None for all. `draws`: whether to note who uses the generators of Python
    and NumPy, which takes long.
    """

    def __init__(self, model: nn.Module, paths: Collection[str] | None = None, *, draws: bool = False) -> None:
        self.model = model
        self.paths = paths
        self._draws = draws
        self.calls: _Calls = defaultdict(list)
        self.working: set[str] = set()
        self.drawing: set[str] = set()
        self.drawing_elsewhere: set[str] = set()
        self.owners = TensorOwners()
        self._stack: list[tuple[str, _Call]] = []
        self._generators = python_generators() if draws else {}

    def run(self, call: Call) -> None:
        with ExitStack() as hooks:
            for path, module in self.model.named_modules():
                # A scripted module takes no hooks and runs none of its modules: what it does its parent does.
                if isinstance(module, torch.jit.ScriptModule) or (self.paths is not None and path not in self.paths):
                    continue
                for handle in (
                    module.register_forward_pre_hook(partial(self._enter, path), prepend=True, with_kwargs=True),
                    module.register_forward_hook(self._leave, with_kwargs=True),
                ):
                    hooks.callback(handle.remove)
            self.model(*call.args, **call.kwargs)
            self._note_draws()

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._note_draws()
        leaves, _ = flatten((args, kwargs))
        tensors = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
        objects = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        made = _Call(tensors, [leaf for leaf in leaves if type(leaf) is int], objects)
        self.calls[path].append(made)
        self._stack.append((path, made))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._note_draws()
        path, made = self._stack.pop()
        leaves, made.structure = flatten(result)
        if self._draws:
            self.owners.returned(path, self._path, (leaf for leaf in leaves if isinstance(leaf, Tensor)))
        made.leaves = [_shape_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    @property
    def _path(self) -> str:
        """The innermost module that runs."""
        return self._stack[-1][0] if self._stack else ""

    def note_computation(self, depends: bool, draws: bool, used: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Notes that the innermost module computes something that `depends` on parameters, or `draws` numbers."""
        path = self._path
        self.owners.note(path, used, made)
        if depends or draws:
            self.working.add(path)
        if draws:
            self.drawing.add(path)

    def _note_draws(self) -> None:
        """Notes whether Python's or NumPy's generator was used by the innermost module since the last look."""
        if not self._draws:
            return
        now = python_generators()
        if now != self._generators:
            path = self._path
            self.drawing_elsewhere.add(path)
            self.working.add(path)
        self._generators = now


class _Dependence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what depends on parameters through the operators of a run."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        note: Callable[[bool, bool, Sequence[Tensor], Sequence[Tensor]], None],
        save: Callable[[nn.Parameter], None],
    ) -> None:
        """`save` is called with a parameter before it is written."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[nn.Parameter] = []
        self._dependent = WeakIdKeyDictionary({parameter: True for parameter in parameters})
        self._by_memory = {memory_of(p): p for p in parameters if is_plain_memory(p)}
        self._note, self._save = note, save

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        mutable = schema_of(func).is_mutable
        for tensor in (args[0] if isinstance(args[0], list) else given[:1]) if mutable and args else ():
            if is_plain_memory(tensor) and (found := self._by_memory.get(memory_of(tensor))) is not None:
                self._save(found)
                self.written.append(found)
        result = func(*args, **(kwargs or {}))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        depends = any(tensor in self._dependent for tensor in given)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._note(depends, draws, given, made)
        if depends or draws:
            if mutable:
                made += given[:1]
            for tensor in made:
                self._dependent[tensor] = True
        return result


def _shape_of(tensor: Tensor) -> _Shape:
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    return _Shape(tensor.shape, tensor.dtype, tensor.device, stride)


def _size_groups(sampled: SampledModel) -> Iterator[frozenset[Dimension]]:
    """Dimensions of inputs that change together: the samples, and those of one size in the sample."""
    batched = sampled.inputs.batched
    yield frozenset((name, 0) for name in batched)
    groups: dict[int, set[Dimension]] = defaultdict(set)
    for name, leaf in _tensors(sampled.call, sampled.inputs).items():
        for index, size in enumerate(leaf.shape):
            if size > 2 and not (index == 0 and name in batched):
                groups[size].add((name, index))
    yield from map(frozenset, groups.values())


def _tensors(call: Call, inputs: ModelInputs) -> dict[str, Tensor]:
    leaves, _ = flatten((call.args, call.kwargs))
    return {name: leaf for name, leaf in zip(inputs.names, leaves, strict=True) if isinstance(leaf, Tensor)}


def _record(sampled: SampledModel, call: Call, paths: Collection[str]) -> _Calls:
    watch = _Watch(sampled.model, paths)
    with sampled.preserved(), torch.no_grad():
        watch.run(call)
    return watch.calls


def _record_resized(
    sampled: SampledModel,
    group: frozenset[Dimension],
    paths: Collection[str],
    expected: Mapping[str, Sequence[_Call]],
) -> _Calls | None:
    """The calls with other sizes of the dimensions in `group`; None if the model does not take them."""
    samples = any(name in sampled.inputs.batched and index == 0 for name, index in group)
    for resize in (_grow,) if samples else (_shrink, _halve):
        try:
            found = _record(sampled, _resized(sampled, group, resize), paths)
        except Exception:
            continue
        if _alike(expected, found):
            return found
    return None


def _may_differ(sampled: SampledModel, group: frozenset[Dimension]) -> bool:
    """Whether the model takes other sizes of the dimensions of one input in `group` alone."""
    for own in {name for name, _ in group}:
        try:
            _record(sampled, _resized(sampled, [each for each in group if each[0] == own], _shrink), ())
        except Exception:
            continue
        return True
    return False


def _resized(sampled: SampledModel, group: Iterable[Dimension], resize: Callable[[Tensor, int], Tensor]) -> Call:
    leaves, structure = flatten((sampled.call.args, sampled.call.kwargs))
    named = dict(zip(sampled.inputs.names, leaves, strict=True))
    for name, index in group:
        named[name] = resize(named[name], index)
    args, kwargs = tree_unflatten(list(named.values()), structure)
    return Call(args, kwargs).copied()


def _grow(tensor: Tensor, index: int) -> Tensor:
    return torch.cat([tensor, tensor.narrow(index, 0, 1)], index)


def _shrink(tensor: Tensor, index: int) -> Tensor:
    return tensor.narrow(index, 0, max(tensor.shape[index] - 1, 1))


def _halve(tensor: Tensor, index: int) -> Tensor:
    return tensor.narrow(index, 0, max(tensor.shape[index] // 2, 1))


def _alike(expected: Mapping[str, Sequence[_Call]], found: Mapping[str, Sequence[_Call]]) -> bool:
    """Whether the same modules were called with and returned the same but for sizes."""
    if {path: len(calls) for path, calls in expected.items()} != {path: len(calls) for path, calls in found.items()}:
        return False
    for path, calls in expected.items():
        for one, other in zip(calls, found[path], strict=True):
            if one.structure != other.structure or len(one.objects) != len(other.objects):
                return False
            if [len(shape) for shape in one.arguments] != [len(shape) for shape in other.arguments]:
                return False
            for leaf, its in zip(one.leaves, other.leaves, strict=True):
                if isinstance(leaf, _Shape) != isinstance(its, _Shape):
                    return False
                if isinstance(leaf, _Shape) and (len(leaf.size), leaf.dtype) != (len(its.size), its.dtype):
                    return False
    return True


def _merged(runs: Sequence[Sequence[_Call]]) -> list[BlockCall]:
    """The calls of one module in all runs."""
    merged = []
    for calls in zip(*runs, strict=True):
        first: _Call = calls[0]
        assert first.structure is not None
        leaves: list[Any] = []
        for index, leaf in enumerate(first.leaves):
            others = [call.leaves[index] for call in calls]
            if isinstance(leaf, _Shape):
                sizes = tuple(zip(*(other.size for other in others), strict=True))
                strides = leaf.stride or tuple(range(len(sizes), 0, -1))
                order = sorted(range(len(sizes)), key=strides.__getitem__, reverse=True)
                leaves.append(ResultTensor(sizes, leaf.dtype, leaf.device, tuple(order)))
            else:
                leaves.append(tuple(others) if type(leaf) is int else leaf)
        merged.append(
            BlockCall(
                arguments=tuple(
                    tuple(zip(*shapes, strict=True)) for shapes in zip(*(call.arguments for call in calls), strict=True)
                ),
                numbers=tuple(zip(*(call.numbers for call in calls), strict=True)),
                structure=first.structure,
                leaves=tuple(leaves),
                objects=tuple(first.objects),
                lasting=tuple(
                    all(other is each[0] for other in each) for each in zip(*(c.objects for c in calls), strict=True)
                ),
            )
        )
    return merged
