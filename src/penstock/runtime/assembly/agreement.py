"""What all ranks must agree on before they train: plan, schedule, model, options and optimizers.

A difference would end in a hang, or in other numbers than those of one device.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.capturing.chain import LayerChain
from penstock.errors import PenstockError, PlanError
from penstock.runtime.assembly.pipeline_options import PipelineOptions
from penstock.runtime.transport.worlds import World
from penstock.scheduling.actions import format_programs
from penstock.scheduling.placements import Skip
from penstock.scheduling.schedule_names import identify
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import enough_minibatches
from penstock.torch_internals.optimizers import step_hooks
from penstock.values.plans import Plan


def check_options(world: World, options: PipelineOptions) -> None:
    """Raises `PenstockError` on every rank if the ranks were given different `options`. Collective.

    A function is compared by whether it is given, since ranks may define it in different places. Plans are compared by
    `check_agreement`.
    """
    recipe, run = options.recipe, options.run
    given: dict[str, object] = {each.name: getattr(recipe, each.name) for each in fields(recipe)}
    del given["optimizer"]
    given["loss_fn"] = "penstock.model_loss" if recipe.reads_model_loss else "a function"
    given |= {"balance": options.plan.balance, "recompute": options.plan.recompute, "seed": run.seed}
    given |= {"compile": run.compile, "check": run.check, "timeout_seconds": run.timeout_seconds}
    mine = {name: _describe(value) for name, value in given.items()}
    for rank, other in enumerate(world.gather(mine, "while they compared their options")):
        for name, value in mine.items():
            if other[name] != value:
                raise PenstockError(
                    f"rank {rank} has {name}={other[name]} and rank {world.rank} has {name}={value}: expected the same "
                    f"option on all ranks, since all take part in one training. Pass the same {name}= to every Pipeline"
                )


class _Fingerprint(NamedTuple):
    """The values that must be the same on every rank."""

    plan: str
    """All that makes plans equal, with the schedule's name: a definition need not be one that can be pickled."""
    shown: str
    """The plan as errors show it."""
    programs: str
    """A digest of what the schedule does and guarantees."""
    layers: tuple[str, ...]
    parameters: Mapping[str, str]
    skips: tuple[Skip, ...]


def check_agreement(world: World, plan: Plan, chain: LayerChain, schedule: Schedule, *, weights: bool) -> None:
    """Raises `PlanError` on every rank if the ranks have different plans, models or skips. Collective.

    `weights`: whether the values of the weights count. They do not where all are loaded afterwards.
    """
    if world.processes == 1:
        return
    compared = repr([getattr(plan, field.name) for field in fields(plan) if field.compare])
    mine = _Fingerprint(
        compared,
        shown=str(plan),
        programs=_digest_programs(schedule),
        layers=tuple(layer.name for layer in chain.layers),
        parameters=_digests(chain.parameters) if weights else {},
        skips=schedule.skips,
    )
    own: tuple[Any, ...] = tuple(mine)
    for rank, gathered in enumerate(world.gather(own, "while they compared models and plans")):
        other = _Fingerprint(*gathered)
        if other.layers != mine.layers:
            raise PlanError(
                f"rank {rank} has a model of layers {list(other.layers)} and rank {world.rank} of {list(mine.layers)}: "
                "build the same model on every rank"
            )
        if other.plan != mine.plan:
            raise PlanError(
                f"rank {rank} and rank {world.rank} have different plans:\n{other.shown}\n{mine.shown}\n"
                "Two profiles never agree exactly: plan on one rank and give the plan to all, or load it from a file"
            )
        if other.programs != mine.programs and other.skips == mine.skips:
            raise PlanError(
                f"rank {rank} and rank {world.rank} have different schedules called {str(plan.schedule)!r}: expected "
                "the same programs and guarantees, found others. Define the schedule alike on every rank, by the sizes "
                "of the pipeline alone"
            )
        if other.skips != mine.skips:
            raise PlanError(
                f"rank {rank} sends directly between the stages {other.skips} and rank {world.rank} between "
                f"{mine.skips}: pass the same skips=, and samples of the same shapes, on every rank"
            )
        different = [name for name, digest in mine.parameters.items() if other.parameters.get(name) != digest]
        if different:
            raise PlanError(
                f"rank {rank} and rank {world.rank} start from different weights: {_first_names(different)}. Every "
                "rank must build the whole model identically: call torch.manual_seed(...) with one seed before "
                "building it"
            )


