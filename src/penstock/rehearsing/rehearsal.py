"""`rehearse`: the user's own loop beside a pipeline, and the step of the way from one to the other that differs.

The two ends of the way are compared first. Only where they differ, the trainings between them are made: each of them
does one thing more as the pipeline does it. So the first pair that differs names the cause.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from enum import Enum
from inspect import isfunction
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from penstock.arguments import FLAG, Rule, check_arguments, integer
from penstock.capturing.initialization import rooted
from penstock.capturing.preservation import kept_generators
from penstock.capturing.samples import flatten
from penstock.capturing.weightless import is_weightless
from penstock.errors import PenstockError, RehearsalError
from penstock.rehearsing.training_records import (
    Comparison,
    Difference,
    Rounding,
    TrainingRecord,
    compare,
    earliest,
    measure_rounding,
)
from penstock.rehearsing.trainings import (
    FirstLook,
    Setup,
    look,
    read_setup,
    train_by_chain,
    train_by_loop,
    train_by_pipeline,
)
from penstock.runtime.assembly.pipeline_options import PipelineOptions, PlanOptions, RunOptions
from penstock.runtime.transport.worlds import World, join_world
from penstock.torch_internals.modules import is_batch_norm
from penstock.training.losses import IGNORED, Microbatches
from penstock.values.plans import Plan


class Rung(Enum):
    """A training on the way from the user's loop to the pipeline: each does one thing more as the pipeline does it."""

    LOOP = "your loop"
    AGAIN = "your loop again"
    ACCUMULATION = "your loop in microbatches"
    CHAIN = "the captured layers"
    UNSEEDED = "one stage without a seed"
    ONE_STAGE = "one stage"
    STAGES = "the pipeline"
    DELAYED = "reference_train"
    AS_GIVEN = "the pipeline as given"


_CAPTURE = (
    "the capture, which runs the model before the first step and calls its blocks one by one. State in Python that "
    "these runs use up (iterators, random generators, what an object outside of the model counts), and weights held by "
    "another reference than the attribute of their module are not seen as in a plain loop. Keep state in buffers, and "
    "hand it on as arguments and results: docs/inputs.md"
)
_SIDE_WAYS = (
    "what passes between stages by another way than arguments and results: an object that blocks of two stages both "
    "change or read. The order of microbatches then decides what a block sees. Return it from the block, and pass it "
    "to the next one"
)
_EVALUATION = (
    "the mode: the training is the same, and the evaluation is not. What train() or eval() of your own modules do "
    "beside their flag, or a block keeps for evaluations, is another than in a plain loop, or samples depend on each "
    "other there. Decide by self.training, and by each sample alone"
)
_FAULT = "a fault of Penstock's: the pipeline must compute what reference_train does. Please report it"
_ACCEPT = "accumulation=True (--accumulation) compares with a loop in microbatches, and so leaves this out"
_CAUSES: Mapping[tuple[Rung, str], str] = {
    (Rung.AGAIN, "remade"): "the function that makes the training does not make it new every time: it keeps state in a "
    "global, a default argument or a closure, or draws from a generator of its own. Make all of that in the function",
    (Rung.AGAIN, ""): "state that copies of the model share: an object in a closure, a default argument, a global, "
    "a generator or an iterator. Pass a function that makes the model and everything around it anew, instead of the "
    "model",
    (Rung.ACCUMULATION, "batch norm"): "BatchNorm, which takes its mean and variance over a microbatch and not over "
    "the batch, in any accumulation of gradients. Use GroupNorm or LayerNorm, or fewer microbatches",
    (Rung.ACCUMULATION, "output"): "the model's output for a sample depends on the other samples of the batch "
    "(attention, a mean or a router over the batch), or on state that every forward updates (spectral_norm), or "
    "samples are not in dimension 0 of every input (batch_first=False, packed sequences). Put samples first, or cut "
    "the batch yourself with penstock.Microbatches",
    (Rung.ACCUMULATION, "metric"): "the metric is no mean over samples (a ratio, a maximum, the exponential of a "
    "loss): a step returns its mean over microbatches. Return the numbers that it is made of",
    (Rung.ACCUMULATION, "loss of labels"): "the loss is a mean over the labels that count, not over samples. Pass "
    "loss_weight= with their number, such as loss_weight=lambda target: (target != -100).sum(), and with class weights "
    "the sum of these",
    (Rung.ACCUMULATION, "loss"): "the loss is no mean over samples: a sum, a mean over tokens or a mask, a ratio such "
    "as dice, or a comparison of samples with each other (contrastive). Where it is a mean over other items, pass "
    "loss_weight= with their number; no weight makes a ratio right: average it per sample",
    (Rung.ACCUMULATION, ""): "a gradient that does not follow the loss, which agrees. A gradient that an "
    "autograd.Function adds (an auxiliary loss), or a hook that changes gradients, counts once for each microbatch, "
    "while losses count by their share of the batch. Return the auxiliary loss with the model's output and add it in "
    "loss_fn",
    (Rung.STAGES, "update"): "the optimizer. The gradients agree, and the update differs: each process calls step() "
    "with the parameters of its own stages, so a norm of all gradients inside step() is the norm of these. Use an "
    "optimizer that updates each parameter by itself, and clip_grad_norm= for the norm",
    (Rung.STAGES, "history"): "what a block asks of a tensor beside its values (grad_fn, is_leaf, _version, data_ptr): "
    "a stage begins with tensors that no operator has made. Decide by values, or pass the block an argument",
    (Rung.STAGES, "view"): "a tensor that a block writes in place, perhaps by a view, and that others have, too: other "
    "stages have copies of it. Write to a clone, and return that",
    (Rung.STAGES, ""): _SIDE_WAYS,
    (Rung.DELAYED, ""): _FAULT,
    (Rung.AS_GIVEN, ""): _FAULT,
}
"""By the training that brings a difference in, and by what `_conditions` says of it; empty for anything else."""


