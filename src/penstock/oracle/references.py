"""The mathematics that a schedule guarantees, in one process and without the runtime.

`reference_train` defines "correct": the runtime must equal it bit for bit (float64, CPU). It runs one microbatch after
the other through the whole model, keeps every stage's weights of each version in a list, and reads them by the formulas
of the papers. It has no stage modules, no slots, no messages and no order. From a schedule it takes only the version
rule, the size of an update and the delays that the definition states.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn

from penstock.arguments import FLAG, SEED, Rule, check_arguments, choice, entries, instance, integer, text_of
from penstock.capturing import capture
from penstock.capturing.chain import LayerChain, require_cuts
from penstock.capturing.initialization import rooted
from penstock.capturing.model_kinds import check_model, first_device
from penstock.capturing.module_copies import copied
from penstock.capturing.randomness import microbatch_seed
from penstock.capturing.work_estimates import estimate_seconds
from penstock.errors import PenstockError, PlanError
from penstock.oracle.batches import ReferenceMicrobatch, cut, pieces_of, sizes_of
from penstock.oracle.weights import Training
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, VersionRule
from penstock.scheduling.orders import DEFAULT_SCHEDULE, METHODS
from penstock.scheduling.schedule_checks import require_common_updates
from penstock.scheduling.verification.continuations import require_constant_delays
from penstock.torch_internals.tensors import accumulated_hooks, gradient_hooks
from penstock.training.losses import LossFunction, LossWeight, Microbatches, amounts_of, compute_loss
from penstock.training.optimizers import MakeOptimizer, MakeScheduler
from penstock.training.recipes import Recipe
from penstock.training.scaling import LossScale, OnNonfinite
from penstock.training.update_corrections import UpdateHook
from penstock.training.wire_codecs import WireDtype
from penstock.values.plans import MICROBATCHES, Plan, require_schedule
from penstock.values.plans import schedule as schedule_of


@dataclass(frozen=True, slots=True)
class Reference:
    """Holds the result of `reference_train`."""

    losses: tuple[float, ...]
    """The mean loss over the samples of every minibatch."""
    state: dict[str, Tensor]
    """The final parameters and buffers, by the keys of the model's state dict."""


_RULES: Mapping[str, Rule[Any]] = {
    "stages": integer(1),
    "microbatches": MICROBATCHES,
    "vertical_sync": FLAG,
    "seed": SEED,
    "balance": choice(("work", "layers")).but("pass plan=pipe.plan for a pipeline with balance='measured'"),
}
_PLAN = instance(Plan, "a penstock.Plan", "make one with Plan.uniform, or pass pipe.plan").optional
_MINIBATCH = integer(0).but("give the numbers of minibatches, from 0")


