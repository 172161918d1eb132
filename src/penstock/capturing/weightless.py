"""Capturing a model that has no weights yet, and giving them to some of its layers.

A model on the meta device is captured there, with inputs on the meta device: nothing is computed and nothing takes
memory. Then one process makes the weights of its own layers only. What a run on the meta device does not show, random
draws and buffers that are written, is read off the operators instead.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from penstock.capturing.chain import Layer, LayerChain
from penstock.capturing.doors import capture
from penstock.capturing.initialization import InitFn, bare, examined, install, make, named_tensors, place, rooted
from penstock.capturing.module_copies import Copies
from penstock.capturing.module_state import SILENT_WRITERS, find_writable
from penstock.capturing.preservation import in_mode, kept_generators
from penstock.capturing.samples import Call, flatten, read_sample
from penstock.errors import CaptureError
from penstock.torch_internals.dispatch import OperatorMode, schema_of
from penstock.torch_internals.modules import replaced_forward
from penstock.torch_internals.subclasses import packs

_META = torch.device("meta")


def is_weightless(model: nn.Module | Sequence[Any]) -> bool:
    """Whether a parameter or buffer of `model` is on the meta device."""
    return any(tensor.is_meta for tensor in named_tensors(rooted(model)).values())


def asks_for_weights(model: nn.Module | Sequence[Any], init_fn: InitFn | None) -> bool:
    """Whether `init_fn` is to make the weights of `model`. Raises `CaptureError` if one of the two says otherwise, and
    what `init_fn` raises if it does not fit the model.
    """
    tensors = named_tensors(rooted(model))
    without = [name for name, tensor in tensors.items() if tensor.is_meta]
    if without and init_fn is None:
        raise CaptureError(
            f"{', '.join(without[:3])}{f' and {len(without) - 3} more' if len(without) > 3 else ''}: on the meta "
            "device, and nothing says what their values are. Pass init_fn=penstock.reset_parameters(model), which asks "
            "the modules themselves, or a function init_fn(name, tensor) that writes each in place"
        )
    if init_fn is not None and not without:
        raise CaptureError(
            "init_fn= is given and no parameter or buffer of the model is on the meta device: expected a model without "
            "weights, built under `with torch.device('meta'):`. Leave init_fn= out to keep the weights that it has"
        )
    if init_fn is not None:
        # Before the capture, which takes longer.
        examined(init_fn, rooted(model), tensors.keys() - set(without))
    return bool(without)


@dataclass(frozen=True, slots=True, eq=False)
class Weightless:
    """A captured model without weights."""

    chain: LayerChain
    """Over tensors on the meta device."""
    model: nn.Module
    given: Mapping[str, Tensor]
    """By their first names, the tensors that had values before the capture."""
    device: torch.device
    """Where weights will be."""

    def materialize(
        self,
        layers: Collection[int],
        init_fn: InitFn,
        seed: int,
        *,
        streamed: Collection[int] = (),
        move_home: Callable[[Iterable[Tensor]], object] | None = None,
    ) -> LayerChain:
        """The chain with weights for `layers`, by index, and for them only; in the model, too. To be called once.

        What no layer reads comes with layer 0. `move_home` moves parameters of the layers `streamed`, each before the
        next one is made. `init_fn` and `seed` as in `initialize`. Raises `PenstockError` naming
        what `init_fn` left unwritten.
        """
        replaced = examined(init_fn, self.model, self.given.keys())
        chains = (self.chain, self.chain.evaluation())
        held = {
            id(tensor)
            for chain in chains
            for index in layers
            for tensor in (*chain.layers[index].module.parameters(), *chain.layers[index].module.buffers())
        }
        moved = {id(p) for chain in chains for index in streamed for p in chain.layers[index].module.parameters()}
        read = {id(tensor) for chain in chains for module in _modules(chain) for tensor in _own_tensors(module)}
        wanted = {
            name: tensor
            for name, tensor in named_tensors(self.model).items()
            if id(tensor) in held or (0 in layers and id(tensor) not in read)
        }
        sources = {name: self.given.get(name, tensor) for name, tensor in wanted.items()}
        written = {name for name in wanted if name not in self.given or name in replaced}

        def settle(name: str, made: Tensor) -> None:
            if move_home is not None and id(wanted[name]) in moved:
                move_home([made])

        made = make(wanted, sources, written, init_fn=init_fn, seed=seed, device=self.device, settle=settle)
        for modules in (self.model.modules(), *map(_modules, chains)):
            install(modules, made)
        trained, evaluated = (_over(chain, made) for chain in chains)
        evaluated = replace(evaluated, evaluation=lambda: evaluated)
        return evaluated if chains[0] is chains[1] else replace(trained, evaluation=lambda: evaluated)


def capture_weightless(model: nn.Module | Sequence[Any], sample: Any) -> Weightless:
    """Captures `model`, of which a part or all is on the meta device; see `capture`.

    Weights will be where the first tensor of `sample` is. What is not on the meta device keeps its values. Raises
    `CaptureError` also for what cannot be known without numbers: control flow that depends on them, or a tensor that
    the model's code makes on the meta device and reads later.
    """
    leaves, structure = flatten(dict(sample) if isinstance(sample, Mapping) else sample)
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), _META)
    if device.type == "meta":
        raise CaptureError(
            "the model and sample= are both on the meta device, so nothing says where the weights are to be: expected "
            "sample= on the device to train on"
        )
    root = rooted(model)
    tensors = named_tensors(root)
    given = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    install(root.modules(), {id(tensor): bare(tensor) for tensor in given.values()})
    inputs = structure.unflatten([bare(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    try:
        with _unpacked(root):
            chain = capture(model, inputs)
            trained, written = _completed(chain, root, inputs, device)
            evaluated = trained
            if chain.evaluation() is not chain:
                evaluated, _ = _completed(chain.evaluation(), root, inputs, device, evaluates=True)
            _check_writes(model, trained, inputs, written)
    except BaseException as error:
        install(root.modules(), {id(new): given[name] for name, new in named_tensors(root).items() if name in given})
        cause = error.__cause__ or error
        if isinstance(error, CaptureError) and re.search(r"(?<![a-z])meta\b", str(cause)):
            raise CaptureError(_needs_numbers(type(model).__name__, cause)) from cause
        raise
    evaluated = replace(evaluated, evaluation=lambda: evaluated)
    trained = evaluated if chain.evaluation() is chain else replace(trained, evaluation=lambda: evaluated)
    return Weightless(trained, root, given, device)


@contextmanager
def _unpacked(model: nn.Module) -> Iterator[None]:
    """Has modules run, for a block, what their class of `torch.nn` runs where their own code needs packed weights:
    there are none on the meta device.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if any(map(packs, module.parameters(recurse=False))):
                kinds: list[Any] = [k for k in type(module).__mro__ if k.__module__.startswith("torch.nn.modules.")]
                if kinds[0] is not nn.Module:
                    stack.enter_context(replaced_forward(module, MethodType(kinds[0].forward, module), hooks=True))
        yield


