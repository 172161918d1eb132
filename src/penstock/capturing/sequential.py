"""The front doors for a model that already is a chain: an `nn.Sequential`, or a list of layers.

Here nothing is traced. Each layer runs as the Python that it is, so its control flow may depend on the data; one run on
the sample shows what passes from layer to layer.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.chain import Layer, LayerChain
from penstock.capturing.joining import join_layers, with_evaluation
from penstock.capturing.model_forms import ModelInputs, ModelOutput, check_constant
from penstock.capturing.module_copies import Anew, Copies
from penstock.capturing.module_state import ModuleState
from penstock.capturing.observation import Observation, observed
from penstock.capturing.operators import OperatorCounter
from penstock.capturing.preservation import SavedBuffers
from penstock.capturing.read_names import FunctionModule
from penstock.capturing.reads import Reads, note_module
from penstock.capturing.sampled_models import SampledModel, gradients_of, with_gradients
from penstock.capturing.samples import Call, flatten
from penstock.capturing.shared_writes import Reached, note_writes
from penstock.errors import CaptureError, PenstockError
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.modules import is_hooked, registered_children


class Flag:
    """Stands in a `Form` for a bool that a tensor holds."""


class Maybe:
    """Stands in a `Form` for a tensor, or for None where an empty tensor is passed."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A nested value without its tensors."""

    structure: pytree.TreeSpec
    constants: tuple[Any, ...]
    """For every leaf: its constant; the class `Tensor` where it is a tensor, `Flag` where it is a bool that a tensor
    holds, `Maybe` where it is a tensor or None, `torch.SymInt` where it is a size that may change; an `Anew` where
    every call gets a copy of its own; the class `object` where it may be anything."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Form":
        # A TreeSpec never changes, and cannot be copied without a warning.
        return Form(self.structure, copy.deepcopy(self.constants, memo))

    def own(self, copies: Copies) -> "Form":
        """With the model's own objects in place of their `copies`."""
        return Form(self.structure, tuple(map(copies.own, self.constants)))

    @classmethod
    def of(cls, tree: Any) -> tuple["Form", tuple[Tensor, ...]]:
        leaves, structure = flatten(tree)
        constants = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(structure, constants), tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    @property
    def tensor_count(self) -> int:
        """How many tensors the value has."""
        return sum(constant is Tensor for constant in self.constants)

    def stands_for(self, tree: Any) -> bool:
        """Whether this is the form of `tree`, a nested value of the numbers 0, 1, ... in the places of tensors only."""
        # The structures are compared: a PackedSequence is made of tensors only.
        return all(c is Tensor for c in self.constants) and flatten(tree)[1] == self.structure

    def fill(self, values: Sequence[Any]) -> Any:
        """The nested value. `values`: all of its tensors, and after these its sizes that may change."""
        count = sum(constant is Tensor or constant is Flag or constant is Maybe for constant in self.constants)
        tensors, sizes = iter(values), islice(values, count, None)
        return pytree.tree_unflatten([_leaf(constant, tensors, sizes) for constant in self.constants], self.structure)


def _leaf(constant: Any, tensors: Iterator[Any], sizes: Iterator[Any]) -> Any:
    if constant is Tensor:
        return next(tensors)
    if constant is Flag:
        return bool(next(tensors))
    if constant is torch.SymInt:
        return next(sizes)
    if constant is Maybe:
        return found if (found := next(tensors)).shape != (0,) else None
    return constant.make() if isinstance(constant, Anew) else constant


class EagerLayer(nn.Module):
    """Runs one of the user's own modules between tensors.

    `gradients`: if not, under `torch.no_grad`. `by_forward`: as ``body.forward(x)``, which runs no hooks, and not as
    ``body(x)``.
    """

    def __init__(
        self,
        name: str,
        body: nn.Module,
        takes: Form,
        returns: Form,
        *,
        gradients: bool = True,
        by_forward: bool = False,
    ) -> None:
        super().__init__()
        self.by_forward = by_forward
        self.gradients = gradients
        self.name = name
        self.body = body
        self.takes = takes
        self.returns = returns
        # Tensors in, a tensor out: nearly every layer, and a hundred times as fast as to look through nested values.
        self._takes_tensors = takes.stands_for((tuple(range(len(takes.constants))), {}))
        self._returns_tensor = returns.stands_for(0)

    def forward(self, *tensors: Any) -> tuple[Tensor, ...]:
        """`tensors`: those among its arguments; after them, the sizes there, and those that it must return."""
        if not self.gradients and torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(*tensors)
        # Attributes that are modules are looked for last, and then in a slower way.
        body: Any = self._modules["body"]
        if self.by_forward:
            body = body.forward
        if self._takes_tensors:
            result = body(*tensors)
        else:
            args, kwargs = self.takes.fill(tensors)
            result = body(*args, **kwargs)
        if self._returns_tensor and isinstance(result, Tensor):
            return (result,)
        found, results = Form.of(result)
        if found.structure != self.returns.structure:
            raise CaptureError(
                f"layer {self.name} returned {self.returns.structure} when it was captured and now {found.structure}: "
                "a layer must always return the same structure"
            )
        sizes = iter(tensors[len(tensors) - self.returns.constants.count(torch.SymInt) :])
        for index, (captured, now) in enumerate(zip(self.returns.constants, found.constants, strict=True)):
            captured = next(sizes) if captured is torch.SymInt else captured
            if captured is not object:
                check_constant(f"leaf {index} of what layer {self.name} returns", captured, now)
        return results


