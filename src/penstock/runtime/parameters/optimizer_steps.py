"""The optimizers of a process, stepped for its stages.

A process has one set of optimizers for all its stages. Under a schedule that flushes they step once per update, as in a
loop of PyTorch's: at the last update of a stage of the process. No action of a step reads the weights that it makes.
Under other schedules stages update at different times. An optimizer then steps the parameters that have gradients,
which are those of one stage, and its groups have the options of that stage.
"""

import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import PenstockError
from penstock.runtime.parameters.group_options import GroupOptions, own_copy
from penstock.runtime.parameters.host_states import HostStates, check_steps_apart
from penstock.runtime.parameters.weight_shares import WeightShares
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.torch_internals.modules import step_hooks
from penstock.training.optimizers import MakeScheduler, make_scheduler, needs_closure
from penstock.training.update_corrections import HookStates, UpdateHook, WeightAverage


class Updater:
    """Steps `optimizers` for the stages of a process.

    `stages`: those of the process. `lr_scheduler`: called with each optimizer; the scheduler that it returns steps once
    with every update. `hooks`: called at every update. `delays`: by stage, how old its gradients are. `host`: keeps the
    state on the host; `PenstockError` if a step in parts has other numbers. `shares`: by stage, where replicas update a
    part of the parameters each.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        stages: Collection[int],
        lr_scheduler: MakeScheduler | None,
        hooks: tuple[UpdateHook, ...],
        delays: tuple[int, ...],
        *,
        together: bool,
        host: HostStates | None = None,
        shares: Mapping[int, WeightShares] | None = None,
    ) -> None:
        self.hooks, self.host, self._shares = HookStates(hooks), host, shares or {}
        self._delays = delays
        self.optimizers = tuple(optimizers)
        self.together = together
        """Whether all stages step at once."""
        self.schedulers: list[LRScheduler] = []
        """The schedulers of the optimizers, in their order; none if the user makes none."""
        self._options: list[GroupOptions] = []
        """Of each optimizer, where they are not always what the optimizer has."""
        for optimizer in self.optimizers:
            if lr_scheduler is not None:
                self.schedulers.append(make_scheduler(lr_scheduler, optimizer))
            apart = sorted(stages)[:1] if together else sorted(stages)
            if self.schedulers or len(apart) > 1:
                self._options.append(GroupOptions(optimizer, self.schedulers[-1] if self.schedulers else None, apart))
        self._updates = dict.fromkeys(stages, 0)
        """By stage, the number of its updates."""
        self._examined = set[int]()
        """The stages at whose first update the optimizers have been looked at."""
        self._waiting: dict[int, tuple[VersionedWeights, int, Mapping[str, Tensor] | None]] = {}
        """By stage, the updates that wait for those of other stages."""
        self.read_rates()
        if host is not None:
            for optimizer in self.optimizers:
                host.reserve(check_steps_apart(optimizer))
                host.put_away(optimizer.state)

    def update(
        self, stage: int, version: int, weights: VersionedWeights, gradients: Mapping[str, Tensor] | None
    ) -> Sequence[int]:
        """Updates `stage`, or keeps that until all stages come that step together. Returns the stages that have their
        new versions now. `gradients`: None for a version that equals the one before it.
        """
        if weights.newest >= version:
            # Another replica of the stage, in this process, has made it.
            return ()
        self._waiting[stage] = weights, version, gradients
        if self.together and len(self._waiting) < len(self._updates):
            return ()
        waiting, self._waiting = dict(sorted(self._waiting.items())), {}
        stepped: dict[str, nn.Parameter] = {}
        for each, (held, number, own) in waiting.items():
            held.begin_update(number, own or {})
            stepped.update(self._shares[each].updated if each in self._shares else held.stepped)
        published: dict[str, Tensor] = {}
        if gradients is not None:
            before = _copies(stepped) if self.hooks.hooks else {}
            for options in self._options:
                options.choose(min(waiting))
            with nullcontext() if len(self._updates) == len(waiting) else self._alone(stage):
                for optimizer in self.optimizers if self.host is None else self.host.steps(self.optimizers, stepped):
                    try:
                        optimizer.step()
                    except Exception as error:
                        if "closure" in f"{error} {traceback.extract_tb(error.__traceback__)[-1].line}":
                            raise needs_closure(optimizer) from error
                        raise
            self.read_rates()
            for options in self._options:
                options.advance()
            for each in waiting:
                self._updates[each] += 1
            # A user's autocast around the training loop would otherwise reuse casts of the weights before this update.
            torch.clear_autocast_cache()
            if self.hooks.hooks:
                published = self.hooks.after_step(before, stepped, self._delays[min(waiting)])
            if self._shares:
                self._gather(waiting, published)
        for held, *_ in waiting.values():
            held.end_update(published)
        if self.host is not None:
            self.host.settle()
        return list(waiting)

    def owns(self, name: str) -> bool:
        """Whether this process updates the parameter, of those that it holds."""
        return not self._shares or any(name in shares.own for shares in self._shares.values())

    def _gather(self, stages: Iterable[int], published: dict[str, Tensor]) -> None:
        """Takes the parameters of `stages` that other replicas own as these have stepped them, and adds to `published`
        what forwards read instead. Blocks.
        """
        for stage in stages:
            shares = self._shares[stage]
            shares.gather(shares.parameters)
            if any(hook.predicts(self._delays[stage]) for hook in self.hooks.hooks):
                own = {name: published.get(name, p.detach()) for name, p in shares.updated.items()}
                published.update(shares.gathered(own))

    @contextmanager
    def _alone(self, stage: int) -> Iterator[None]:
        """Context manager in which the optimizers step `stage` alone, one of several. Raises `PenstockError` if they
        keep something that stages would share; that is looked for at the first update of the stage, and where an
        optimizer has hooks.
        """
        first = stage not in self._examined
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                if first or step_hooks(optimizer):
                    stack.enter_context(_nothing_shared(optimizer))
            yield
        self._examined.add(stage)

    def read_rates(self) -> None:
        """Takes the rates that the groups have now for those of the last update."""
        rates: list[float | Tensor | None] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                rates.append(rate if type(rate) is float else own_copy(rate))
        self.rates = tuple(rates)
        """The learning rates of the last update, by parameter group; before the first one, those it will have."""

    def averages(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The averages of the first `WeightAverage` for the trained `parameters`; before an update, the weights."""
        for hook, states in zip(self.hooks.hooks, self.hooks.states, strict=True):
            if isinstance(hook, WeightAverage):
                trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
                found = {name: states.get(name, {}).get("average", weights) for name, weights in trained.items()}
                for shares in self._shares.values():
                    found.update(shares.gathered(found))
                return found
        raise PenstockError(
            "no averages are kept: expected a penstock.WeightAverage among update_hooks=, such as "
            "update_hooks=[penstock.WeightAverage(0.999)]"
        )

    @property
    def scheduler_names(self) -> tuple[str | None, ...]:
        """By optimizer, the class of its scheduler; None without one."""
        return tuple(type(one).__qualname__ for one in self.schedulers) or (None,) * len(self.optimizers)

    def choose(self, stage: int) -> None:
        """Gives the groups of the optimizers the options that they have at the next update of `stage`."""
        for options in self._options:
            options.choose(stage)

    def state(self, stage: int | None = None) -> dict[str, int]:
        """The state for a checkpoint: the updates of `stage`, or of the one with the most; {} without schedulers."""
        if not self.schedulers:
            return {}
        return {"updates": max(self._updates.values()) if stage is None else self._updates[stage], "next_options": 1}

    def updates_of(self, stage: int) -> int:
        """The number of updates of `stage`."""
        return self._updates[stage]

    def load_state(self, state: Mapping[str, Any], updates: Mapping[int, int], exact: bool) -> None:
        """Restores `state`, or starts anew if it has no updates. The optimizers have the options of a checkpoint.

        `updates`: by stage, where stages have made different numbers of them. `exact`: whether the options are those
        of the next update of every stage; if not, they are computed. Older checkpoints had those of the last update.
        """
        reached = int(state.get("updates", 0))
        self._updates = {stage: updates.get(stage, reached) for stage in self._updates}
        exact = exact and len({*self._updates.values()}) == 1 and ("next_options" in state or not self.schedulers)
        for options in self._options:
            options.restart(self._updates, exact)


