"""Lays a model that was captured again out over the stages of a running pipeline.

Code between the blocks was changed, or what it reads: blocks may be left out or added, and constants may be others. The
parameters stay where they are, with their versions and optimizers, so that the training goes on as a plain loop does.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from penstock.capturing.chain import Layer, LayerChain
from penstock.capturing.reads import Change
from penstock.capturing.sequential import bodies_of
from penstock.errors import PenstockError, TransportError
from penstock.runtime.assembly.parallelize_hooks import ParallelStages
from penstock.values.plan_stages import Stage
from penstock.values.plans import Plan


def refit(plan: Plan, before: LayerChain, now: LayerChain) -> tuple[Plan, LayerChain]:
    """`plan`, of the chain `before`, for the chain `now`: each layer is in the stage that it was in, and a new one in
    that of the layer before it. Stages keep the parameters and buffers that no layer uses any more.

    Raises `PenstockError` for other parameters, a stage without layers, and layers in another order.
    """
    for name in before.parameters.keys() | now.parameters.keys():
        if before.parameters.get(name) is not now.parameters.get(name):
            raise PenstockError(
                f"{name} is not the parameter that the pipeline was built with: expected the same ones, under the same "
                "names, since its optimizer steps them. Add, remove and replace parameters before the pipeline is "
                "built, or save, and build a new one"
            )
    homes: defaultdict[int | str, set[int]] = defaultdict(set)
    for index, stage in enumerate(plan.stages):
        for layer in before.layers[stage.start : stage.stop]:
            for key in map(id, (*_bodies(layer), *_tensors(layer))):
                homes[key].add(index)
            homes[layer.name].add(index)
    starts = list[int]()
    stage_of = 0
    for position, layer in enumerate(now.layers):
        keys: tuple[Iterable[int | str], ...] = ((layer.name,), map(id, _bodies(layer)), map(id, _tensors(layer)))
        known = next((found for each in keys if (found := {home for key in each for home in homes.get(key, ())})), None)
        later = sorted(home for home in known or {stage_of} if home >= stage_of)
        if not later or later[0] > len(starts):
            raise _unfit(f"layer {layer.name} would be in another place among the stages")
        stage_of = later[0]
        if stage_of == len(starts):
            starts.append(position)
    if len(starts) < len(plan.stages):
        raise _unfit(f"stage {len(starts)} would have no layers")
    bounds = zip(plan.stages, starts, [*starts[1:], len(now.layers)], strict=True)
    refitted = replace(plan, stages=tuple([Stage(start, stop, old.ranks) for old, start, stop in bounds]))
    for old, new in zip(plan.stages, refitted.stages, strict=True):
        had, has = (
            {id(each): each for layer in chain.layers[stage.start : stage.stop] for each in _tensors(layer)}
            for chain, stage in ((before, old), (now, new))
        )
        if any(isinstance(each, nn.Parameter) and key not in had for key, each in has.items()):
            raise _unfit("a stage would use the parameters of another one")
        _keep(now.layers[new.stop - 1], [each for key, each in had.items() if key not in has])
    return refitted, now


@contextmanager
def refused(change: Change) -> Iterator[None]:
    """Says in a refusal in this block that `change` is its cause."""
    try:
        yield
    except TransportError:
        raise
    except PenstockError as error:
        raise type(error)(
            f"{change} since the pipeline was built. The code between the model's blocks reads it, and was traced, so "
            f"the model was to be captured again. {error}"
        ) from error


def refuse_unfollowed(change: Change, own: ParallelStages, *, weightless: bool, away: bool) -> None:
    """Raises `PenstockError` for a `change` after which the model is not captured again. `weightless`: its weights were
    made by ``init_fn=``. `away`: some are not on the device between steps.
    """
    if change.key == "training":
        raise PenstockError(
            "Expected the mode that the model was captured in, since its dropout would not follow. Call "
            f"model.train({change.before[1]}) before step(); evaluate() and predict() run in evaluation mode whatever "
            "the model is in"
        )
    if own.modules or weightless or away:
        made = f"{'parallelize=' if own.modules else 'init_fn='} has made the modules of stages"
        why = made if own.modules or weightless else "weights of streamed stages are on the host, and capture runs them"
        raise PenstockError(f"Expected no change, since {why}. Build a new Pipeline")


def _unfit(why: str) -> PenstockError:
    return PenstockError(
        f"{why}: expected layers that fit the stages as they are. Make the change before the pipeline is built, or "
        "save, and build a new Pipeline"
    )


def _bodies(layer: Layer) -> list[nn.Module]:
    return bodies_of([layer])


def _tensors(layer: Layer) -> Iterator[Tensor]:
    yield from layer.module.parameters()
    yield from layer.module.buffers()


def _keep(layer: Layer, tensors: Iterable[Tensor]) -> None:
    """Has `layer` hold `tensors`, which it does not use."""
    holder = nn.Module()
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(str(number), tensor)
        else:
            holder.register_buffer(str(number), tensor)
    layer.module.add_module("unused", holder)
