"""Hooks on updates: corrections of staleness, and averages.

Under an asynchronous schedule an update is made with gradients that were taken at older weights. A hook is called at
every update of every trained parameter. It may change the update, and may let forwards read other weights than those
that the optimizer continues from.

With W the weights before an update, W' after the optimizer's step, u = W' - W, and d the number of updates since the
weights at which the gradient was taken:

- `WeightPrediction`: forwards read W' + d u, an estimate of the weights when the gradient comes back.
- `WeightAverage`: keeps an average of W', and changes nothing.

``studies/convergence/corrections.py`` has hooks that change W'.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.arguments import check_fields, entries, instance, number, text_of
from penstock.errors import PenstockError
from penstock.torch_internals.tensors import times_written
from penstock.torch_internals.unimported import is_dtensor


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """Describes one update of one parameter, after the optimizer's step."""

    name: str
    """The name in the model."""
    before: Tensor
    """The weights before it; a hook must not change them."""
    after: Tensor
    """The weights after it. A hook may write into them; the optimizer continues from the result."""
    delay: int
    """The updates of the parameter's stage between the weights at which the gradient was taken and `before`, when the
    pipeline is full: 0 under schedules that flush, 1 under `2bw`, p-1-s at stage s of `pipedream`."""
    state: dict[str, Tensor]
    """The hook's own tensors for this parameter, kept from update to update and in checkpoints."""


class UpdateHook:
    """A base class: derived hooks are called at every update of every trained parameter that has a gradient.

    A `WeightAverage` is called for those without a gradient, too. Updates that a loss scale skips do not count. A stage
    updates on every process that holds it, so a hook must compute the same numbers for an update everywhere.
    """

    def after_step(self, update: WeightUpdate) -> None:
        """Called after the optimizer's step, without gradients. May write into `update.after`."""

    def predicts(self, delay: int) -> bool:
        """Whether forwards of a stage with that delay read what `predict` returns. It takes one more set of weights."""
        return False

    def predict(self, update: WeightUpdate) -> Tensor:
        """The weights that forwards read for the version that `update` made; `update.after` if it is not overridden.

        Evaluations, checkpoints and the first steps after a drain use the weights themselves.
        """
        return update.after


