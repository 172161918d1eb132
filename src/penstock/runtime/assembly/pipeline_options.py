"""The arguments of `Pipeline`, which explains them, as values: what is trained, how it is planned, and how it runs.

`Recipe` has those of the training. Each value is checked when it is made. Values that only make sense together are
checked where they meet: a plan and a schedule in `choose_plan`, for one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.arguments import FLAG, PATH, SEED, Rule, check_fields, choice, function, instance, integer, number
from penstock.capturing.chain import StageModule
from penstock.capturing.initialization import InitFn
from penstock.capturing.model_kinds import check_model
from penstock.capturing.weightless import is_weightless
from penstock.errors import PenstockError, PlanError
from penstock.runtime.devices.host_stores import HOST
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.schedule_checks import require_common_updates
from penstock.training.recipes import Recipe
from penstock.values.plans import MICROBATCHES, Plan, require_schedule

Balance: TypeAlias = Literal["work", "layers", "measured"]
"""What stages have equal amounts of: estimated work, layers, or measured seconds."""
Check: TypeAlias = Literal["warn", "strict", "off"]
Parallelize: TypeAlias = Callable[[StageModule, DeviceMesh], nn.Module | None]
"""Changes a stage's module in place. The mesh has the dimensions ``dp`` and ``tp``."""
RecomputeChoice: TypeAlias = bool | str | Collection[int] | None
"""The value of ``recompute=``: which stages, or "layers" for each layer alone."""


def _is_plan(value: object) -> bool:
    """Whether `value` is a plan, a text, or a function that makes the plan for the processes that are there."""
    return isinstance(value, Plan | str) or (callable(value) and not isinstance(value, type))


_MODEL_RULES: Mapping[str, Rule[Any]] = {
    "init_fn": function(
        ("name", "tensor"), "pass one such as penstock.reset_parameters(model), which asks the modules themselves"
    ).optional
}
_PLAN_RULES: Mapping[str, Rule[Any]] = {
    "plan": Rule(
        "a penstock.Plan or 'auto'",
        _is_plan,
        lambda value: value,
        "make one with penstock.plan or Plan.uniform, or read one with penstock.Plan.load(path)",
    ).optional,
    "schedule": instance(
        (ScheduleDefinition, str),
        "the name of a schedule or a ScheduleDefinition",
        f"give one such as {DEFAULT_SCHEDULE}",
    ).optional,
    "microbatches": MICROBATCHES.optional,
    "stages": integer(1).optional,
    "tensor_parallel": integer(1).optional,
    "vertical_sync": FLAG,
    "balance": choice(get_args(Balance)),
    **dict.fromkeys(("state_on_host", "shard_optimizer"), FLAG),
    "memory_bytes": number(above=0).but("give the bytes of a device that a rank may take").optional,
}
OFFLOAD_TO = PATH.but(f"pass {HOST!r} for the memory of the host", f"{HOST!r} or a directory")
_RUN_RULES: Mapping[str, Rule[Any]] = {
    "parallelize": function(
        ("stage_module", "mesh"), "docs/composition.md shows one that applies tensor parallelism or fully_shard"
    ).optional,
    "check": choice(get_args(Check)),
    "resume": PATH.but("give the directory of a run", "a directory").optional,
    "save_frozen": FLAG,
    "offload_to": OFFLOAD_TO,
    "seed": SEED.but("give one such as 0, or None for PyTorch's own stream").optional,
}


@dataclass(frozen=True, slots=True)
class OptionRule:
    """What holds for an option beside the rule of its values."""

    agrees: Literal["value", "later", "own"]
    """How the options of ranks must agree: in the value (of a function or a plan, in that it is one); in what is made
    of it, which `check_agreement` and `check_optimizers` compare; not at all.
    """
    kept: bool = True
    """Whether a new plan keeps it. The others chose the plan."""


