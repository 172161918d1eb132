"""One `torch.export` of a model, between flat lists of tensors.

The model is traced inside a wrapper that takes the tensors among its arguments and returns the tensors in its result,
so that nothing later has to know dataclasses, keywords or constants. The trace is made of PyTorch's own operators and
keeps, for every operator, the stack of module calls that it ran in; that stack is what the cuts go by.
"""

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from penstock.capturing.export.explanations import explained
from penstock.capturing.export.opaque_blocks import OpaqueBlocks, Untraceable, call_of, calls_before, is_block, opaque
from penstock.capturing.export.openings import TracedOpening
from penstock.capturing.lost_backwards import functions_refused
from penstock.capturing.model_forms import ModelInputs, SizeGuard
from penstock.capturing.module_copies import Copies
from penstock.capturing.sampled_models import SampledModel
from penstock.capturing.samples import flatten
from penstock.errors import CaptureError
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.dispatch import schema_of
from penstock.torch_internals.export import hidden_from_the_model, shape_guards
from penstock.torch_internals.hidden_modules import UsedHidden
from penstock.torch_internals.modules import tensor_tables
from penstock.torch_internals.tensors import storage_key

_PREFIX = "model."


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a placeholder of the trace stands for."""

    name: str
    """The value name of an input; the original name of a parameter or buffer; a made-up one for a constant."""
    tensor: Tensor | None
    """The model's own tensor; None for an input."""
    is_constant: bool = False
    """Whether it is a tensor that the model's code makes of nothing but constants."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The traced graph, and what its ends mean."""

    graph: GraphModule
    sources: Mapping[Node, Source]
    results: tuple[Any, ...]
    """The nodes of the tensors that the model returns."""
    sizes: Mapping[str, tuple[tuple[int, int | None], ...]]
    """For the dimensions of every input: the least and the greatest size that the trace holds for; None is no bound."""
    equal: tuple[tuple[tuple[str, int], ...], ...]
    """Groups of dimensions of inputs, by name and index, that the trace takes for equal, as the model's code asked."""
    blocks: OpaqueBlocks
    """What its calls of blocks stand for."""
    guards: tuple[SizeGuard, ...]
    """What else the model's code asked about sizes."""


