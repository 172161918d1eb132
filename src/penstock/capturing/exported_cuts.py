"""The cuts of a plan in the words of other trainers: module names for torchtitan, a layout string for Megatron-LM."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import nn

from penstock.capturing.chain import LayerChain
from penstock.errors import PlanError
from penstock.values.plans import Plan


def module_names(plan: Plan, chain: LayerChain, model: nn.Module) -> list[list[str]]:
    """By stage of `plan`, the names of the modules of `model` that have parameters or buffers in it: what torchtitan
    reads as ``module_fqns_per_model_part``.

    A module that lies in one stage whole is named, and not its parts; of an ``nn.ModuleList`` and an ``nn.ModuleDict``
    the elements are. `chain`: ``penstock.capture(model, sample)``. Raises `PlanError` for a plan of another model, and
    where other trainers would need a weight in two stages.
    """
    _check_layers(plan, len(chain.layers))
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in range(stage.start, stage.stop)]
    stages_of = defaultdict[str, set[int]](set)
    for name, layers in chain.readers.items():
        holding = {stage_of[layer] for layer in layers}
        path = name.rpartition(".")[0]
        if len(holding) > 1 or not path:
            raise PlanError(
                f"{name}: expected a weight of one module in one stage, found it in "
                f"{f'stages {sorted(holding)}' if len(holding) > 1 else 'the model itself'}: cut elsewhere, or do not "
                "tie it; torchtitan gives whole modules to stages"
            )
        while path:
            stages_of[path] |= holding
            path = path.rpartition(".")[0]
    named: list[list[str]] = [[] for _ in plan.stages]
    inside: set[str] = set()
    for path in sorted(stages_of, key=lambda each: each.count(".")):
        stages, above = stages_of[path], path.rpartition(".")[0]
        if above in inside:
            inside.add(path)
        elif len(stages) == 1 and not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            inside.add(path)
            named[min(stages)].append(path)
    order = {name: number for number, name in enumerate(stages_of)}
    return [sorted(names, key=order.__getitem__) for names in named]


def megatron_layout(plan: Plan, layer_names: Sequence[str]) -> str:
    """The cuts of `plan` as ``--pipeline-model-parallel-layout`` of Megatron-LM: for each stage, ``E`` for the
    embedding, ``t`` for each block and ``L`` for the loss, with ``|`` between stages.

    `layer_names`: of the chain or the profile. Blocks are the layers whose names end with a number, such as ``h.0``;
    what is before them belongs to the embedding and what is behind them to the loss. Raises `PlanError` for a plan of
    another model or one that Megatron-LM has no layout for: of stages in a V, with unequal replicas, with a cut inside
    of the embedding or the loss.
    """
    _check_layers(plan, len(layer_names))
    places = [stage.ranks for stage in plan.stages]
    if len(set(plan.replicas)) > 1 or places != [places[i % len(set(places))] for i in range(len(places))]:
        raise PlanError(
            f"{plan}: expected stages with the same number of replicas that go round the ranks, found others: "
            "Megatron-LM places no others"
        )
    prefixes = [found[1] if (found := re.fullmatch(r"(.*?)\d+", name)) else None for name in layer_names]
    prefix = Counter(each for each in prefixes if each is not None).most_common(1)
    blocks = [layer for layer, each in enumerate(prefixes) if prefix and each == prefix[0][0]]
    if (
        not blocks
        or blocks != list(range(blocks[0], blocks[-1] + 1))
        or blocks[0] == 0
        or blocks[-1] == plan.layers - 1
    ):
        raise PlanError(
            f"layer_names: expected an embedding, blocks with numbers and a head, found {', '.join(layer_names)}: "
            "Megatron-LM trains transformers alone"
        )
    first, last = blocks[0], blocks[-1] + 1
    if plan.stages[0].stop < first or plan.stages[-1].start > last:
        raise PlanError(
            f"{plan}: expected the layers before the blocks in the first stage and those behind them in the last one, "
            "found a cut among them: move it"
        )
    parts = ["t" * (min(stage.stop, last) - max(stage.start, first)) for stage in plan.stages]
    return f"E{'|'.join(parts)}L"


def _check_layers(plan: Plan, layers: int) -> None:
    if plan.layers != layers:
        raise PlanError(f"expected a plan of {layers} layers, found one of {plan.layers}: make it for this model")