def bodies_of(layers: Iterable[Layer]) -> list[nn.Module]:
    """The user's own modules that `layers` call, in their order."""
    modules = (inner for layer in layers for inner in layer.module.modules())
    return [inner.get_submodule("body") for inner in modules if isinstance(inner, EagerLayer)]


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether `module` does nothing but run its children one after the other."""
    return type(module) is nn.Sequential and not is_hooked(module)


def capture_sequential(model: nn.Sequential, call: Call, inputs: ModelInputs) -> LayerChain:
    """A chain with a layer for every child of `model`; nested plain Sequentials are opened.

    A child is called with the one value that the child before returned, as `nn.Sequential` does.
    """
    return _capture(_children("", model), _pass_whole, call, inputs, model)


def capture_list(layers: Sequence[nn.Module | Callable[..., Any]], call: Call, inputs: ModelInputs) -> LayerChain:
    """A chain of `layers`, with parameters named ``<index>.<name>``.

    The first layer takes the sample. Each other one takes what the layer before returned: a tuple or a list as
    positional arguments, a dict as keyword arguments, anything else as the single argument.
    """
    modules = nn.ModuleList(layer if isinstance(layer, nn.Module) else FunctionModule(layer) for layer in layers)
    modules.training = any(layer.training for layer in modules)
    named = [(str(index), module) for index, module in enumerate(modules)]
    return _capture(named, _pass_spread, call, inputs, modules)


def _children(prefix: str, model: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in registered_children(model):
        if is_plain_sequential(child):
            found += _children(f"{prefix}{name}.", child)
        else:
            found.append((prefix + name, child))
    return found


def _pass_whole(result: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (result,), {}


def _pass_spread(result: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(result) in (tuple, list):
        return tuple(result), {}
    if type(result) is dict:
        return (), result
    return (result,), {}


def _capture(
    named: Sequence[tuple[str, nn.Module]],
    spread: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]],
    call: Call,
    inputs: ModelInputs,
    model: nn.Module,
    *,
    trained: LayerChain | None = None,
) -> LayerChain:
    """`trained`: the chain of the training, if this one is for evaluation."""
    if not named:
        raise CaptureError("the model has no layers: expected an nn.Sequential or a list with at least one layer")
    sampled = SampledModel(model, call, inputs, evaluates=trained is not None)
    with sampled.copied() as copies, torch.no_grad():
        layers, output, observations = _run_once(named, spread, sampled, copies)
    note_writes(observations, [[body] for _, body in named])
    chain = LayerChain(
        layers=join_layers(layers, output.values, observations, None if trained is None else trained.layers),
        inputs=inputs,
        output=output,
        parameters=dict(model.named_parameters(remove_duplicate=False)),
        buffers=SavedBuffers(model),
        evaluation=lambda: chain,
        reads=_reads_of(model),
    )
    if trained is None:
        chain = with_gradients(chain, gradients_of(sampled, chain, [bodies_of([layer]) for layer in chain.layers]))
    return with_evaluation(
        chain, model, "the list of layers", lambda: _capture(named, spread, call, inputs, model, trained=chain)
    )


def _reads_of(model: nn.Module, path: str = "") -> Reads:
    """What nn.Sequentials that are opened consist of, or a list."""
    reads = Reads()
    note_module(reads, path, model, mode=False)
    for name, child in registered_children(model):
        if is_plain_sequential(child):
            reads.extend(_reads_of(child, f"{path}.{name}".lstrip(".")))
    return reads


class _Held:
    """Which layer holds which parameters and buffers, and which layers read those of another one.

    A layer may hold another one in a list or in a closure, where no stage sees it.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self._names: dict[int, str] = {}
        self.tensors: list[Tensor] = []
        for layer, body in named:
            own = (*body.named_parameters(), *body.named_buffers())
            self._names.update({id(tensor): f"{layer}.{name}" for name, tensor in own})
            self.tensors += [tensor for _, tensor in own]
        self._borrowed: list[tuple[str, Tensor]] = []
        holders = Counter(id(parameter) for _, body in named for parameter in body.parameters())
        self._shared = {key for key, count in holders.items() if count > 1}

    def note(
        self,
        name: str,
        body: nn.Module,
        arguments: Sequence[Tensor],
        *,
        counter: OperatorCounter,
        observed: Observation,
    ) -> None:
        """Notes what the layer `name` has read of other ones, and what it has written of the parameters that it shares.

        `arguments`: of its call, which `counter` has seen.
        """
        read, written = counter.take_touched()
        shared = {id(each): each for each in written if id(each) in self._shared}
        observed.mutated_buffers += tuple(shared.values())
        own = {id(tensor) for tensor in (*body.parameters(), *body.buffers(), *arguments)}
        layer = f"{name} ({type(body).__name__})"
        self._borrowed += [(layer, tensor) for tensor in read if id(tensor) not in own]

    def check(self, observations: Sequence[Observation]) -> None:
        """Raises `CaptureError` if a layer reads what the stage of another one changes."""
        written = {id(buffer) for observation in observations for buffer in observation.mutated_buffers}
        for layer, tensor in self._borrowed:
            if isinstance(tensor, nn.Parameter) or id(tensor) in written:
                raise CaptureError(
                    f"layer {layer} reads {self._names[id(tensor)]}, which is registered in another layer only: in "
                    "another stage it would not see its updates, and its gradients would be lost. Expected parameters "
                    "and buffers of its own. Register the module that holds it in both layers (self.shared = ...), or "
                    "pass both as one layer"
                )


