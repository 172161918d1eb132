"""The front door for any module: traced whole, cut between its own blocks.

The training and the evaluation mode are two traces over the same parameters and buffers, cut at the same blocks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from penstock.capturing.chain import Layer, LayerChain
from penstock.capturing.checking import agrees, check_chain
from penstock.capturing.drafts import Draft, Question
from penstock.capturing.export.block_calls import (
    Dimension,
    RecordedCalls,
    grow,
    may_differ,
    record_calls,
    resized,
    shrink,
    size_groups,
)
from penstock.capturing.export.block_choice import group_calls
from penstock.capturing.export.cutting import Partition, call_stacks, cut, result_names
from penstock.capturing.export.dependence import Dependence, depend, is_random, node_memory
from penstock.capturing.export.model_runs import ModelRun, run_on_sample
from penstock.capturing.export.opaque_blocks import OpaqueBlocks, UnknownSize, Untraceable, is_block, opaque_paths
from penstock.capturing.export.openings import NAME as OPENING
from penstock.capturing.export.read_tracing import trace_reads
from penstock.capturing.export.tracing import Trace, is_mutating, trace
from penstock.capturing.joining import join_layers, with_evaluation
from penstock.capturing.model_forms import ModelInputs, ModelOutput
from penstock.capturing.module_copies import Copies
from penstock.capturing.observation import Observation, observed
from penstock.capturing.operators import OperatorCounter
from penstock.capturing.preservation import SavedBuffers
from penstock.capturing.sampled_models import SampledModel, gradients_of, with_gradients
from penstock.capturing.samples import Call
from penstock.capturing.sequential import Flag, bodies_of
from penstock.capturing.shared_writes import note_writes
from penstock.errors import CaptureError
from penstock.torch_internals.dispatch import schema_of

_FREE: tuple[Literal["sizes", "samples", "nothing"], ...] = ("sizes", "samples", "nothing")


def draft_exported(model: nn.Module, call: Call, inputs: ModelInputs, check: bool) -> Draft:
    """`model` traced by `torch.export` and cut between its blocks, in the mode that it is in.

    `check`: whether to check that it computes what the model does.
    """
    draft, partition, opening = _capture(model, call, inputs, None, check)
    trained = partition, draft.chain.layers, opening

    def evaluation() -> LayerChain:
        return _capture(model, call, inputs, trained, check)[0].alone()

    return replace(draft, finish=lambda chain: with_evaluation(chain, model, type(model).__name__, evaluation))


def _capture(
    model: nn.Module,
    call: Call,
    inputs: ModelInputs,
    trained: tuple[Partition, Sequence[Layer], str | None] | None,
    check: bool,
) -> tuple[Draft, Partition, str | None]:
    """The draft, what it was cut into before layers were joined, and the block that its opening ends with. `trained`:
    the same of the training, if this trace is for evaluation.
    """
    trains = trained is None
    sampled = SampledModel(model, call, inputs, evaluates=not trains)
    run = run_on_sample(sampled)
    own = opaque_paths(model, run)
    traced, recorded, dependence = _trace(sampled, own, run, None if trained is None else trained[2])
    if not dependence.steps:
        raise CaptureError(f"{type(model).__name__} computes nothing with its parameters: there is nothing to cut")
    stacks = call_stacks(dependence.steps, traced.blocks, model)
    partition, joined = (_partition(model, stacks, run.blocks), None) if trained is None else trained[:2]
    layers = cut(traced, dependence, stacks, partition)
    opening = traced.blocks.opening
    leaves = [None if opening and index in opening.lost else leaf for index, leaf in enumerate(run.leaves)]
    _check_results(sampled, leaves, traced)
    names = iter(result_names(traced))
    output = ModelOutput(
        structure=run.structure,
        leaves=tuple(next(names) if leaf is torch.Tensor else None for leaf in leaves),
        constants=tuple(None if leaf is torch.Tensor else leaf for leaf in leaves),
    )
    tensors = inputs.bind(call.args, call.kwargs)
    chain = LayerChain(
        layers=_observe(sampled, layers, output, joined),
        inputs=replace(
            inputs,
            sizes=traced.sizes,
            equal=_not_only_samples(traced.equal, inputs),
            dtypes={name: tensor.dtype for name, tensor in tensors.items()},
            guards=traced.guards,
        ),
        output=output,
        parameters=dict(model.named_parameters(remove_duplicate=False)),
        buffers=SavedBuffers(model),
        evaluation=lambda: chain,
        communicates=run.communicates,
        reads=trace_reads(sampled, own, run.called_by_forward),
    )
    return (
        Draft(
            chain, tuple(_questions(sampled, chain, recorded, check=check, trains=trains, opens=opening is not None))
        ),
        partition,
        traced.blocks.first,
    )


def _questions(
    sampled: SampledModel, chain: LayerChain, recorded: RecordedCalls, *, check: bool, trains: bool, opens: bool
) -> Iterator[Question]:
    """What runs of the model and of `chain` have to show. The first one takes the longest."""
    inputs, tensors = chain.inputs, sampled.inputs.bind(sampled.call.args, sampled.call.kwargs)
    if check:
        yield Question(partial(check_chain, sampled, chain, trains=trains))
        for places in _free_groups(sampled, inputs, tensors):
            single = resized(sampled, places, lambda tensor, index: tensor.narrow(index, 0, 1))
            yield Question(partial(agrees, sampled, chain, single), partial(_bounded, dict.fromkeys(places, (2, None))))
        groups = list(size_groups(sampled, least=2)) if opens else []
        # Dimensions may have one size by chance.
        apart = [
            frozenset(each for each in group if each[1] == index) for group in groups for _, index in sorted(group)
        ]
        for places in dict.fromkeys((*groups, *apart)):
            # The opening has handed on numbers as they are on the sample.
            shape = {(name, index): (tensors[name].shape[index],) * 2 for name, index in places}
            yield Question(partial(_agree, sampled, chain, places), partial(_bounded, shape))
    for group in _not_only_samples(recorded.together, sampled.inputs):
        if group not in inputs.equal:
            yield Question(partial(may_differ, sampled, group), partial(_equal, group))
    if trains:
        bodies = [bodies_of([layer]) for layer in chain.layers]
        yield Question(partial(gradients_of, sampled, chain, bodies), with_gradients)


def _trace(
    sampled: SampledModel, paths: Collection[str], run: ModelRun, first: str | None
) -> tuple[Trace, RecordedCalls, Dependence]:
    """The trace with as many free sizes as the blocks at `paths` allow. `first`: the block that the opening ends with.

    Code that cannot be traced becomes a part of the opening, if a block is called after it.
    """
    later = run.order if first is None else run.order[run.order.index(first) :]
    called = paths if first is None else ["", *(path for path in paths if path in later)]
    for free in _FREE:
        recorded = record_calls(sampled, called, run, free, first)
        blocks = OpaqueBlocks(recorded.calls, sampled.model, first, later)
        try:
            traced = trace(sampled, blocks, recorded.fixed)
            leave_out_optional_arguments(traced)
            parameters = {id(parameter) for parameter in sampled.model.parameters()}
            return traced, recorded, depend(traced, parameters, run.written_buffers)
        except UnknownSize:
            if free == _FREE[-1]:
                raise
        except Untraceable as error:
            entered = {call.path for call in blocks.traced[: error.calls]}
            behind = [path for path in later if path in called and path not in entered]
            if first is not None or len(behind) < 2:
                raise
            try:
                return _trace(sampled, paths, run, behind[0])
            except Untraceable:
                raise error from None
            except CaptureError as other:
                raise CaptureError(
                    f"{error}. As one layer with all before it, which runs as it is, this code does not train either: "
                    f"{other}"
                ) from error
    raise AssertionError("the last one returns or raises")


def _check_results(sampled: SampledModel, leaves: Sequence[Any], traced: Trace) -> None:
    returned = sum(leaf is torch.Tensor for leaf in leaves)
    if returned != len(traced.results):
        raise CaptureError(
            f"{sampled.name} returns {returned} tensors, and {len(traced.results)} of them in a trace of the code "
            "between its blocks. Hooks on blocks and in them are not traced, and models of transformers collect "
            "attentions, router logits and hidden states by hooks. Leave these out (output_attentions=False); build "
            "the pipeline before the model is first called; or pass the model as a list of layers"
        )


def _not_only_samples(groups: Iterable[Sequence[Dimension]], inputs: ModelInputs) -> tuple[tuple[Dimension, ...], ...]:
    """Without the groups of nothing but numbers of samples, which are checked as such."""
    samples = {(name, 0) for name in inputs.batched}
    ordered = dict.fromkeys(tuple(sorted(group)) for group in groups)
    return tuple(group for group in ordered if not samples.issuperset(group))


def _partition(model: nn.Module, stacks: list[list[tuple[str, str]]], blocks: Collection[str]) -> Partition:
    calls: dict[tuple[str, str], None] = {}
    for stack in stacks:
        found = next((entry for entry in stack if entry[0] in blocks or entry[1] == OPENING), None)
        if found is not None:
            calls[found] = None
    return group_calls(model, list(calls)) if calls else ((type(model).__name__, ()),)


def _observe(
    sampled: SampledModel, layers: list[Layer], output: ModelOutput, trained: Sequence[Layer] | None
) -> tuple[Layer, ...]:
    """`layers` with what a run of them shows, and what their code can write."""
    call = sampled.call.copied()
    with sampled.copied(layers) as copies, torch.no_grad():
        observations = _run_layers(layers, sampled.inputs.bind(call.args, call.kwargs), copies)
    note_writes(observations, [bodies_of([layer]) for layer in layers])
    completed = [
        observation.layer(layer.name, layer.module, layer.inputs, layer.outputs)
        for layer, observation in zip(layers, observations, strict=True)
    ]
    for observation in observations:
        observation.mutated_buffers = tuple(map(copies.own, observation.mutated_buffers))
    return join_layers(completed, output.values, observations, trained)


def _run_layers(layers: Sequence[Layer], values: dict[str, torch.Tensor], copies: Copies) -> list[Observation]:
    """What a run of the copies of `layers` shows. `values`: the model's inputs; the results are added to them."""
    counter, observations = OperatorCounter(), []
    for layer in layers:
        arguments, module = tuple(values[name] for name in layer.inputs), copies.of(layer.module)
        with observed(module, arguments, counter) as observation:
            try:
                observation.results = tuple(module(*arguments))
            except Exception as error:
                raise CaptureError(
                    f"layer {layer.name} fails on the sample with its arguments alone: {type(error).__name__}: "
                    f"{error}. Expected blocks that get all that they read as arguments: what another block, or the "
                    "code between blocks, has put in a dict, an attribute or a global variable is not there. Pass it "
                    "on as a result and an argument"
                ) from error
        values.update(zip(layer.outputs, observation.results, strict=True))
        observations.append(observation)
    return observations