class FlatModel(nn.Module):
    """The model between the tensors of its arguments and the tensors of its result."""

    """`sample`: the tensors that an opening runs on."""

    def __init__(
        self, model: nn.Module, inputs: ModelInputs, blocks: OpaqueBlocks, sample: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self.form = inputs
        self.blocks = blocks
        self.training = model.training
        self.sample = sample
        tables = [table for module in model.modules() for table in tensor_tables(module) if type(table) is dict]
        self.tables = [(table, dict(table)) for table in tables]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        call = self._call(tensors)
        hidden, first, opening = self.blocks.hidden, self.blocks.first, None
        with hidden.watched() if hidden is not None else nullcontext(), ExitStack() as stack:
            if self.sample and first is not None:
                opening = self.blocks.opening = TracedOpening(first, self.tables, call, stack)
                call = opening.begin(self._call(self.sample))
            args, kwargs = call
            results, _ = flatten(self.model(*args, **kwargs))
        if opening is not None:
            results = opening.results(results)
        if any(isinstance(leaf, torch.SymInt) for leaf in results):
            raise CaptureError(
                "the model returns a size that depends on its inputs: return the tensor, and take its size outside of "
                "the model"
            )
        return tuple(leaf for leaf in results if isinstance(leaf, Tensor))

    def _call(self, tensors: Sequence[Tensor]) -> Any:
        rest, constants = iter(tensors), self.form.constants
        leaves = [constants[name] if name in constants else next(rest) for name in self.form.names]
        return pytree.tree_unflatten(leaves, self.form.structure)


def trace(sampled: SampledModel, blocks: OpaqueBlocks, fixed: Collection[tuple[str, int]]) -> Trace:
    """Exports the model for any number of samples, and any other size that its code allows. `blocks` are not traced.

    `fixed`: the dimensions of inputs that the model takes in the size of the sample only.

    Raises `CaptureError` with the line of the model that cannot be traced.
    """
    model, inputs = sampled.model, sampled.inputs
    leaves, _ = flatten((sampled.call.args, sampled.call.kwargs))
    pairs = [(name, leaf) for name, leaf in zip(inputs.names, leaves, strict=True) if name not in inputs.constants]
    if inputs.microbatch_size == 1:
        # Export takes a size of 1 for a constant.
        pairs = [(name, torch.cat([leaf, leaf]) if name in inputs.batched else leaf) for name, leaf in pairs]
    names = tuple(name for name, _ in pairs)
    tensors = tuple(leaf.detach() for _, leaf in pairs)
    samples = (
        f"the number of samples was taken to be {inputs.microbatch_size}, dimension 0 of {sorted(inputs.batched)[0]}"
    )
    own_backwards = nullcontext() if sampled.evaluates else functions_refused()
    with explained(model, samples, blocks), _known_warnings_ignored(), own_backwards:
        try:
            for hide in (True, False):
                # The model's code may install hooks on blocks when it first runs, as that of transformers does. So the
                # second attempt must find what the first one found.
                with suppress(UsedHidden), sampled.copied() as copies, opaque(blocks, copies, hide=hide):
                    flat = FlatModel(copies.of(model), inputs, blocks, tensors if blocks.first is not None else ())
                    program = _export_as_freely_as_possible(flat, names, tensors, inputs, fixed)
                    break
        except CaptureError:
            raise
        except Exception:
            # Outside, where blocks are themselves and can be run.
            with sampled.copied() as copies:
                _run_with_other_batch(FlatModel(copies.of(model), inputs, blocks), names, tensors, inputs)
            raise
    return _read(program, model, names, blocks, copies)


def _export_as_freely_as_possible(
    flat: FlatModel,
    names: tuple[str, ...],
    tensors: tuple[Tensor, ...],
    inputs: ModelInputs,
    fixed: Collection[tuple[str, int]],
) -> ExportedProgram:
    """The first of these that can be traced: as it runs eagerly; as it wants to be exported; that, with fixed sizes."""
    # If this fails, one of the others shows where.
    with hidden_from_the_model() as asked:
        try:
            return _export(flat, names, tensors, inputs, fixed=fixed, other=Dim.AUTO)
        except CaptureError:
            raise
        except Exception:
            pass
    try:
        if asked:
            return _export(flat, names, tensors, inputs, fixed=fixed, other=Dim.AUTO)
    except Exception:
        pass
    # Some models allow any batch size but compute with the other sizes in ways that export cannot follow.
    return _export(flat, names, tensors, inputs, fixed=fixed, other=Dim.STATIC)


def _give_written_inputs_copies(program: ExportedProgram, inputs: Sequence[Node]) -> None:
    """Lets the trace write in copies of its inputs: every layer starts from the batch as the user gave it."""
    written = {
        storage_key(argument.meta["val"].untyped_storage())
        for node in program.graph.nodes
        if is_mutating(node) and isinstance(argument := node.args[0], Node)
    }
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    for node in inputs:
        value = node.meta["val"]
        if storage_key(value.untyped_storage()) in written:
            with program.graph.inserting_before(first):
                copy = program.graph.call_function(torch.ops.aten.clone.default, (node,))
            node.replace_all_uses_with(copy)
            copy.args = (node,)
            copy.meta = dict(node.meta)
            node.meta["val"] = None


def is_mutating(node: Node) -> bool:
    """Whether the operator declares that it writes one of its arguments."""
    schema = schema_of(node.target)
    return bool(schema is not None and schema.is_mutable)


def _export(
    flat: FlatModel,
    names: tuple[str, ...],
    tensors: tuple[Tensor, ...],
    inputs: ModelInputs,
    *,
    fixed: Collection[tuple[str, int]],
    other: Any,
) -> ExportedProgram:
    shapes = []
    for name, tensor in zip(names, tensors, strict=True):
        # Export fixes a size of 0 or 1 in any case, but it warns if another request was made.
        sizes: dict[int, Any] = {
            index: other if size > 1 and (name, index) not in fixed else Dim.STATIC
            for index, size in enumerate(tensor.shape)
        }
        if name in inputs.batched and (name, 0) not in fixed:
            sizes[0] = Dim.DYNAMIC
        shapes.append(sizes)
    # On its way to an error, export prints pages; what matters of them is in the exception.
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return torch.export.export(flat, tensors, dynamic_shapes=(tuple(shapes),), strict=False)


def _run_with_other_batch(
    flat: FlatModel, names: tuple[str, ...], tensors: tuple[Tensor, ...], inputs: ModelInputs
) -> None:
    """Runs the model on one sample more than it was given: code that fixes the batch size fails at its line."""
    grown = [torch.cat([t, t[:1]]) if name in inputs.batched else t for name, t in zip(names, tensors, strict=True)]
    with torch.no_grad():
        flat(*grown)


@contextmanager
def _known_warnings_ignored() -> Iterator[None]:
    """Ignores the warnings that PyTorch and transformers raise about themselves while tracing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|transformers)\b")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|transformers)\b")
        # Recurrent modules keep a list of their own parameters, which export takes for state that the model invents.
        warnings.filterwarnings("ignore", category=UserWarning, message=r"The tensor attributes? .*\._flat_weights\[")
        yield


def _read(
    program: ExportedProgram, model: nn.Module, names: tuple[str, ...], blocks: OpaqueBlocks, copies: Copies
) -> Trace:
    """`program` over the tensors of `model`, of which one of `copies` was traced."""
    _open_regions(program, blocks)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    sources: dict[Node, Source] = {}
    rest = iter(names)
    shapes: dict[str, tuple[int | torch.SymInt, ...]] = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        target = (spec.target or "").removeprefix(_PREFIX)
        match spec.kind:
            case InputKind.PARAMETER:
                sources[node] = Source(target, parameters[target])
            case InputKind.BUFFER:
                sources[node] = Source(target, buffers[target])
            case InputKind.CONSTANT_TENSOR:
                sources[node] = Source(f"_constants.{node.name}", copies.own(program.constants[spec.target]), True)
            case InputKind.USER_INPUT:
                name = next(rest)
                sources[node] = Source(name, None)
                shapes[name] = tuple(node.meta["val"].shape)
            case _:
                kind = f"an object of {type(program.constants.get(spec.target)).__name__}"
                if isinstance(program.constants.get(spec.target), torch.Generator):
                    kind = "a torch.Generator of its own"
                raise Untraceable(
                    calls_before(next(iter(node.users), node)),
                    f"the code between the model's blocks uses {kind}, which is no tensor and no module: a trace "
                    "cannot hold it. Use it inside of a block, draw random numbers without generator=, or pass the "
                    "model as nn.Sequential or as a list of layers",
                )
    _give_written_inputs_copies(program, [node for node, source in sources.items() if source.tensor is None])
    sizes = {name: tuple(_bounds(size, program) for size in shape) for name, shape in shapes.items()}
    output = next(iter(reversed(program.graph.nodes)))
    results = tuple(output.args[0])
    return Trace(
        graph=program.graph_module,
        sources=sources,
        results=results,
        sizes=sizes,
        equal=_equal(shapes),
        blocks=blocks,
        # How an input lies in memory changes no number.
        guards=tuple(SizeGuard.of(code, names) for code in shape_guards(program) if "stride()" not in code),
    )


def _equal(shapes: Mapping[str, tuple[int | torch.SymInt, ...]]) -> tuple[tuple[tuple[str, int], ...], ...]:
    groups: defaultdict[Any, list[tuple[str, int]]] = defaultdict(list)
    for name, shape in shapes.items():
        for index, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
                groups[size.node.expr].append((name, index))
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _bounds(size: int | torch.SymInt, program: ExportedProgram) -> tuple[int, int | None]:
    """The sizes that the trace holds for: what the model's code asked of this one, such as ``if length < 512``."""
    if isinstance(size, int):
        return size, size
    expression = size.node.expr
    if expression.is_number:
        return int(expression), int(expression)
    found = program.range_constraints.get(expression)
    if found is None:
        return 0, None
    # Export starts from "at least 2" without having been asked.
    least = int(found.lower) if found.lower.is_Integer and found.lower > 2 else 0
    return least, int(found.upper) if found.upper.is_Integer else None


def _open_regions(program: ExportedProgram, blocks: OpaqueBlocks) -> None:
    """Opens the regions of `program` under ``torch.no_grad()`` that call blocks. `CaptureError` for other regions.

    A trace keeps the operators of such a region in a graph of its own, which is one node of the trace. An open one has
    its operators take detached tensors, and its blocks run without gradients.
    """
    root = program.graph_module
    modules = dict(root.named_modules())
    waiting = [node for node in root.graph.nodes if node.op == "call_function"]
    while waiting:
        node = waiting.pop()
        for inner in [each for each in node.all_input_nodes if each.op == "get_attr"]:
            graph = modules.get(str(inner.target))
            if isinstance(graph, GraphModule) and _calls_blocks(graph):
                if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
                    raise CaptureError(
                        f"blocks are called inside {node.target}, which can be run with operators only. If this is "
                        "torch.autocast around the blocks, pass autocast= to Pipeline instead; else do it inside of "
                        "a block, or pass the model as a list of layers"
                    )
                waiting += _open(node, inner, graph, blocks)
                break
    root.recompile()


def _calls_blocks(graph: GraphModule) -> bool:
    inner = [module for module in graph.modules() if isinstance(module, GraphModule)]
    return any(is_block(node) for each in inner for node in each.graph.nodes)


def _open(node: Node, region: Node, graph: GraphModule, blocks: OpaqueBlocks) -> list[Node]:
    """Puts the nodes of `graph` in place of `node`, and returns them."""
    enabled, _, *given = node.args
    copies: dict[Node, Node] = {}
    made: list[Node] = []
    operands = iter(cast("list[Node]", given))
    outer = node.graph
    with outer.inserting_before(node):
        for inner in graph.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = _taken(next(operands), bool(enabled))
                continue
            if inner.op == "output":
                break
            copy = copies[inner] = outer.node_copy(inner, copies.__getitem__)
            if inner.op == "get_attr":
                copy.target = f"{region.target}.{inner.target}"
            if is_block(copy):
                call, _ = call_of(copy)
                blocks.traced[call] = replace(blocks.traced[call], gradients=bool(enabled))
            made.append(copy)
    results = next(iter(reversed(graph.graph.nodes))).args[0]
    for user in list(node.users):
        index = cast(int, user.args[1])
        user.replace_all_uses_with(copies[cast("tuple[Node, ...]", results)[index]])
        outer.erase_node(user)
    outer.erase_node(node)
    return made


def _taken(operand: Node, enabled: bool) -> Node:
    """What an operator in a region sees of `operand`, a node outside of it."""
    value = operand.meta.get("val")
    if enabled or not isinstance(value, Tensor):
        return operand
    detached = operand.graph.call_function(torch.ops.aten.detach.default, (operand,))
    # The same memory: what is written in it is written in the operand. It belongs where it stands, and not to the
    # modules that made the operand.
    detached.meta = {key: value for key, value in operand.meta.items() if key != "nn_module_stack"}
    return detached