def _needs_numbers(name: str, cause: BaseException) -> str:
    from penstock.capturing.export.explanations import first_line, source_line

    where = source_line(cause.__traceback__)
    place = f" At\n    {where[0]}:{where[1]}: {where[2]}\n" if where else " "
    return (
        f"{name} fails on the meta device, where tensors have no numbers.{place}{type(cause).__name__}: "
        f"{first_line(cause)}. Expected code that makes tensors where its inputs are, as torch.arange(n, "
        "device=x.device), and reads none of their numbers, as `if mask.all()` and x.item() do. A model of "
        "transformers reads an attention_mask, and where it has no cache its positions: pass use_cache=True and no "
        "attention_mask in sample=. Or build the model on a real device"
    )


class _Watch(OperatorMode):
    """Notes what the operators in this block do that a run on the meta device does not show."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False
        self.written: dict[int, Tensor] = {}

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        schema = schema_of(func)
        silent = any(kind in schema.name for kind in SILENT_WRITERS) and "backward" not in schema.name
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if isinstance(value, Tensor) and (writes or (silent and "running" in argument.name)):
                self.written[id(value)] = value
        return func(*args, **kwargs)


def _completed(
    chain: LayerChain, model: nn.Module, sample: Any, device: torch.device, *, evaluates: bool = False
) -> tuple[LayerChain, dict[int, Tensor]]:
    """`chain` with what is random marked, and its code for `device` instead of the meta device; and what it writes, by
    id. `evaluates`: in evaluation mode.
    """
    call, inputs = read_sample(sample, chain.inputs.microbatch_size)
    own = call.copied()
    values = inputs.bind(own.args, own.kwargs)
    layers: list[Layer] = []
    written: dict[int, Tensor] = {}
    copies = Copies([model, *(layer.module for layer in chain.layers)])
    mode = in_mode([copies.of(model)], training=False) if evaluates else nullcontext()
    with kept_generators(), torch.no_grad(), mode:
        for layer in chain.layers:
            with _Watch() as watch:
                results = copies.of(layer.module)(*(values[name] for name in layer.inputs))
            values.update(zip(layer.outputs, results, strict=True))
            layers.append(replace(layer, random=watch.random))
            written.update(_own(watch.written, copies))
    known = {id(tensor) for tensor in named_tensors(model).values()}
    for module in _modules(chain):
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if not buffer.is_meta or id(buffer) in known:
                continue
            if buffer.numel() == 0:
                setattr(module, name, place(buffer, device))
            else:
                raise CaptureError(
                    f"the model's code makes a constant of shape {tuple(buffer.shape)} ({name}) on the meta device, "
                    "where its values are lost: register it as a buffer, which init_fn writes, or make it on the CPU"
                )
        if isinstance(module, GraphModule):
            _move_code(module, device)
    return replace(chain, layers=tuple(layers)), written


def _move_code(module: GraphModule, device: torch.device) -> None:
    """Has the operators that make tensors on the meta device make them on `device`."""

    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) and argument.type == "meta" else argument

    for node in module.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
    module.recompile()


def _check_writes(model: Any, chain: LayerChain, sample: Any, seen: Mapping[int, Tensor]) -> None:
    """Raises `CaptureError` if the model writes a buffer in a way that the chain does not."""
    written = dict(seen)
    if any(isinstance(module, GraphModule) for module in _modules(chain)):
        call: Call = read_sample(sample, chain.inputs.microbatch_size)[0].copied()
        copies = Copies([model])
        with kept_generators(), torch.no_grad(), _Watch() as watch:
            copies.of(model)(*call.args, **call.kwargs)
        written.update(_own(watch.written, copies))
    places = {id(getattr(owner, name)) for layer in chain.layers for owner, name in find_writable(layer.module)}
    for name, buffer in named_tensors(rooted(model)).items():
        holders = [layer.name for layer in chain.layers if any(held is buffer for held in layer.module.buffers())]
        if id(buffer) in written and (id(buffer) not in places or len(holders) > 1):
            raise CaptureError(
                f"the model writes the buffer {name} in its forward (layers {', '.join(holders) or 'none'}), which its "
                "trace on the meta device does not show: build the model on a real device, or pass it as an "
                "nn.Sequential or a list of layers"
            )


def _own(written: Mapping[int, Tensor], copies: Copies) -> dict[int, Tensor]:
    """The tensors that `written` are copies of, by id."""
    return {id(own): own for own in map(copies.own, written.values())}


def _modules(chain: LayerChain) -> Iterator[nn.Module]:
    """All modules of its layers."""
    return (module for layer in chain.layers for module in layer.module.modules())


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _over(chain: LayerChain, made: Mapping[int, Tensor]) -> LayerChain:
    """`chain` with its table naming the parameters that its layers hold now. That of buffers reads the modules."""
    parameters = {name: made.get(id(tensor), tensor) for name, tensor in chain.parameters.items()}
    return replace(chain, parameters=parameters)  # type: ignore[arg-type]