def _run_once(
    named: Sequence[tuple[str, nn.Module]],
    spread: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]],
    sampled: SampledModel,
    copies: Copies,
) -> tuple[list[Layer], ModelOutput, list[Observation]]:
    """One run of `copies` of the layers on the sample."""
    own, inputs = sampled.call.copied(), sampled.inputs
    args, kwargs = own.args, dict(own.kwargs)
    names = tuple(name for name in inputs.names if name not in inputs.constants)
    layers: list[Layer] = []
    observations: list[Observation] = []
    result: Any = None
    returns, tensors = Form.of(None)
    copied = [(name, copies.of(body)) for name, body in named]
    held = _Held(copied)
    counter = OperatorCounter(held.tensors, sampled.save_parameter)
    for index, (name, body) in enumerate(copied):
        takes, arguments = Form.of((args, kwargs))
        with observed(body, arguments, counter) as observation:
            try:
                result = body(*args, **kwargs)
            except Exception as error:
                raise CaptureError(
                    f"layer {name} ({type(body).__name__}) fails on the sample: {type(error).__name__}: {error}. Every "
                    "layer must accept what the layer before it returns, the first one the sample. Capture runs "
                    "without gradients: a forward takes some in torch.enable_grad()"
                ) from error
        held.note(name, body, arguments, counter=counter, observed=observation)
        returns, tensors = Form.of(result)
        observation.results = tensors
        outputs = (name,) if len(tensors) == 1 else tuple(f"{name}[{index}]" for index in range(len(tensors)))
        layer = EagerLayer(name, named[index][1], takes.own(copies), returns.own(copies))
        layers.append(observation.layer(name, layer, names, outputs))
        observations.append(observation)
        names = outputs
        args, kwargs = spread(result)
    held.check(observations)
    for observation in observations:
        observation.mutated_buffers = tuple(map(copies.own, observation.mutated_buffers))
    rest = iter(names)
    leaves = tuple(next(rest) if constant is Tensor else None for constant in returns.constants)
    constants = tuple(None if constant is Tensor else constant for constant in returns.constants)
    return layers, ModelOutput(returns.structure, leaves, constants), observations


def watch_shared(stages: Sequence[Sequence[Layer]]) -> None:
    """Has each forward of a block raise `PenstockError` if it changes an object that a block of another one of `stages`
    holds, too. That takes a copy of these objects in every forward.
    """
    held = [Reached(bodies_of(layers)).reached for layers in stages]
    counts = Counter(key for each in held for key in each)
    for layers, own in zip(stages, held, strict=True):
        data = {key: named for key, named in own.items() if not isinstance(named[1], nn.Parameter | type)}
        shared = [named for key, named in data.items() if counts[key] > 1]
        for inner in (inner for layer in layers for inner in layer.module.modules() if shared):
            if isinstance(inner, EagerLayer):
                watch = _Watch(shared)
                inner.register_forward_pre_hook(watch.begin)
                inner.register_forward_hook(watch.end)


class _Watch:
    """Compares the objects `shared`, each with a name, before and after a forward."""

    def __init__(self, shared: Sequence[tuple[str, Any]]) -> None:
        self._shared = shared

    def begin(self, layer: EagerLayer, arguments: Any) -> None:
        self._state = ModuleState((), self._shared)

    def end(self, layer: EagerLayer, arguments: Any, results: Any) -> None:
        changed = next((path for path, _ in self._state.changes()), None)
        if changed is not None:
            raise PenstockError(
                f"the forward of {layer.name} ({type(layer.body).__name__}) changes {changed}, which blocks of another "
                "stage hold, too: expected no change, since a stage in another process does not see it, and "
                "microbatches come in another order than in a plain loop. Give every block an object of its own, or "
                "return what it hands on and pass it to the next block"
            )