def reference_train(
    model: nn.Module | Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    *,
    sample: tuple[Any, ...] | dict[str, Any],
    loss_fn: LossFunction,
    optimizer: MakeOptimizer,
    schedule: ScheduleDefinition | str = DEFAULT_SCHEDULE,
    stages: int = 1,
    microbatches: int = 1,
    plan: Plan | None = None,
    balance: Literal["work", "layers"] = "work",
    vertical_sync: bool = False,
    autocast: torch.dtype | None = None,
    version_dtype: torch.dtype | None = None,
    loss_weight: LossWeight | None = None,
    loss_scale: LossScale | str | float | None = None,
    clip_grad_norm: float | None = None,
    lr_scheduler: MakeScheduler | None = None,
    update_hooks: Sequence[UpdateHook] | UpdateHook = (),
    on_nonfinite: OnNonfinite = "raise",
    wire_dtype: WireDtype | None = None,
    seed: int = 0,
    drain_after: Collection[int] = (),
) -> Reference:
    """Trains a copy of `model` on `batches` of (inputs, target) as the schedule guarantees.

    The arguments are those of `Pipeline`; the plan of one with ``balance="measured"`` is passed as ``plan=pipe.plan``.
    `batches` are what its `step` takes; a target that is left out is None. `drain_after`: the numbers of the
    minibatches (from 0) after which the pipeline is drained. W(x) is version x, s the stage, and k and t count
    microbatches and minibatches since the last drain:

    ==============================  =================================================================
    with a flush                    W(t+1) = W(t) - update of the mean gradient at W(t)
    pipedream                       W(k+1) = W(k) - update of the gradient with stage s at max(0, k-(p-1-s))
    pipedream with vertical sync    W(k+1) = W(k) - update of the gradient with every stage at max(0, k-(p-1))
    2bw                             W(t+1) = W(t) - update of the mean gradient at W(max(t-1, 0))
    ==============================  =================================================================

    Your own schedule is computed from its `VersionRule` and the numbers of its `Guarantees`: with n microbatches per
    update of stage s, microbatch k is in round k // n. `NEWEST` reads version max(0, k // n - (versions - 1)), and
    `INPUT_STAGE` reads the version of stage 0; `ScheduleError` if the order reads other versions.

    If stage s has r replicas that take microbatches in turn, an update of `pipedream` takes r microbatches, k counts
    these rounds, and instead of p-s there are d(s) = ceil(replicas of this and all later stages / r) rounds in flight.
    The last round before a drain may have fewer microbatches. If replicas split microbatches, r counts as 1, and the
    replicas' shares are computed one by one. In both cases the gradients of replicas are summed in their order.
    Replicas have buffers of their own; what blocks keep in Python is one for all of them here, and not in a pipeline.

    `clip_grad_norm` clips the gradients of an update by the norm over all stages. With `loss_scale`, losses are
    multiplied by a scale and the gradients divided by it. All stages skip an update if a gradient for it is not finite,
    and lower the scale, unless that has been done since the losses of that update were scaled. The scale of minibatch t
    follows from the updates of the minibatches before it; under `2bw` on several stages, of those before t-1. Schedules
    in which each stage updates at its own time have neither.

    ``on_nonfinite="skip"`` without `loss_scale` is a scale of 1 that stays. The oracle does not raise for a loss,
    and with ``"rollback"`` it has no checkpoint to go back to: leave such batches out of `batches`.

    With `wire_dtype`, a stage reads the values of earlier stages rounded, and the gradients that come back are rounded,
    too. A value that several stages read is rounded on its way from each to the next.

    With `version_dtype`, W(x) are the optimizer's weights, cast to that type if they are float32, trained, and of two
    dimensions or more. Each microbatch's gradient is cast back before it is added to the others. Each stage has its own
    state of `update_hooks`, made from its own updates. With hooks that predict weights, W(x) is their prediction,
    except for version 0.

    Sources: [PipeDream 2019, sections 3.2 and 3.3], [PipeDream-2BW 2021, section 3.1], [SPP 2022, section III].
    """
    recipe = Recipe(
        loss_fn,
        optimizer,
        autocast=autocast,
        loss_scale=loss_scale,
        clip_grad_norm=clip_grad_norm,
        lr_scheduler=lr_scheduler,
        loss_weight=loss_weight,
        version_dtype=version_dtype,
        update_hooks=update_hooks,
        on_nonfinite=on_nonfinite,
        wire_dtype=wire_dtype,
    )
    check_model(model, "reference_train")
    stages, microbatches, vertical_sync, seed, balance = check_arguments(
        "reference_train",
        _RULES,
        stages=stages,
        microbatches=microbatches,
        vertical_sync=vertical_sync,
        seed=seed,
        balance=balance,
    ).values()
    drain_after = frozenset(_MINIBATCH.check("drain_after", each) for each in entries("drain_after", drain_after))
    plan = _PLAN.check("reference_train(plan=)", plan, PlanError)
    device = first_device(model)
    with recipe.autocast_context(device):
        chain = capture(copied(model), sample)
    definition = require_schedule(schedule) if plan is None else plan.definition
    if plan is None:
        # For Penstock's own schedules the ranks do not matter; the functions of other definitions expect their layout.
        laid_out = DEFAULT_SCHEDULE if definition in METHODS else definition
        per_rank = require_schedule(laid_out).layout.default_stages_per_rank(stages, 1)
        require_cuts(len(chain.layers), stages, chain.shares)
        weights = estimate_seconds(chain, device) if balance == "work" else None
        plan = Plan.balanced(
            weights or [1.0] * len(chain.layers),
            stages,
            laid_out,
            microbatches=microbatches,
            stages_per_rank=per_rank,
            vertical_sync=vertical_sync,
        )
    if plan.layers != len(chain.layers):
        raise PlanError(
            f"the plan is for {plan.layers} layers and the model has {len(chain.layers)}: plan for this model"
        )
    if recipe.needs_norms:
        require_common_updates(definition)
    guarantees = definition.guarantees(PipelineShape(plan.placement, plan.microbatches, plan.vertical_sync))
    if definition not in METHODS:
        require_constant_delays(schedule_of(plan))
    # A copy of a parameter has no hooks.
    named = rooted(model).named_parameters(remove_duplicate=False)
    hooks = {name: (gradient_hooks(p), accumulated_hooks(p)) for name, p in named}
    training = Training(chain, plan, recipe, guarantees, hooks)
    run = _Run(chain, plan, definition, guarantees, training, recipe, device, seed, count=plan.microbatches)
    losses = []
    for number, (inputs, target) in enumerate(_pairs(batches)):
        losses.append(run.step(inputs, target))
        if number in drain_after:
            run.drain()
    run.drain()
    return Reference(tuple(losses), training.state())