def _digest_programs(schedule: Schedule) -> str:
    """A short digest of the programs and guarantees of `schedule`; of one of Penstock's own, one step is enough."""
    own = isinstance(identify(schedule.definition), str)
    programs = schedule.step(0) if own else schedule.program(enough_minibatches(schedule))
    text = f"{format_programs(programs)}\n{schedule.guarantees}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _digests(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """A short digest of every parameter: shape, type and sum."""
    result = {}
    for name, parameter in parameters.items():
        total = 0.0 if parameter.is_meta else float(parameter.detach().sum(dtype=torch.float64))
        facts = repr((tuple(parameter.shape), parameter.dtype, total))
        result[name] = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    return result


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
    names = {id(parameter): name for name, parameter in named.items()}
    mine: dict[str, dict[str, str]] = {}
    groups = []
    for number, optimizer in enumerate(optimizers):
        scheduler = type(schedulers[number]).__qualname__ if schedulers else "none"
        for group in optimizer.param_groups:
            options = {"optimizer": type(optimizer).__qualname__, "lr_scheduler": scheduler}
            options.update({key: _describe(value) for key, value in group.items() if key != "params"})
            groups.append(options)
            mine.update({names[id(p)]: options for p in group["params"] if id(p) in names and p.requires_grad})
    if world.processes > 1 and any(map(step_hooks, optimizers)):
        logging.getLogger("penstock").warning(
            f"rank {world.rank}: an optimizer has hooks on its steps, which see the parameters of this process only: "
            "expected hooks that look at each by itself. Clip all together with clip_grad_norm="
        )
    gathered = world.gather((mine, groups), "while they compared their optimizers")
    _compare_groups([groups for _, groups in gathered[: world.rank + 1]])
    for rank, (other, _) in enumerate(gathered):
        for name in (name for name in mine if name in other):
            for option in dict.fromkeys((*mine[name], *other[name])):
                here, there = mine[name].get(option, "none"), other[name].get(option, "none")
                if here != there:
                    raise PenstockError(
                        f"rank {rank} steps {name} with {option}={there} and rank {world.rank} with {option}={here}: "
                        "expected the same on all ranks that hold a copy of this parameter, whose copies would drift "
                        "apart. Build the same optimizer and scheduler on every rank"
                    )
    return any(other for other, _ in gathered)


def _compare_groups(of_ranks: Sequence[Sequence[Mapping[str, str]]]) -> None:
    """Warns of an option that a group of the last of the ranks, this one, has other than an earlier rank."""
    for rank, groups in enumerate(of_ranks[:-1]):
        # A rank may leave out groups that have no parameter there.
        pairs = zip(groups, of_ranks[-1], strict=True) if len(groups) == len(of_ranks[-1]) else ()
        options = [(name, there.get(name, "none"), own) for there, here in pairs for name, own in here.items()]
        for name, other, own in (option for option in options if option[1] != option[2]):
            logging.getLogger("penstock").warning(
                f"a group of the optimizer has {name}={other} on rank {rank} and {own} on rank {len(of_ranks) - 1}: "
                "all ranks take part in one training. Build the same optimizer on every rank, unless you mean it"
            )
            return


def _describe(value: Any) -> str:
    """`value` without what differs between processes, such as addresses."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype():
            return repr(value)
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


def _first_names(names: Sequence[str], count: int = 3) -> str:
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")