OPTIONS: Mapping[str, OptionRule] = {
    **dict.fromkeys(("model", "sample", "optimizer"), OptionRule("later")),
    **dict.fromkeys(
        (
            *("loss_fn", "loss_weight", "loss_scale", "lr_scheduler", "clip_grad_norm"),
            *("update_hooks", "on_nonfinite", "autocast", "version_dtype", "wire_dtype", "init_fn", "parallelize"),
            *("recompute", "state_on_host", "shard_optimizer", "compile", "seed", "check", "resume", "save_frozen"),
            "timeout_seconds",
        ),
        OptionRule("value"),
    ),
    **dict.fromkeys(
        ("plan", "schedule", "microbatches", "stages", "balance", "vertical_sync", "tensor_parallel", "memory_bytes"),
        OptionRule("value", kept=False),
    ),
    "offload_to": OptionRule("own"),
}
"""By name, all arguments of `Pipeline`. The value below that has one as a field checks it."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelOptions:
    """What is trained. Raises `CaptureError` for what is no model."""

    model: nn.Module | Sequence[nn.Module]
    sample: tuple[Any, ...] | dict[str, Any]
    init_fn: InitFn | None = None

    def __post_init__(self) -> None:
        check_model(self.model, "Pipeline")
        check_fields(self, _MODEL_RULES, function="Pipeline")


@dataclass(frozen=True, slots=True, eq=False)
class PlanOptions:
    """How it is planned; None leaves an option to the plan or the planner. Raises `PlanError`."""

    plan: Plan | str | Callable[[int], Plan] | None = None
    schedule: ScheduleDefinition | str | None = None
    microbatches: int | None = None
    stages: int | None = None
    balance: Balance = "work"
    vertical_sync: bool = False
    tensor_parallel: int | None = None
    recompute: RecomputeChoice = None
    state_on_host: bool = False
    shard_optimizer: bool = False
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, _PLAN_RULES, PlanError, function="Pipeline")
        if self.memory_bytes is not None and self.plan != "auto":
            raise PlanError(
                "memory_bytes= is the memory that plan='auto' plans for: expected both, found memory_bytes= alone. "
                "Pass plan='auto', or a plan that penstock.plan has made for a cluster with memory_bytes"
            )
        if self.schedule is not None:
            require_schedule(self.schedule)
        if self.plan is not None and self.balance != "work":
            raise PlanError(
                f"balance={self.balance!r} and plan= are both given: balance= chooses where stages begin, and a plan "
                "says it. Leave one of them out"
            )

    @property
    def definition(self) -> ScheduleDefinition:
        """The schedule that a plan gets."""
        return require_schedule(self.schedule or DEFAULT_SCHEDULE)

    def plan_for(self, processes: int) -> Plan | str | None:
        """`plan`, or what it returns for this number of `processes` if it is a function.

        `PlanError` if it returns something else than a plan.
        """
        if not callable(self.plan):
            return self.plan
        made = self.plan(processes)
        if not isinstance(made, Plan):
            raise PlanError(
                f"plan= is a function: expected that it returns a penstock.Plan for {processes} process(es), found "
                f'{made!r:.100}. Return one, or pass plan="auto" or no plan'
            )
        return made


@dataclass(frozen=True, slots=True, eq=False)
class RunOptions:
    compile: bool | Mapping[str, Any] = False
    parallelize: Parallelize | None = None
    seed: int | None = 0
    check: Check = "warn"
    resume: str | Path | None = None
    save_frozen: bool = True
    offload_to: str | Path = HOST
    timeout_seconds: float = 600.0
    rehearses: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _RUN_RULES, function="Pipeline")

    @property
    def watches(self) -> bool:
        """Whether objects that blocks of several stages hold are watched in every forward."""
        return self.rehearses or self.check == "strict"


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOptions:
    model: ModelOptions
    recipe: Recipe
    plan: PlanOptions
    run: RunOptions

    def __post_init__(self) -> None:
        if self.recipe.on_nonfinite == "rollback" and self.run.resume is None:
            raise PenstockError(
                "on_nonfinite='rollback' goes back to the newest checkpoint in the directory resume=: expected a "
                "directory, found None. Pass resume=directory, and save there, or pass on_nonfinite='skip'"
            )
        if self.recipe.needs_norms:
            given = self.plan.plan
            require_common_updates(given.definition if isinstance(given, Plan) else self.plan.definition)

    @property
    def whole_backwards(self) -> bool:
        """Whether schedules that split backwards are not planned for: `schedule_plan` refuses them or, with a hook of
        `parallelize=` that shards modules, may do so; or compiled layers leave little to weight backwards.
        """
        return bool(self.run.compile) or self.run.parallelize is not None or self.plan.recompute == "layers"

    def replanned(self, plan: Plan) -> "PipelineOptions":
        """The same with `plan` in place of what chose one. `PenstockError` if the model cannot be built on again."""
        if self.run.parallelize is not None:
            raise PenstockError(
                "replan(apply=): expected a pipeline without parallelize=, found one: its hook has changed the modules "
                "in place, and cannot be called on them again. Save, build model and Pipeline anew with plan=, and load"
            )
        # In a single process all weights are there by now.
        init_fn = self.model.init_fn if is_weightless(self.model.model) else None
        kept = {name: getattr(self.plan, name) for name in self.plan.__slots__ if OPTIONS[name].kept}
        chosen = PlanOptions(plan, **kept)
        return replace(self, model=replace(self.model, init_fn=init_fn), plan=chosen)