@dataclass(frozen=True, slots=True)
class WeightPrediction(UpdateHook):
    """Predicts the weights for the time when their gradient comes back, and lets forwards read them: W' + strength d u.

    It assumes that the next steps of the optimizer equal the last one. With SGD and momentum that is SpecTrain's
    prediction [SpecTrain 2018], with Adam XPipe's (Guan et al. 2019, arXiv 1911.04610). It works with any optimizer,
    and keeps no state.
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, {"strength": number().but("give one such as 1.0, the whole correction")})

    def predicts(self, delay: int) -> bool:
        return delay > 0

    def predict(self, update: WeightUpdate) -> Tensor:
        return update.after + (self.strength * update.delay) * (update.after - update.before)


@dataclass(frozen=True, slots=True)
class WeightAverage(UpdateHook):
    """Keeps an average A of the weights W' after every update, which ``pipe.averages()`` returns.

    It has the numbers of `torch.optim.swa_utils.AveragedModel`: the first update copies W', later ones make it decay A
    + (1 - decay) W', as ``get_ema_multi_avg_fn(decay)``; or the mean of all W' if `decay` is None, the default there.
    Buffers stay the model's, as with ``use_buffers=False``. Place it after hooks that change the weights.
    """

    decay: float | None = 0.999

    def __post_init__(self) -> None:
        check_fields(self, {"decay": number(0, most=1).but("give one such as 0.999, or None for the mean").optional})

    def after_step(self, update: WeightUpdate) -> None:
        state, after = update.state, update.after
        if "average" not in state:
            state["average"] = after.clone()
        elif self.decay is not None:
            state["average"].lerp_(after, 1 - self.decay)
        else:
            state["count"] = state.get("count", torch.ones((), dtype=torch.long, device=after.device)) + 1
            state["average"] += (after - state["average"]) / state["count"]


@dataclass(slots=True, eq=False)
class HookStates:
    """Runs hooks in their order, and holds their state for every parameter."""

    hooks: tuple[UpdateHook, ...]
    states: list[dict[str, dict[str, Tensor]]] = field(init=False)
    """By hook and by name of the parameter."""

    def __post_init__(self) -> None:
        self.states = [{} for _ in self.hooks]

    @torch.no_grad()
    def after_step(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], delay: int) -> dict[str, Tensor]:
        """Runs the hooks for an update of the parameters in `after`, of which those in `before` had gradients. Returns
        the weights that forwards read instead of `after`.
        """
        read: dict[str, Tensor] = {}
        for name, parameter in after.items():
            now = parameter.detach()
            own = [(hook, states.setdefault(name, {})) for hook, states in zip(self.hooks, self.states, strict=True)]
            for hook, state in own:
                if name in before or isinstance(hook, WeightAverage):
                    _run(hook, WeightUpdate(name, before.get(name, now), now, delay, state), predicts=False)
            for hook, state in own if name in before else ():
                if hook.predicts(delay):
                    read[name] = _run(hook, WeightUpdate(name, before[name], now, delay, state), predicts=True)
        return read


def _run(hook: UpdateHook, update: WeightUpdate, predicts: bool) -> Tensor:
    """What `hook` predicts, or ``update.after`` as it leaves it.

    Raises `PenstockError` for a prediction that is not like ``update.after``, or if the hook changed another tensor
    than this one, or its form or memory: nothing else reaches the weights.
    """
    own, where = update.after, f"update_hooks=: {type(hook).__name__}"
    before = _marks(update.before, True), _marks(own, predicts)
    found: object = own
    if predicts:
        found = hook.predict(update)
    else:
        hook.after_step(update)
    after = _marks(update.before, True), _marks(own, predicts)
    for name, mark, now in zip(("before", "after"), before, after, strict=True):
        if mark != now:
            raise PenstockError(
                f"{where} changed update.{name} of {update.name}: expected changes of update.after alone, in "
                "after_step and in its own memory. Write update.after.copy_(...), and keep the rest in update.state"
            )
    if not isinstance(found, Tensor) or (found.shape, found.dtype, found.device) != (own.shape, own.dtype, own.device):
        form = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else text_of(found)
        raise PenstockError(
            f"{where}.predict: expected a tensor like update.after of {update.name}, {tuple(own.shape)} {own.dtype} on "
            f"{own.device}, found {form}. Return one"
        )
    return found


def _marks(tensor: Tensor, whole: bool) -> tuple[object, ...]:
    """What changes if `tensor` gets another form or other memory, and if `whole` if it is written."""
    memory = 0 if is_dtensor(tensor) else tensor.data_ptr()
    return tensor.shape, tensor.dtype, memory, times_written(tensor) if whole else 0


def read_hooks(given: Sequence[UpdateHook] | UpdateHook) -> tuple[UpdateHook, ...]:
    """The hooks that ``update_hooks=`` asks for: several, or one alone.

    Raises `PenstockError` if one of them is not a hook, or two of them predict.
    """
    hooks = (given,) if isinstance(given, UpdateHook) else entries("update_hooks", given)
    rule = instance(
        UpdateHook,
        "objects of a class derived from penstock.UpdateHook",
        "pass one such as penstock.WeightPrediction()",
    )
    for index, hook in enumerate(hooks):
        rule.check(f"update_hooks[{index}]", hook)
    predicting = [hook for hook in hooks if hook.predicts(1)]
    if len(predicting) > 1:
        raise PenstockError(
            f"update_hooks= has {predicting[0]!r} and {predicting[1]!r}, which both predict weights: expected "
            "one that predicts. Leave one out, or derive a hook that does both"
        )
    return hooks