def _copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of the `parameters` with gradients."""
    return {name: p.detach().clone() for name, p in parameters.items() if p.grad is not None}


@contextmanager
def replaced_parameters(parameters: Mapping[str, nn.Parameter], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager in which `parameters` have the values `others`, by name."""
    own = {name: parameters[name].detach().clone() for name in others}
    with torch.no_grad():
        for name, tensor in others.items():
            parameters[name].copy_(tensor)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in own.items():
                parameters[name].copy_(tensor)


@contextmanager
def _nothing_shared(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager in which `optimizer` steps one of several stages, each at its own time.

    Raises `PenstockError` if it has hooks of the user's on its steps, or counts steps outside of the state of
    parameters and the options of groups: it would count those of all stages together.
    """
    before = _numbers(optimizer)
    hooked = bool(step_hooks(optimizer))
    yield
    changed = [name for name, value in _numbers(optimizer).items() if value != before.get(name)]
    if hooked or changed:
        found = f"its attribute {changed[0]!r} changes" if changed else "hooks run"
        raise PenstockError(
            f"{type(optimizer).__qualname__}: {found} with every step, and under this schedule every stage of the "
            "process has steps of its own: expected nothing that stages share. Choose a schedule that flushes, run one "
            "process per stage, or keep such values in the state of every parameter"
        )


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What `optimizer` counts outside of the state of parameters and the options of groups."""
    state: Any = optimizer.state
    values = {**vars(optimizer), **{key: value for key, value in state.items() if isinstance(key, str)}}
    return {
        name: float(value)
        for name, value in values.items()
        if type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
    }
