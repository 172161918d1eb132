"""What all ranks must agree on before they train: plan, schedule, model, options and optimizers.

A difference would end in a hang, or in other numbers than those of one device. Every rank says what it has in words,
by a key, and where two ranks have other words under one key, they are out of agreement.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.module_state import tensors_in
from penstock.capturing.sequential import EagerLayer
from penstock.errors import PenstockError, PlanError
from penstock.runtime.assembly.pipeline_options import OPTIONS, PipelineOptions
from penstock.runtime.engine.call_agreement import digest_values
from penstock.runtime.transport.worlds import World
from penstock.scheduling.actions import format_programs
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.schedule_names import identify
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import enough_minibatches
from penstock.torch_internals.modules import step_hooks
from penstock.torch_internals.subclasses import wraps_tensors
from penstock.torch_internals.unimported import is_dtensor
from penstock.training.losses import model_loss
from penstock.values.plans import Plan


def check_options(world: World, options: PipelineOptions) -> None:
    """Raises `PenstockError` on every rank if the ranks were given different `options`. Collective.

    `OPTIONS` says how each is compared. A function is compared by whether it is given, since ranks may define it in
    different places.
    """
    mine: dict[str, str] = {}
    for part in (options.model, options.recipe, options.plan, options.run):
        compared = (name for name, rule in OPTIONS.items() if rule.agrees == "value")
        for name in {each.name for each in fields(part)}.intersection(compared):
            value = getattr(part, name)
            mine[name] = f"{name}={_describe(os.path.abspath(value) if name == 'resume' and value else value)}"
    gathered = world.gather(mine, "while they compared their options")
    _require(world.rank, mine, gathered, {name: f"Pass the same {name}= to every Pipeline" for name in mine})


def check_agreement(world: World, plan: Plan, chain: LayerChain, schedule: Schedule, *, weights: bool) -> None:
    """Raises `PlanError` on every rank if the ranks have different plans, models or skips. Collective.

    `weights`: whether the values of the model's tensors count. They do not where all are loaded afterwards.
    """
    if world.processes == 1:
        return
    # A definition of a schedule need not be one that can be pickled, and of Penstock's own ones one step is enough.
    own = isinstance(identify(schedule.definition), str)
    programs = schedule.step(0) if own else schedule.program(enough_minibatches(schedule))
    compared = [getattr(plan, field.name) for field in fields(plan) if field.compare]
    mine = {
        "model": f"a model of layers {[layer.name for layer in chain.layers]}"
        f" and parameters {_digest(repr(list(chain.parameters)))}",
        "plan": f"plan {_digest(repr(compared))}:\n{plan}\n",
        "skips": f"direct messages between the stages {schedule.skips}",
        "schedule": f"a schedule {str(plan.schedule)!r} of programs and guarantees "
        + _digest(f"{format_programs(programs)}\n{schedule.guarantees}"),
    }
    fixes = {
        "model": "Build the same model on every rank",
        "plan": "Two profiles never agree exactly: plan on one rank and give the plan to all, or load it from a file",
        "skips": "Pass samples of the same shapes on every rank",
        "schedule": "Define the schedule alike on every rank, by the sizes of the pipeline alone",
    }
    for name, tensor in _tensors(chain).items() if weights else ():
        # The sum reads all numbers, and the digest tells permutations of them apart.
        total = 0.0 if tensor.is_meta else _sum(tensor.detach())
        digest = digest_values([tensor.detach()], full=True)
        mine[name] = f"{name} of {tuple(tensor.shape)}, {tensor.dtype}, and sum {total!r}, digest {digest or 'none'}"
        fixes[name] = "All must start alike: call torch.manual_seed(...) with one seed before building the model"
    _require(world.rank, mine, world.gather(mine, "while they compared models and plans"), fixes, PlanError)


def _tensors(chain: LayerChain) -> dict[str, torch.Tensor]:
    """What the model holds, by what it is called: parameters, buffers (also those that no state dict has), and tensors
    in attributes, such as the scales of packed weights.
    """
    named: dict[str, torch.Tensor] = {f"weights {name}": tensor for name, tensor in chain.parameters.items()}
    named |= {f"buffer {name}": tensor for name, tensor in chain.buffers.items()}
    known = {id(tensor) for tensor in named.values()}
    for layer in chain.layers:
        blocks = [(inner.name, inner.body) for inner in layer.module.modules() if isinstance(inner, EagerLayer)]
        for name, module in (*blocks, (layer.name, layer.module)):
            inside = {f"tensor {path} of layer {name}": each for path, each in tensors_in(module)}
            named |= {text: each for text, each in inside.items() if id(each) not in known}
            known.update(map(id, inside.values()))
    # What a tensor of a subclass wraps is among the last.
    return {name: tensor for name, tensor in named.items() if not wraps_tensors(tensor)}


def _sum(tensor: torch.Tensor) -> float:
    """The sum of its numbers; of packed ones that of their bytes."""
    packed = tensor.itemsize == 1 and tensor.layout is torch.strided and not tensor.is_quantized
    numbers = tensor.contiguous().view(torch.uint8) if packed else tensor
    return float(numbers.sum(dtype=torch.float64)) if packed or tensor.is_floating_point() else 0.0


def check_optimizers(
    world: World,
    optimizers: Sequence[torch.optim.Optimizer],
    named: Mapping[str, nn.Parameter],
    schedulers: Sequence[object],
) -> bool:
    """Whether any rank trains a parameter. Raises `PenstockError` on every rank that holds one of the `named`
    parameters if another rank, a replica or one that shares it, steps it with other options. Collective.

    Warns where groups of the same number have other options. `schedulers`: of the learning rates, one for each of
    `optimizers`, or none.
    """
    for optimizer in optimizers:
        _check_kinds(optimizer)
    log, names = logging.getLogger("penstock"), {id(parameter): name for name, parameter in named.items()}
    mine: dict[str, str] = {}
    groups: list[dict[str, str]] = []
    for number, optimizer in enumerate(optimizers):
        scheduler = type(schedulers[number]).__qualname__ if schedulers else "none"
        for group in optimizer.param_groups:
            options = {"optimizer": type(optimizer).__qualname__, "lr_scheduler": scheduler}
            options["options"] = ", ".join(sorted(group))
            options.update({key: _describe(value) for key, value in group.items() if key != "params"})
            groups.append({key: f"{key}={value}" for key, value in options.items()})
            for name in (names[id(p)] for p in group["params"] if id(p) in names and p.requires_grad):
                mine |= {f"{name} {key}": f"steps of {name} with {text}" for key, text in groups[-1].items()}
    if world.processes > 1 and any(map(step_hooks, optimizers)):
        log.warning(
            f"rank {world.rank}: an optimizer has hooks on its steps, which see the parameters of this process only: "
            "expected hooks that look at each by itself. Clip all together with clip_grad_norm="
        )
    gathered = world.gather((mine, groups), "while they compared their optimizers")
    _require(
        world.rank,
        mine,
        [other for other, _ in gathered],
        dict.fromkeys(mine, "Its copies would drift apart: build the same optimizer and scheduler on every rank"),
    )
    for rank, (_, other) in enumerate(gathered[: world.rank]):
        # A rank may leave out groups that have no parameter there.
        pairs = zip(groups, other, strict=True) if len(other) == len(groups) else ()
        if found := next(((its[key], own[key]) for own, its in pairs for _, key in _differences(own, [its])), None):
            log.warning(
                f"a group of the optimizer has {found[0]} on rank {rank} and {found[1]} on rank {world.rank}: all "
                "ranks take part in one training. Build the same optimizer on every rank, unless you mean it"
            )
            break
    return any(other for other, _ in gathered)


def _check_kinds(optimizer: torch.optim.Optimizer) -> None:
    """Raises `PlanError` for a group of `DTensor`s and plain tensors that PyTorch would step at once, which fails."""
    for group in optimizer.param_groups:
        on_gpu = any(parameter.device.type == "cuda" for parameter in group["params"])
        at_once = group.get("fused") or (on_gpu if group.get("foreach", False) is None else group.get("foreach"))
        if at_once and len({is_dtensor(parameter) for parameter in group["params"]}) > 1:
            raise PlanError(
                f"optimizer=: a group of {type(optimizer).__name__} has DTensors and plain tensors, and PyTorch steps "
                "all tensors of a group at once (foreach=, its default on a GPU, or fused=), which takes one kind "
                "only. Make two groups of the parameters, those that are DTensors and the others, or pass "
                "foreach=False"
            )


def _describe(value: Any) -> str:
    """`value` without what differs between processes, such as addresses."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype():
            return repr(value)
        case Plan() | ScheduleDefinition():
            return type(value).__qualname__
        case _ if value is model_loss:
            return "penstock.model_loss"
        case torch.Tensor():
            return repr(value.tolist()) if value.numel() == 1 and not value.is_meta else "a tensor"
        case Mapping():
            return "{" + ", ".join(f"{key}: {_describe(each)}" for key, each in value.items()) + "}"
        case set() | frozenset():
            return "{" + ", ".join(sorted(map(_describe, value))) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_describe, value)) + "]"
        case _ if is_dataclass(value) and not isinstance(value, type):
            own = (f"{each.name}={_describe(getattr(value, each.name))}" for each in fields(value))
            return f"{type(value).__qualname__}({', '.join(own)})"
        case _:
            return "a function" if callable(value) else type(value).__qualname__


def _require(
    rank: int,
    mine: Mapping[str, str],
    gathered: Sequence[Mapping[str, str]],
    fixes: Mapping[str, str],
    error: type[PenstockError] = PenstockError,
) -> None:
    """Raises `error` if a rank has something else than this `rank`. `fixes`: by key, what to do."""
    for other, key in _differences(mine, gathered):
        raise error(
            f"rank {other} has {gathered[other][key]} and rank {rank} has {mine[key]}: expected the same on all ranks, "
            f"which take part in one training. {fixes[key]}"
        )


def _differences(mine: Mapping[str, str], gathered: Sequence[Mapping[str, str]]) -> Iterator[tuple[int, str]]:
    """The rank and the key of what a rank has in other words. A key that one of both lacks is no difference."""
    for rank, other in enumerate(gathered):
        yield from ((rank, key) for key, text in mine.items() if other.get(key, text) != text)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
