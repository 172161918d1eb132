"""`rehearse`: the user's own loop beside a pipeline, and the step of the way from one to the other that differs.

The two ends of the way are compared first. Only where they differ, the trainings between them are made: each of them
does one thing more as the pipeline does it. So the first pair that differs names the cause.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from typing import Any, assert_never

from torch import nn

from penstock.arguments import FLAG, Rule, check_arguments, integer
from penstock.capturing.preservation import kept_generators
from penstock.capturing.weightless import is_weightless
from penstock.errors import PenstockError, RehearsalError
from penstock.pipeline import Pipeline
from penstock.rehearsing.causes import SIDE_WAYS, Rung, explain
from penstock.rehearsing.differences import Comparison, Difference, Rounding, compare, earliest
from penstock.rehearsing.first_looks import FirstLook, look
from penstock.rehearsing.setups import Setup, dropout_rates, read_setup
from penstock.rehearsing.training_records import TrainingRecord
from penstock.rehearsing.trainings import as_module, train_by_chain, train_by_loop, train_by_pipeline
from penstock.runtime.transport.worlds import World, join_world
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.training.user_microbatches import Microbatches
from penstock.values.plans import Plan, require_schedule

_RULES: Mapping[str, Rule[Any]] = {"steps": integer(1), "accumulation": FLAG}
_LEFT_OUT = ("compile", "parallelize", "tensor_parallel", "init_fn", "on_nonfinite")
"""Options of `Pipeline` that rehearsals do without."""
_OTHER_NUMBERS = ("wire_dtype", "version_dtype", "update_hooks", "scale_learning_rates", "vertical_sync")
"""Options that have other numbers than a plain loop on purpose: they are judged beside `reference_train`."""


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
        arguments: those of `Pipeline`. `stages` is 2 by default in a single process.

    Losses, metrics, gradients, options and state of the optimizers, parameters and buffers are compared, up to
    rounding. The copies are float64 where the model can compute with it, and do without dropout. Asynchronous schedules
    are compared in two parts: a flushing schedule with the loop, and their own with `reference_train`. Under
    ``torchrun`` all processes call it.

    Returns what was compared. Raises `RehearsalError` with the first difference, its likely cause and the way out, and
    the errors of `Pipeline`. The model, the generators of random numbers and the optimizers stay as they are.
    """
    check_arguments("rehearse", locals(), _RULES)
    with kept_generators():
        setup = read_setup(model, batches, steps, arguments)
        _check_names(setup.make())
        setup, seen = _widest(setup)
        world = join_world()
        try:
            return _Rehearsing(setup, seen, world, accumulation).run()
        finally:
            world.leave()


def _check_names(arguments: Mapping[str, Any]) -> None:
    known = set(inspect.signature(Pipeline).parameters)
    for name in arguments:
        if name not in known:
            raise PenstockError(f"rehearse({name}=): expected an argument of Pipeline, found another name: correct it")