def _explain_cause(rung: Rung, kind: str, setup: Setup) -> str:
    """The likely cause of a difference that comes in at `rung` with a value of `kind`, and the way out."""
    if kind == "evaluation":
        return _EVALUATION
    found = (_CAUSES.get((rung, condition)) for condition in _conditions(kind, setup))
    cause = next(filter(None, found), _CAPTURE)
    return f"{cause}. {_ACCEPT}" if rung is Rung.ACCUMULATION else cause


def _conditions(kind: str, setup: Setup) -> Iterator[str]:
    """What holds for a difference that begins with a value of `kind`, the most special first."""
    options = setup.fresh()
    labels = [leaf for _, target in setup.batches for leaf in flatten(target)[0] if isinstance(leaf, Tensor)]
    weighted = getattr(options.recipe.loss_fn, "weight", None) is not None
    if setup.remade:
        yield "remade"
    if any(is_batch_norm(each) and each.training for each in rooted(options.model.model).modules()):
        yield "batch norm"
    if kind == "loss" and (weighted or any(bool(leaf.eq(IGNORED).any()) for leaf in labels)):
        yield "loss of labels"
    if kind in ("option", "state", "parameter"):
        yield "update"
    yield from _habits(rooted(options.model.model))
    yield from (kind, "")


def _habits(model: nn.Module) -> Iterator[str]:
    """What `model` does that stages may see otherwise, by the names that its own code uses."""
    kinds = {base for each in model.modules() for base in type(each).__mro__}
    methods = [each for base in kinds if base.__module__.partition(".")[0] != "torch" for each in vars(base).values()]
    names = {name for each in methods if isfunction(each) for name in each.__code__.co_names}
    if names & {"grad_fn", "is_leaf", "data_ptr", "untyped_storage"}:
        yield "history"
    if any(name == f"{name.strip('_')}_" and name in dir(Tensor) for name in names - {"requires_grad_"}):
        yield "view"


_RULES: Mapping[str, Rule[Any]] = {"steps": integer(1), "accumulation": FLAG}