def _pairs(batches: object) -> Iterator[tuple[Any, Any]]:
    """The pairs of inputs and target in `batches`."""
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes | Mapping):
        raise PenstockError(
            f"reference_train(batches=): expected pairs (inputs, target) to iterate over, found {text_of(batches)}: "
            "give what the steps of a pipeline would take"
        )
    for number, pair in enumerate(batches):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise PenstockError(
                f"reference_train(batches=): batches[{number}]: expected (inputs, target), found {text_of(pair)}: give "
                "both, None for a target that is left out"
            )
        yield pair[0], pair[1]


@dataclass(slots=True)
class _Run:
    """A training run: its fixed arguments, and how far it has come."""

    chain: LayerChain
    plan: Plan
    schedule: ScheduleDefinition
    guarantees: Guarantees
    training: Training
    recipe: Recipe
    device: torch.device
    seed: int
    before: int = 0
    """The number of microbatches before the current run of the schedule."""
    minibatch: int = 0
    """The number of minibatches in the current run."""
    updates: int = 0
    """The number of updates since version 0, for schedules that update once per minibatch."""
    versions: Sequence[int] = ()
    """The version of each stage at the last microbatch."""
    count: int = 0
    """The microbatches of a step in the current run."""

    def step(self, inputs: Any, target: Any) -> float:
        """Trains on one minibatch and returns its loss."""
        count = len(inputs.inputs) if isinstance(inputs, Microbatches) else self.plan.microbatches
        if count != self.count:
            self._resize(count)
        total, per_microbatch = 0.0, self.schedule.updates_per_microbatch
        own_target = self.recipe.reads_model_loss
        parts = cut(self.chain.inputs, inputs, target, count, own_target=own_target)
        amounts = amounts_of(self.recipe.loss_weight, [part.target for part in parts], [part.size for part in parts])
        for k, (part, amount) in enumerate(zip(parts, amounts, strict=True), self.minibatch * count):
            self.versions = _versions(self.guarantees, k, self.minibatch)
            losses = self._forward(k, part)
            # A microbatch's weight is the amount that its loss is the mean over. It is 1 if updates are per microbatch.
            weighs = amount if per_microbatch else sum(amounts)
            scale = self._scale(k)
            # If everything is frozen, no loss has a gradient.
            trained = [(loss, size / weighs * scale if weighs else 0.0) for loss, size in losses if loss.requires_grad]
            if trained:
                gradients = [torch.full_like(loss, weight) for loss, weight in trained]
                with self.training.pointed(self.versions, k):
                    torch.autograd.backward([loss for loss, _ in trained], gradients)
            for loss, size in losses:
                total += float(loss.detach().double()) * (size / sum(amounts))
            if per_microbatch:
                self.training.update_rounds(self.versions, k + 1)
                self.training.settle_scale()
        if not per_microbatch:
            self.training.update(dict(enumerate(self.versions)))
            # If updates are deferred, the update of minibatch t waits for the other stages until minibatch t + 2.
            self.training.settle_scale(wait=int(self.schedule.defers_updates and len(self.plan.stages) > 1))
        self.minibatch += 1
        self.updates += 1
        return total

    def drain(self) -> None:
        """Does the last updates of a run of the schedule; the next run begins with the newest weights."""
        seen = self.minibatch * self.count
        if self.schedule.updates_per_microbatch:
            self.training.update_rounds(self.versions, seen, last=True)
        self.training.share_buffers()
        if not self.schedule.flushes:
            self._restart()

    def _resize(self, count: int) -> None:
        """Begins a new run with `count` microbatches in a step, after a drain if the schedule does not flush."""
        if self.count and not self.schedule.flushes:
            self.drain()
        self._restart()
        shape = PipelineShape(self.plan.placement, count, self.plan.vertical_sync)
        self.count, self.guarantees = count, self.schedule.guarantees(shape)

    def _restart(self) -> None:
        """Begins a new run of the schedule from the newest weights."""
        self.before += self.minibatch * self.count
        self.minibatch = self.updates = 0
        self.training.restart()

    def _scale(self, k: int) -> float:
        """The scale that the loss of microbatch k is multiplied by."""
        if self.training.scales is None:
            return 1.0
        if not self.schedule.updates_per_microbatch:
            return self.training.scales.scale_of(self.updates + 1)
        return self.training.scales.scale_of(k // self.guarantees.microbatches_per_update[-1] + 1)

    def _forward(self, k: int, part: ReferenceMicrobatch) -> list[tuple[Tensor, float]]:
        """The loss of each last-stage replica for its share of a microbatch, and the amount it averages over."""
        with self.recipe.autocast_context(self.device):
            seed = microbatch_seed(self.seed, self.before + k)
            outputs = self.training.forward(part.values, part.size, self.versions, k, seed)
            targets, sizes = pieces_of(part.target, part.size, len(outputs)), sizes_of(part.size, len(outputs))
            losses = [compute_loss(self.recipe.loss_fn, *pair)[0] for pair in zip(outputs, targets, strict=True)]
        amounts = amounts_of(self.recipe.loss_weight, targets, sizes)
        return list(zip(losses, amounts, strict=True))


def _versions(guarantees: Guarantees, microbatch: int, minibatch: int) -> list[int]:
    """The version of each stage's weights that a microbatch uses."""
    rounds = [microbatch // size for size in guarantees.microbatches_per_update]
    behind = [versions - 1 for versions in guarantees.versions]
    match guarantees.rule:
        case VersionRule.OWN_MINIBATCH:
            return [minibatch for _ in rounds]
        case VersionRule.PREVIOUS_MINIBATCH:
            return [max(minibatch - 1, 0) for _ in rounds]
        case VersionRule.INPUT_STAGE:
            return [max(0, rounds[0] - behind[0]) for _ in rounds]
        case VersionRule.NEWEST:
            return [max(0, done - delay) for done, delay in zip(rounds, behind, strict=True)]
        case VersionRule.INITIAL:
            return [0 for _ in rounds]
        case _:
            assert_never(guarantees.rule)