def _widest(setup: Setup) -> tuple[Setup, FirstLook]:
    """The training in float64 if the model computes with that, otherwise in its own types; with a first look at it."""
    model = setup.fresh()["model"]
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
    """One rehearsal under way."""

    setup: Setup
    seen: FirstLook
    world: World
    accumulation: bool
    parts: int = 1
    """The microbatches of a step."""
    twin: dict[str, Any] = field(default_factory=dict)
    """The arguments that make the pipeline one that flushes, and has the numbers of a plain loop."""
    plan: Plan | None = None
    """That of the last pipeline."""
    made: dict[Rung, TrainingRecord] = field(default_factory=dict)
    compared: list[Comparison] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)

    def run(self) -> Rehearsal:
        given = self.setup.fresh()
        differs = self._choose(given)
        base = Rung.LOOP if self._whole() else Rung.ACCUMULATION
        loop = self._record(base)
        self._require([base, Rung.AGAIN], Rounding(loop, loop, self.seen.eps))
        rounding = Rounding(loop, self._train(base, shaken=self.seen.eps), self.seen.eps)
        for rungs in self._ladders(base):
            self._require(rungs, rounding)
        if differs:
            # The oracle takes the plan of the pipeline.
            self._record(Rung.AS_GIVEN)
            self._require([Rung.DELAYED, Rung.AS_GIVEN], rounding)
        return self._result()

    def _choose(self, given: Mapping[str, Any]) -> bool:
        """Sets `parts` and `twin`. Returns whether the pipeline of the user has other numbers than its twin."""
        plan: Any = given.get("plan")
        planned = isinstance(plan, Plan)
        definition = plan.definition if planned else require_schedule(given.get("schedule") or DEFAULT_SCHEDULE)
        self.parts = plan.microbatches if planned else given.get("microbatches") or 1
        stages = len(plan.stages) if planned else given.get("stages")
        if stages is None and self.world.processes == 1:
            stages = 2
        self.twin = {"wire_dtype": None, "version_dtype": None, "update_hooks": (), "vertical_sync": False}
        self.twin["scale_learning_rates"] = False
        if not (planned and definition.flushes):
            schedule = definition if definition.flushes else DEFAULT_SCHEDULE
            self.twin |= {"plan": None, "stages": stages, "microbatches": self.parts, "schedule": schedule}
        self._note_limits(given)
        return not definition.flushes or any(given.get(name) for name in _OTHER_NUMBERS)

    def _note_limits(self, given: Mapping[str, Any]) -> None:
        read = ", ".join(self.seen.read_by_loss[:1])
        left_out = [f"{name}=" for name in _LEFT_OUT if given.get(name)]
        planned = isinstance(given.get("plan"), Plan | None)
        notes = {
            "the plan that is measured: stages of equal work instead": not planned,
            f"{', '.join(left_out)}, left out": bool(left_out),
            "dropout, switched off": bool(dropout_rates(as_module(self.setup.make()["model"]))),
            "the whole batch at once, since the model draws random numbers": self.seen.draws and self.parts > 1,
            f"{read}, which the loss reads, where another process has it": bool(read) and self.world.processes == 1,
            "the types of the training: its copies are float64": self.setup.widened,
            "several processes: call it under torchrun, too": self.world.processes == 1,
            "what your loop does between steps, with .grad or with the options of the optimizer": True,
        }
        self.not_judged += [text for text, holds in notes.items() if holds]

    def _whole(self) -> bool:
        """Whether the loop has the whole batch at once."""
        cut = any(isinstance(inputs, Microbatches) for inputs, _ in self.setup.batches)
        return not (self.accumulation or cut or self.seen.draws)

    def _ladders(self, base: Rung) -> list[list[Rung]]:
        """Ways from one training to another that should have its numbers."""
        alone = self.world.processes == 1
        chain = [] if self.seen.read_by_loss or self.seen.draws else [Rung.CHAIN]
        if self.seen.draws:
            # Layers of a pipeline draw numbers of their own, unless it has no seed.
            return [[base, Rung.UNSEEDED], [Rung.ONE_STAGE, Rung.STAGES]] if alone else []
        accumulation = [Rung.ACCUMULATION] if base is Rung.LOOP and self.parts > 1 else []
        return [[base, *accumulation, *chain, *([Rung.ONE_STAGE] if alone else []), Rung.STAGES]]

    def _require(self, rungs: Sequence[Rung], rounding: Rounding) -> None:
        """Compares the ends of `rungs`, and every pair of them if these differ. Raises `RehearsalError` then."""
        ends = self._compare(rungs[0], rungs[-1], rounding)
        self.compared.append(ends)
        if ends.difference is None:
            return
        steps = [(rungs[-1], ends)]
        if len(rungs) > 2:
            usable = [rung for rung in rungs if self._is_made(rung)]
            steps = [(after, self._compare(before, after, rounding)) for before, after in pairwise(usable)]
        self.compared[-1:] = [comparison for _, comparison in steps]
        rung, found = next(((rung, step) for rung, step in steps if step.difference is not None), (rungs[-1], ends))
        assert found.difference is not None
        cause = explain(rung, found.difference, self.seen, self.setup)
        result = replace(self._result(), cause=cause)
        raise RehearsalError(
            f"the numbers of {found.after} are not those of {found.before}. First {found.difference}\n"
            f"likely cause: {cause}\n{result}",
            result,
        )

    def _result(self) -> Rehearsal:
        dtype = str(self.seen.dtype).removeprefix("torch.")
        return Rehearsal(len(self.setup.batches), dtype, tuple(self.compared), tuple(self.not_judged))

    def _compare(self, before: Rung, after: Rung, rounding: Rounding) -> Comparison:
        """Collective: the first difference on any rank."""
        one, other = self._record(before), self._record(after)
        found = compare((before.value, after.value), one, other, rounding)
        mine = (found.largest, None if found.difference is None else astuple(found.difference))
        gathered = self.world.gather(mine, "comparing its trainings")
        differences = [Difference(*fields) for _, fields in gathered if fields is not None]
        return replace(found, largest=max(largest for largest, _ in gathered), difference=earliest(differences))

    def _is_made(self, rung: Rung) -> bool:
        """Whether `rung` can be trained: what the pipeline takes, others may refuse."""
        try:
            self._record(rung)
        except PenstockError:
            return False
        return True

    def _record(self, rung: Rung) -> TrainingRecord:
        if rung not in self.made:
            with _explained(rung):
                self.made[rung] = self._train(rung)
        return self.made[rung]

    def _train(self, rung: Rung, shaken: float = 0.0) -> TrainingRecord:
        given = {name: value for name, value in self.setup.fresh(shaken).items() if name not in _LEFT_OUT}
        one = {"plan": None, "schedule": DEFAULT_SCHEDULE, "stages": 1, "microbatches": self.parts}
        match rung:
            case Rung.LOOP | Rung.AGAIN | Rung.ACCUMULATION:
                whole = rung is Rung.LOOP or (rung is Rung.AGAIN and self._whole())
                return train_by_loop(given, self.setup.batches, 1 if whole else self.parts)
            case Rung.CHAIN:
                return train_by_chain({**given, **self.twin, **one}, self.setup.batches)
            case Rung.DELAYED:
                return train_by_chain(given, self.setup.batches, self.plan)
            case Rung.UNSEEDED:
                given |= {**self.twin, **one, "seed": None}
            case Rung.ONE_STAGE:
                given |= {**self.twin, **one}
            case Rung.STAGES:
                given |= self.twin
            case Rung.AS_GIVEN:
                given |= {} if isinstance(given.get("plan"), Plan) else {"plan": None, "stages": self.twin["stages"]}
            case _:
                assert_never(rung)
        record, self.plan = train_by_pipeline(given, self.setup.batches)
        return record


@contextmanager
def _explained(rung: Rung) -> Iterator[None]:
    """Turns an error of the user's code, or a raw one of the pipeline, into one that says which training has it."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        loops = (Rung.LOOP, Rung.AGAIN, Rung.ACCUMULATION)
        rest = "correct it first" if rung in loops else f"your loop trains. Likely cause: {SIDE_WAYS}"
        raise PenstockError(f"rehearse: {rung.value} fails with {type(error).__name__}: {error}; {rest}") from error


def _verdict(comparison: Comparison) -> str:
    if comparison.difference is not None:
        return "DIFFERENT"
    return "equal to the bit" if not comparison.largest else f"equal, {comparison.largest:.1g} of what rounding may do"