_SIZES = (
    *("aten::sym_size", "aten::sym_numel", "aten::sym_stride", "aten::sym_storage_offset"),
    *("aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full"),
    *("aten::zeros_like", "aten::ones_like", "aten::full_like"),
)
"""Operators that look at the sizes of their arguments only."""


def leave_out_optional_arguments(trace: Trace) -> None:
    """Changes the calls of blocks in `trace` that get an argument which they do not get in a run.

    Models leave out a mask where they can see that it hides nothing. In a trace they cannot see it, and pass the mask.
    A mask that follows from sizes alone is left out here as well, so that blocks compute what they compute in a run.
    One that follows from the values of inputs is kept: for other values the model would pass it.
    """
    blocks = trace.blocks
    if not any(call.unrecorded for call in blocks.traced):
        return
    valued = _valued(trace)
    for node in trace.graph.graph.find_nodes(op="call_function", target=torch.ops.penstock.block.default):
        tensors, numbers, call = cast("tuple[Sequence[Node], Any, int]", node.args)
        found = blocks.traced[call]
        leaves = found.tensor_leaves()
        out = {
            leaf
            for leaf, tensor in zip(leaves, tensors, strict=True)
            if leaf in found.unrecorded and found.takes.constants[leaf] is not Flag and tensor not in valued
        }
        if out:
            kept = [tensor for leaf, tensor in zip(leaves, tensors, strict=True) if leaf not in out]
            node.args = (kept, numbers, call)
            blocks.traced[call] = found.with_recorded(out)