@dataclass(frozen=True, slots=True)
class _Way:
    train: Callable[..., TrainingRecord]
    plan: PlanOptions
    seeded: bool = True
    plain: bool = True
    """Whether it goes without the options that change numbers on purpose, as a plain loop does. They are judged beside
    `reference_train`.
    """

    def options_of(self, given: PipelineOptions) -> PipelineOptions:
        """The options `given`, but for those that rehearsals do without and those that are other ones on this way."""
        run = RunOptions(
            seed=given.run.seed if self.seeded else None,
            check=given.run.check,
            timeout_seconds=given.run.timeout_seconds,
            rehearses=True,
        )
        recipe = replace(given.recipe, on_nonfinite="raise")
        if self.plain:
            recipe = replace(recipe, wire_dtype=None, version_dtype=None, update_hooks=())
        return PipelineOptions(replace(given.model, init_fn=None), recipe, self.plan, run)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Holds what `rehearse` compared."""

    steps: int
    dtype: str
    """The type of the loss in all trainings."""
    comparisons: tuple[Comparison, ...]
    """The ends of the way; all of its steps if these differ."""
    not_judged: tuple[str, ...]
    """What a rehearsal left out, or could not see."""
    cause: str = ""
    """The likely cause of the first difference, and the way out; empty if there is none."""

    @property
    def difference(self) -> Difference | None:
        """The first difference, on the first step of the way that has one."""
        return next((each.difference for each in self.comparisons if each.difference is not None), None)

    def __str__(self) -> str:
        rows = [(f"{one.before}, {one.after}", _verdict(one)) for one in self.comparisons]
        width = max(len(pair) for pair, _ in rows)
        lines = [f"{self.steps} step(s) of training in {self.dtype}:"]
        lines += [f"  {pair:{width}}  {verdict}" for pair, verdict in rows]
        return "\n".join([*lines, *(f"  not judged: {text}" for text in self.not_judged)])


def rehearse(
    model: Any, batches: Iterable[Any] | None = None, *, steps: int = 3, accumulation: bool = False, **arguments: Any
) -> Rehearsal:
    """Trains copies of `model` for a few steps in a plain loop and in a pipeline, and compares all numbers.

    Args:
        model: as for `Pipeline`; or a function that makes it, for state that copies would share; or a function that
            returns a dict of all arguments, ``model`` and ``batches`` among them, for a loss or an optimizer that reads
            the model.
        batches: pairs ``(inputs, target)`` as `Pipeline.step` takes them, or the inputs only with `model_loss`.
        steps: how many of them are trained on.
        accumulation: True compares with a loop that adds up the gradients of microbatches, instead of one with the
            whole batch: for BatchNorm and other models that train otherwise in microbatches, which you accept.
        arguments: those of `Pipeline`. `stages` is 2 by default in a single process. And ``between``, a function of the
            model and the number of the step, for what your loop changes: it is called before each step but the first,
            in all trainings of schedules that flush.

    Losses, metrics, gradients, options and state of the optimizers, parameters and buffers are compared, and the loss
    of an evaluation at the end, up to rounding. The copies are float64 where the model can compute with it, and do
    without dropout. Asynchronous schedules are compared in two parts: a flushing schedule with the loop, and their own
    with `reference_train`. Under ``torchrun`` all processes call it.

    Returns what was compared. Raises `RehearsalError` with the first difference, its likely cause and the way out, and
    the errors of `Pipeline`. The model, the generators of random numbers and the optimizers stay as they are.
    """
    check_arguments("rehearse", _RULES, steps=steps, accumulation=accumulation)
    world = join_world()
    try:
        with kept_generators():
            setup, seen = _widest(read_setup(model, batches, steps, **arguments))
            cut = any(isinstance(inputs, Microbatches) for inputs, _ in setup.batches)
            return _Rehearsing(setup, seen, world, whole=not (accumulation or cut or seen.draws)).run()
    except RehearsalError:
        # All processes have it.
        raise
    except BaseException as error:
        world.report("in a rehearsal", error)
        raise
    finally:
        world.leave()


def _widest(setup: Setup) -> tuple[Setup, FirstLook]:
    """The training in float64 if the model computes with that, otherwise in its own types; with a first look at it."""
    model = setup.fresh().model.model
    if isinstance(model, nn.Module) and is_weightless(model):
        raise PenstockError(
            "rehearse(model=): expected a model with weights, found one on the meta device: pass a small configuration "
            "of it that has weights"
        )
    wide = setup.in_float64()
    try:
        return wide, look(wide)
    except PenstockError:
        raise
    except Exception:
        with _explained(Rung.LOOP):
            return setup, look(setup)


@dataclass(slots=True)
class _Rehearsing:
    setup: Setup
    seen: FirstLook
    world: World
    whole: bool
    """Whether the loop has the whole batch at once."""
    ways: dict[Rung, _Way] = field(default_factory=dict)
    made: dict[Rung, TrainingRecord] = field(default_factory=dict)
    compared: list[Comparison] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)

    def run(self) -> Rehearsal:
        given, between = self.setup.begin()
        parts, differs = self._plan_trainings(given)
        self._note_limits(given, parts)
        base = Rung.LOOP if self.whole else Rung.ACCUMULATION
        loop, eps = self._record(base), self.seen.eps
        self._require([base, Rung.AGAIN], measure_rounding(loop, loop, eps))
        rounding = measure_rounding(loop, self._train(base, shaken=eps), eps)
        alone = self.world.processes == 1
        way = {
            base: True,
            Rung.ACCUMULATION: parts > 1 or not self.whole,
            Rung.CHAIN: between is None and not loop.read_by_loss,
            Rung.ONE_STAGE: alone,
            Rung.STAGES: True,
        }
        if not self.seen.draws:
            self._require([rung for rung, is_made in way.items() if is_made], rounding)
        elif alone:
            # Layers of a pipeline draw numbers of their own, unless it has no seed.
            self._require([base, Rung.UNSEEDED], rounding)
            self._require([Rung.ONE_STAGE, Rung.STAGES], rounding)
        if differs:
            # The oracle takes the plan of the pipeline.
            self.ways[Rung.DELAYED] = _Way(train_by_chain, PlanOptions(self._record(Rung.AS_GIVEN).plan), plain=False)
            self._require([Rung.DELAYED, Rung.AS_GIVEN], rounding)
        return self._result()

    def _plan_trainings(self, given: PipelineOptions) -> tuple[int, bool]:
        """Sets `ways`. Returns the microbatches of a step, and whether the user's pipeline has other numbers than a
        plain loop on purpose: the others flush, and go without such options.
        """
        wanted, plan = replace(given.plan, tensor_parallel=None), given.plan.plan
        stages = wanted.stages or (2 if self.world.processes == 1 else None)
        definition, parts = wanted.definition, wanted.microbatches or 1
        if isinstance(plan, Plan):
            definition, parts, stages = plan.definition, plan.microbatches, len(plan.stages)
        else:
            wanted = replace(wanted, plan=None, stages=stages)
        schedule = definition if definition.flushes else None
        twin = replace(wanted, plan=None, stages=stages, microbatches=parts, schedule=schedule, vertical_sync=False)
        one = replace(twin, stages=1, schedule=None)
        whole, cut = replace(one, microbatches=1), one
        keeps_plan = wanted.plan is not None and definition.flushes
        self.ways = {
            Rung.LOOP: _Way(train_by_loop, whole),
            Rung.AGAIN: _Way(train_by_loop, whole if self.whole else cut),
            Rung.ACCUMULATION: _Way(train_by_loop, cut),
            Rung.CHAIN: _Way(train_by_chain, one),
            Rung.UNSEEDED: _Way(train_by_pipeline, one, seeded=False),
            Rung.ONE_STAGE: _Way(train_by_pipeline, one),
            Rung.STAGES: _Way(train_by_pipeline, replace(wanted, vertical_sync=False) if keeps_plan else twin),
            Rung.AS_GIVEN: _Way(train_by_pipeline, wanted, plain=False),
        }
        recipe = given.recipe
        changed = recipe.wire_dtype or recipe.version_dtype or recipe.update_hooks
        return parts, bool(changed or wanted.vertical_sync or not definition.flushes)

    def _note_limits(self, given: PipelineOptions, parts: int) -> None:
        unused = {
            "compile": given.run.compile,
            "parallelize": given.run.parallelize,
            "tensor_parallel": given.plan.tensor_parallel,
            "init_fn": given.model.init_fn,
            "on_nonfinite": given.recipe.on_nonfinite != "raise",
            "resume": given.run.resume,
        }
        left_out = [f"{name}=" for name, value in unused.items() if value]
        notes = {
            "the plan that is measured: stages of equal work instead": not isinstance(given.plan.plan, Plan | None),
            f"{', '.join(left_out)}, left out": bool(left_out),
            "dropout, switched off": self.setup.drops,
            "the whole batch at once, since the model draws random numbers": self.seen.draws and parts > 1,
            "an evaluation, in which your loop fails or draws random numbers": not self.seen.evaluates,
            "the types of the training: its copies are float64": self.setup.widened,
            "several processes: call it under torchrun, too": self.world.processes == 1,
            "what your loop does between steps, but for between=, and with .grad or the optimizer": True,
        }
        self.not_judged += [text for text, holds in notes.items() if holds]

    def _require(self, rungs: Sequence[Rung], rounding: Rounding) -> None:
        """Compares the ends of `rungs`, and every pair of them if these differ. Raises `RehearsalError` then."""
        ends = self._compare(rungs[0], rungs[-1], rounding)
        steps = {rungs[-1]: ends}
        if ends.difference is not None and len(rungs) > 2:
            usable = []
            for rung in rungs:
                # What the pipeline takes, others may refuse.
                with suppress(PenstockError):
                    self._record(rung)
                    usable.append(rung)
            steps = {after: self._compare(before, after, rounding) for before, after in pairwise(usable)}
            if not any(step.difference for step in steps.values()):
                # Not all trainings between them evaluate.
                steps[rungs[-1]] = ends
        self.compared += steps.values()
        if ends.difference is None:
            return
        rung, found = next((rung, step) for rung, step in steps.items() if step.difference)
        cause = _explain_cause(rung, (found.difference or ends.difference).kind, self.setup)
        result = replace(self._result(), cause=cause)
        raise RehearsalError(
            f"the numbers of {found.after} are not those of {found.before}. First {found.difference}\n"
            f"likely cause: {cause}\n{result}",
            result,
        )

    def _result(self) -> Rehearsal:
        dtype = next(iter(self.made.values())).dtype
        return Rehearsal(len(self.setup.batches), dtype, tuple(self.compared), tuple(self.not_judged))

    def _compare(self, before: Rung, after: Rung, rounding: Rounding) -> Comparison:
        """Collective: the first difference on any rank."""
        records = self._record(before), self._record(after)
        found = compare(before.value, after.value, records, rounding)
        mine = (found.largest, None if found.difference is None else astuple(found.difference))
        gathered = self.world.gather(mine, "comparing its trainings")
        differences = [Difference(*fields) for _, fields in gathered if fields is not None]
        return replace(found, largest=max(largest for largest, _ in gathered), difference=earliest(differences))

    def _record(self, rung: Rung) -> TrainingRecord:
        if rung not in self.made:
            self.made[rung] = self._train(rung)
        return self.made[rung]

    def _train(self, rung: Rung, shaken: float = 0.0) -> TrainingRecord:
        way = self.ways[rung]
        with _explained(rung):
            options, between = self.setup.begin(shaken)
            return way.train(way.options_of(options), self.setup.batches, between, evaluates=self.seen.evaluates)


@contextmanager
def _explained(rung: Rung) -> Iterator[None]:
    """Turns an error of the user's code, or a raw one of the pipeline, into one that says which training has it."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        loops = (Rung.LOOP, Rung.AGAIN, Rung.ACCUMULATION)
        cut = "an input that must not be cut into microbatches (edges of a graph: penstock.Microbatches)"
        rest = "correct it first" if rung in loops else f"your loop trains. Likely cause: {cut}, or {_SIDE_WAYS}"
        raise PenstockError(f"rehearse: {rung.value} fails with {type(error).__name__}: {error}; {rest}") from error


def _verdict(comparison: Comparison) -> str:
    if comparison.difference is not None:
        return "DIFFERENT"
    return "equal to the bit" if not comparison.largest else f"equal, {comparison.largest:.1g} of what rounding may do"