def _valued(trace: Trace) -> set[Node]:
    """What depends on the values of inputs, parameters and buffers, and not on sizes alone."""
    found = {node for node, source in trace.sources.items() if not source.is_constant}
    written: set[int] = set()
    while True:
        before = len(found)
        for node in trace.graph.graph.nodes:
            if (
                is_block(node)
                or is_random(node)
                or node_memory(node) in written
                or (any(each in found for each in node.all_input_nodes) and not _of_sizes(node))
            ):
                found.add(node)
        written = {node_memory(node.args[0]) for node in found if is_mutating(node)} - {0}
        if len(found) == before:
            return found


def _of_sizes(node: Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and schema.name in _SIZES


def _agree(sampled: SampledModel, chain: LayerChain, places: Collection[Dimension]) -> bool:
    """Whether `chain` returns what the model does for other sizes of `places` than in the sample."""
    return all(agrees(sampled, chain, resized(sampled, places, way)) for way in (grow, shrink))


def _bounded(bounds: Mapping[Dimension, tuple[int, int | None]], chain: LayerChain, agreed: bool) -> LayerChain:
    """Without sizes beyond `bounds`, if `chain` differs from the model for some, such as a single entry.

    Export takes it for granted that a free size is at least two, and drops what the model's code would do for a single
    sample, or a sequence of a single token: ``if length == 1``, or a `squeeze`. Most models do nothing of that kind,
    and a prediction is often of one sample. So the first sample, or the first steps, of the sample are tried.
    """
    if agreed:
        return chain
    sizes = {name: list(bounds) for name, bounds in chain.inputs.sizes.items()}
    for (name, index), (least, most) in bounds.items():
        sizes[name][index] = (least, sizes[name][index][1] if most is None else most)
    return replace(chain, inputs=replace(chain.inputs, sizes={name: tuple(each) for name, each in sizes.items()}))


def _equal(group: tuple[Dimension, ...], chain: LayerChain, differ: bool) -> LayerChain:
    """The chain with sizes of `group` that must be equal, unless they may `differ`."""
    return chain if differ else replace(chain, inputs=replace(chain.inputs, equal=(*chain.inputs.equal, group)))


def _free_groups(
    sampled: SampledModel, inputs: ModelInputs, tensors: Mapping[str, Tensor]
) -> list[frozenset[Dimension]]:
    """The dimensions that may have size one, those together that may only have it together: a mask of one for a
    sequence of many is nothing that a user passes.
    """

    def is_free(place: Dimension) -> bool:
        name, index = place
        return inputs.sizes[name][index][0] <= 1 and tensors[name].shape[index] > 1

    free = (frozenset(filter(is_free, group)) for group in size_groups(sampled, least=2))
    return [group for group in free if group]
